"""Telling people what is being done."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[str], None]


def reporter(progress: bool | Progress | None) -> Progress:
    """Where progress goes: the given function, or lines on stderr where that is a terminal."""
    if callable(progress):
        return progress
    if progress and sys.stderr.isatty():
        return lambda text: print(text, file=sys.stderr, flush=True)
    return lambda text: None
