"""A picture as a list of shapes, which :mod:`svg` and :mod:`png` draw alike.

Units are pixels at scale 1, y grows downwards. Shapes are drawn in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Anchor = Literal["start", "middle", "end"]
Color = str
"""``#rrggbb``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rect:
    """A rectangle, with a tooltip where the format has any."""

    x: float
    y: float
    width: float
    height: float
    fill: Color | None = None
    stroke: Color | None = None
    stroke_width: float = 1.0
    radius: float = 0.0
    dashed: bool = False
    tip: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    color: Color
    width: float = 1.0
    dashed: bool = False
    tip: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """A disc."""

    x: float
    y: float
    radius: float
    fill: Color
    stroke: Color
    stroke_width: float = 1.5
    tip: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One line of text; ``y`` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 13.0
    anchor: Anchor = "start"
    color: Color = "#1f2933"
    bold: bool = False
    halo: bool = False


Shape = Rect | Line | Circle | Text


@dataclass(slots=True)
class Scene:
    """A picture of a given size."""

    width: float
    height: float
    title: str
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Draw on top."""
        self.shapes += shapes


def tint(color: Color, share: float) -> Color:
    """``color`` with ``share`` of it left, the rest white."""
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - p) * share):02x}" for p in parts)


def text_width(text: str, size: float) -> float:
    """About how wide a text is; no font is at hand where a picture is laid out."""
    narrow = sum(c in "iljtfr.,:;|!'()[] 1" for c in text)
    wide = sum(c in "mwMW@%" for c in text)
    return size * (0.56 * (len(text) - narrow - wide) + 0.32 * narrow + 0.86 * wide)
