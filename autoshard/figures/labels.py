"""Texts in a picture that do not lie on each other: a label that finds no room is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autoshard.drawing.scene import Color, Rect, Scene, Text, shortened, text_width

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

SMALL = 11.5
PLAIN = 12.5


def overlap(a: Box, b: Box, gap: float = 0.0) -> bool:
    """Whether two boxes are nearer than ``gap``."""
    return a[0] < b[2] + gap and b[0] < a[2] + gap and a[1] < b[3] + gap and b[1] < a[3] + gap


@dataclass(slots=True)
class Labels:
    """What is written, and what must stay free.

    Attributes:
        inside: where labels may be.
        taken: boxes that are taken.
    """

    inside: Box
    taken: list[Box] = field(default_factory=list)

    def keep_free(self, *boxes: Box) -> None:
        """No label may lie on these."""
        self.taken += boxes

    def place(self, scene: Scene, choices: Iterable[Text]) -> bool:
        """Write the first of the choices that has room; False where none has."""
        for text in choices:
            box = text.box()
            if (
                box[0] >= self.inside[0]
                and box[1] >= self.inside[1]
                and box[2] <= self.inside[2]
                and box[3] <= self.inside[3]
                and not any(overlap(box, other, 1.5) for other in self.taken)
            ):
                scene.add(text)
                self.taken.append(box)
                return True
        return False


def around(text: Text, x: float, y: float, away: float) -> list[Text]:
    """``text`` beside a point: right, left, above, below, and the corners."""
    mid = y + 0.3 * text.size
    up, down = y - away - 0.25 * text.size, y + away + 0.8 * text.size
    places: Sequence[tuple[float, float, str]] = (
        (x + away, mid, "start"),
        (x - away, mid, "end"),
        (x, up, "middle"),
        (x, down, "middle"),
        (x + away * 0.7, up, "start"),
        (x + away * 0.7, down, "start"),
        (x - away * 0.7, up, "end"),
        (x - away * 0.7, down, "end"),
    )
    return [
        replace(text, x=px, y=py, anchor=anchor)  # type: ignore[arg-type]  # one of the three
        for px, py, anchor in places
    ]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a legend: a swatch, a name, and a figure where there is one."""

    color: Color
    name: str
    value: str = ""
    hollow: bool = False


def legend(
    scene: Scene, entries: Sequence[Entry], *, x: float, y: float, width: float, ink: Color
) -> float:
    """Entries in as many columns as fit, from the top edge ``y``; returns the lower edge."""
    if not entries:
        return y
    values = max(text_width(e.value, PLAIN) for e in entries)
    room = width - 18 - (14 + values if values else 0)
    names = min(room, max(text_width(e.name, PLAIN) for e in entries))
    column = 18 + names + (14 + values if values else 0) + 26
    columns = max(1, min(len(entries), int((width + 26) // column)))
    rows = -(-len(entries) // columns)
    for number, entry in enumerate(entries):
        left = x + number // rows * column
        base = y + 13 + number % rows * 19
        scene.add(
            Rect(
                x=left,
                y=base - 9.5,
                width=11,
                height=11,
                radius=2,
                fill=None if entry.hollow else entry.color,
                stroke=entry.color if entry.hollow else None,
            ),
            Text(
                x=left + 18,
                y=base,
                text=shortened(entry.name, PLAIN, names),
                size=PLAIN,
                color=ink,
            ),
        )
        if entry.value:
            end = min(left + 18 + names + 14 + values, x + width)
            scene.add(Text(x=end, y=base, text=entry.value, size=PLAIN, anchor="end", color=ink))
    return y + rows * 19 + 2
