"""Lying bars, each the sum of its parts, with a limit where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.drawing.scene import Color, Line, Rect, Scene, Text, shortened, text_width
from autoshard.figures.labels import PLAIN, SMALL, Entry, legend
from autoshard.figures.palette import GREY, INK, PALE, VERMILION
from autoshard.figures.scale import Scale, Unit, number_text

EDGE = 12.0
"""Room at the left and the right, for half a tick's label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a bar; names in the legend come in the order in which they are first seen."""

    name: str
    value: float
    color: Color


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar.

    Attributes:
        label: what it is of.
        parts: from left to right.
        note: written behind its label, or behind the bar where the label is beside it.
        bad: whether its note is a warning.
    """

    label: str
    parts: tuple[Part, ...]
    note: str = ""
    bad: bool = False

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(p.value for p in self.parts)


def stacked_bars(
    title: str,
    bars: Sequence[Bar],
    *,
    width: float,
    unit: Unit,
    value_text: Callable[[float], str],
    mark: tuple[float, str] | None = None,
    marked: int | None = None,
    compact: bool = False,
    in_legend: bool = True,
) -> Scene:
    """The bars from top to bottom on one axis that begins at 0.

    Args:
        title: for those who cannot see it.
        bars: what to draw.
        width: of the picture.
        unit: of the axis.
        value_text: a value as people read it.
        mark: a value that gets a line through bars, and what it is.
        marked: how many bars, from the top, it goes through; None: all.
        compact: labels beside the bars, for many of them.
        in_legend: whether the legend has the values, where each part is of one bar.
    """
    scene = Scene(width, 0.0, title)
    most = max([b.total for b in bars] + ([mark[0]] if mark else []), default=0.0) or unit.size
    left, right = EDGE, width - EDGE
    if compact:
        names = max((text_width(b.label, SMALL) for b in bars), default=0.0)
        left = min(names, 0.42 * width) + 10
        right = min([right, *(_room(b, left, width, most) for b in bars)])
    scale = Scale(low=0.0, high=most * (1.0 if compact else 1.03), start=left, end=right)
    top = 20.0 if mark else 4.0
    y = top
    if mark:
        mark_end = top + (19.0 if compact else 52.0) * (len(bars) if marked is None else marked)
        _mark(scene, mark, scale, mark_end, width)
    for bar in bars:
        y = (_row if compact else _headed)(scene, bar, y, scale, value_text)
    _axis(scene, scale, unit, top, y, width)
    y = _legend(scene, bars, y + 26, width, value_text if in_legend else None)
    scene.height = y + 4
    return scene


def _room(bar: Bar, left: float, width: float, most: float) -> float:
    """Where the axis may end at most, so that a bar's note has room behind it."""
    free = width - 10 - text_width(bar.note, SMALL) - left
    return left + max(free, 0.2 * width) * most / bar.total if bar.total else width


def _headed(
    scene: Scene, bar: Bar, y: float, scale: Scale, value_text: Callable[[float], str]
) -> float:
    """A bar under its label."""
    left, width = scale.start - EDGE + 2, scene.width - 4
    label = shortened(bar.label, PLAIN, width, bold=True)
    scene.add(Text(x=left, y=y + 14, text=label, size=PLAIN, bold=True, color=INK, halo=True))
    color = VERMILION if bar.bad else GREY
    x = left + text_width(label, PLAIN, bold=True) + 10
    if x + text_width(bar.note, PLAIN) > width:
        y, x = y + 17, left
    if bar.note:
        note = shortened(bar.note, PLAIN, width)
        scene.add(Text(x=x, y=y + 14, text=note, size=PLAIN, color=color, halo=True))
    _parts(scene, bar, y + 20, 20.0, scale, value_text)
    return y + 52


def _row(
    scene: Scene, bar: Bar, y: float, scale: Scale, value_text: Callable[[float], str]
) -> float:
    """A bar beside its label."""
    label = shortened(bar.label, SMALL, scale.start - 10)
    scene.add(Text(x=2, y=y + 12, text=label, size=SMALL, color=INK))
    _parts(scene, bar, y + 2, 13.0, scale, value_text)
    if bar.note:
        color = VERMILION if bar.bad else GREY
        x = scale(bar.total) + 6
        scene.add(Text(x=x, y=y + 12, text=bar.note, size=SMALL, color=color, halo=True))
    return y + 19


def _parts(
    scene: Scene,
    bar: Bar,
    y: float,
    height: float,
    scale: Scale,
    value_text: Callable[[float], str],
) -> None:
    done = 0.0
    for part in bar.parts:
        x, end = scale(done), scale(done + part.value)
        done += part.value
        if end - x < 0.05:
            continue
        tip = f"{bar.label}: {part.name} {value_text(part.value)}"
        scene.add(Rect(x=x, y=y, width=end - x, height=height, fill=part.color, tip=tip))


def _axis(scene: Scene, scale: Scale, unit: Unit, top: float, bottom: float, width: float) -> None:
    in_units = Scale(low=0.0, high=scale.high / unit.size, start=scale.start, end=scale.end)
    span = scale.end - scale.start
    ticks = in_units.ticks(max(2, int(span / 80)))
    for value in ticks:
        x = in_units(value)
        scene.shapes.insert(0, Line(x1=x, y1=top, x2=x, y2=bottom + 4, color=PALE))
        text = f"{number_text(value)} {unit.name}" if value else "0"
        half = text_width(text, SMALL) / 2
        at = min(max(x, half + 1), width - half - 1)
        scene.add(Text(x=at, y=bottom + 18, text=text, size=SMALL, anchor="middle", color=GREY))


def _mark(scene: Scene, mark: tuple[float, str], scale: Scale, bottom: float, width: float) -> None:
    value, text = mark
    x = scale(value)
    scene.add(Line(x1=x, y1=16, x2=x, y2=bottom - 6, color=INK, width=1.6, dashed=True))
    size = SMALL
    needs = text_width(text, size, bold=True)
    x = min(max(x, needs / 2 + 2), width - needs / 2 - 2)
    scene.add(Text(x=x, y=11, text=text, size=size, anchor="middle", bold=True, color=INK))


def _legend(
    scene: Scene,
    bars: Sequence[Bar],
    y: float,
    width: float,
    value_text: Callable[[float], str] | None,
) -> float:
    found: dict[str, list[Part]] = {}
    for bar in bars:
        for part in bar.parts:
            if part.value > 0:
                found.setdefault(part.name, []).append(part)
    alone = value_text is not None and all(len(parts) == 1 for parts in found.values())
    entries = [
        Entry(parts[0].color, name, value_text(parts[0].value) if alone and value_text else "")
        for name, parts in found.items()
    ]
    return legend(scene, entries, x=2, y=y, width=width - 4, ink=INK)
