"""Quantities as people write them: ``72GiB``, ``5us``, ``2x``."""

from __future__ import annotations

import re

from autoshard.errors import RequestError

BYTES = {
    "": 1.0,
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
    "tib": 2.0**40,
}
"""Bytes of a unit, in small letters."""

SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

RATES = {"": 1.0, "g": 1e9, "t": 1e12, "p": 1e15}
"""Operations a second: ``989T``."""


def read(text: str, units: dict[str, float]) -> float | None:
    """A number above 0 with one of ``units``; None where it is not one."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = units.get(found[2].lower()) if found else None
    if found is None or unit is None:
        return None
    value = float(found[1]) * unit
    return value if value > 0 else None


def parse_bytes(option: str, text: str | None) -> int | None:
    """Bytes of ``72GiB``, ``80 GB`` or ``17179869184``.

    Raises:
        RequestError: not a number of bytes.
    """
    if text is None:
        return None
    value = read(text, BYTES)
    if value is None or value < 1:
        raise RequestError(
            f"{option} is {text!r}; write a number of bytes above 0, with a unit if you like: "
            "72GiB, 80GB, 17179869184"
        )
    return int(value)


def parse_seconds(option: str, text: str | None) -> float | None:
    """Seconds of ``50ms``, ``200us`` or ``0.05``.

    Raises:
        RequestError: not a time.
    """
    if text is None:
        return None
    value = read(text, SECONDS)
    if value is None:
        raise RequestError(
            f"{option} is {text!r}; write a time above 0, in seconds or with a unit: 50ms, 0.05"
        )
    return value
