"""Two axes with their ticks, and what is said beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.drawing.scene import Line, Scene, Text, shortened
from autoshard.figures.labels import SMALL, overlap
from autoshard.figures.palette import GREY, PALE
from autoshard.figures.scale import Scale, Unit, number_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis.

    Attributes:
        scale: from values to pixels.
        caption: what it shows, without its unit.
        unit: what the ticks are counted in.
        ticks: values that get one; None: round ones.
        suffix: written behind each tick, as ``%``.
    """

    scale: Scale
    caption: str
    unit: Unit | None = None
    ticks: Sequence[float] | None = None
    suffix: str = ""

    def marks(self, count: int) -> list[tuple[float, str]]:
        """Pixel and text of each tick."""
        size = self.unit.size if self.unit else 1.0
        counted = replace(self.scale, low=self.scale.low / size, high=self.scale.high / size)
        values = counted.ticks(count) if self.ticks is None else [v / size for v in self.ticks]
        return [(counted(v), number_text(v) + self.suffix) for v in values]

    @property
    def said(self) -> str:
        """The caption with the unit, and whether an axis of round ticks is logarithmic."""
        parts = [
            self.caption,
            self.unit.name if self.unit else "",
            "log" if self.scale.log and self.ticks is None else "",
        ]
        return ", ".join(p for p in parts if p)


def frame(scene: Scene, x: Axis, y: Axis) -> None:
    """Grid, ticks and captions; ``y``'s stands above the axis, level, ``x``'s below its ticks."""
    left, right = x.scale.start, x.scale.end
    bottom, top = y.scale.start, y.scale.end
    written: list[tuple[float, float, float, float]] = []
    for at, text in x.marks(max(3, int((right - left) / 80))):
        scene.shapes.insert(0, Line(x1=at, y1=top, x2=at, y2=bottom, color=PALE))
        _tick(
            scene,
            Text(x=at, y=bottom + 16, text=text, size=SMALL, anchor="middle", color=GREY),
            written,
        )
    for at, text in y.marks(max(3, int((bottom - top) / 45))):
        scene.shapes.insert(0, Line(x1=left, y1=at, x2=right, y2=at, color=PALE))
        _tick(
            scene,
            Text(x=left - 6, y=at + 4, text=text, size=SMALL, anchor="end", color=GREY),
            written,
        )
    scene.add(
        Text(x=2, y=top - 12, text=y.said, size=SMALL, color=GREY),
        Text(
            x=(left + right) / 2,
            y=bottom + 33,
            text=shortened(x.said, SMALL, right - left),
            size=SMALL,
            anchor="middle",
            color=GREY,
        ),
    )


def _tick(scene: Scene, text: Text, written: list[tuple[float, float, float, float]]) -> None:
    box = text.box()
    if not any(overlap(box, other, 4.0) for other in written):
        scene.add(text)
        written.append(box)
