"""A cluster document as TOML, in the order of its fields, sources last."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

DIGITS = 4
"""Digits that a measurement is good for, and one more."""


def toml(document: Mapping[str, Any], title: str) -> str:
    """The text of a document of numbers, texts, lists of texts, and sections."""
    lines = [f"# {title}"]
    lines += _section((), {k: v for k, v in document.items() if k != "sources"})
    lines += _section(("sources",), document["sources"])
    return "\n".join(lines) + "\n"


def _section(path: tuple[str, ...], values: Mapping[str, Any]) -> Iterator[str]:
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping)}
    if path and plain:
        yield ""
        yield f"[{'.'.join(map(_key, path))}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _section((*path, key), value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return repr(float(f"{value:.{DIGITS}g}"))
    return json.dumps(value)
