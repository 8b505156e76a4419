"""Sections of a document that hold figures by name, checked name by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.errors import RequestError


def mapping(where: str, document: object) -> dict[str, Any]:
    """The section at ``where``.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(document, Mapping):
        raise RequestError(f"{where} must be a section, found {document!r}")
    return {str(k): v for k, v in document.items()}


def check_names(where: str, values: Mapping[str, Any], known: list[str]) -> None:
    """Refuse names that are not known.

    Raises:
        RequestError: names the field and those that are known.
    """
    for name in values:
        if name not in known:
            raise RequestError(f"{where}.{name} is unknown; known: {', '.join(known)}")


def number(where: str, value: object) -> float:
    """A number from 0.

    Raises:
        RequestError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise RequestError(f"{where} must be a number from 0, found {value!r}")
    return float(value)
