"""A picture as a list of shapes, which :mod:`svg` and :mod:`png` draw alike.

Units are pixels at scale 1, y grows downwards. Shapes are drawn in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Anchor = Literal["start", "middle", "end"]
Color = str
"""``#rrggbb``."""
Point = tuple[float, float]


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
class Path:
    """A line through points; closed and filled it is an area."""

    points: tuple[Point, ...]
    stroke: Color | None = None
    width: float = 1.0
    fill: Color | None = None
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
    """One line of text; ``y`` is its baseline.

    ``turned`` stands it upright, read from below: it then runs up from (x, y).
    """

    x: float
    y: float
    text: str
    size: float = 13.0
    anchor: Anchor = "start"
    color: Color = "#1f2933"
    bold: bool = False
    halo: bool = False
    turned: bool = False

    def box(self) -> tuple[float, float, float, float]:
        """About where it is: left, top, right, bottom."""
        width = text_width(self.text, self.size, bold=self.bold)
        before = {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        up, down = 0.78 * self.size, 0.22 * self.size
        if self.turned:
            return self.x - up, self.y + before - width, self.x + down, self.y + before
        return self.x - before, self.y - up, self.x - before + width, self.y + down


Shape = Rect | Line | Path | Circle | Text


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


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """About how wide a text is; no font is at hand where a picture is laid out.

    As in DejaVu Sans, the widest of the fonts that a reader may have: what has room there has room
    everywhere.
    """
    units = sum(_WIDTHS.get(c) or _other_width(c) for c in text)
    return size * units * (1.12 if bold else 1.0)


_WIDTHS = {
    **dict.fromkeys("iljI|'", 0.29),
    **dict.fromkeys("tfr.,:;!()[]- ", 0.37),
    **dict.fromkeys("0123456789", 0.64),
    **dict.fromkeys("mwMW@%", 0.95),
    **dict.fromkeys("=+<>~", 0.84),
}


def _other_width(c: str) -> float:
    """Capitals 0.7, small letters 0.61, scripts that are as wide as they are high 1.05."""
    return 1.05 if ord(c) >= 0x1100 and c != "\u2026" else 0.7 if c.isupper() else 0.61


def shortened(text: str, size: float, width: float, *, bold: bool = False) -> str:
    """``text``, cut in the middle with an ellipsis where it is wider than ``width``."""
    if text_width(text, size, bold=bold) <= width:
        return text
    keep = min(len(text) - 1, int(width / (0.29 * size)) + 1)
    while keep > 2 and text_width(_cut(text, keep), size, bold=bold) > width:
        keep -= 1
    return _cut(text, keep)


def _cut(text: str, keep: int) -> str:
    head = -(-keep // 2)
    return f"{text[:head].rstrip()}…{text[len(text) - keep + head :].lstrip()}"
