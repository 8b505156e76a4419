"""Step time against memory: what was tried, what is best, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.drawing.scene import Circle, Color, Line, Path, Rect, Scene, Text, text_width
from autoshard.figures.labels import SMALL, Entry, Labels, around, legend
from autoshard.figures.palette import GREY, INK, PALE, PAPER, WASH
from autoshard.figures.scale import (
    Scale,
    Unit,
    byte_unit,
    linear,
    logarithmic,
    number_text,
    time_unit,
)
from autoshard.render.units import bytes_text, seconds_text

_LOG_FROM = 8.0
"""Ratio of the most to the least from which an axis is logarithmic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One configuration.

    Attributes:
        label: what it is, written beside it where there is room.
        kind: what its colour says, for the legend.
        color: of the kind.
        seconds: of one step.
        num_bytes: of the fullest device.
        fits: whether that is within the limit; what does not fit is hollow.
        chosen: whether it is the one that all this is about.
        short: a shorter label, for where the other has no room.
    """

    label: str
    kind: str
    color: Color
    seconds: float
    num_bytes: float
    fits: bool = True
    chosen: bool = False
    short: str = ""


def pareto(dots: Sequence[Dot]) -> list[Dot]:
    """Those that fit and than which none is both faster and leaner, by rising memory."""
    out: list[Dot] = []
    for dot in sorted((d for d in dots if d.fits), key=lambda d: (d.num_bytes, d.seconds)):
        if not out or dot.seconds < out[-1].seconds:
            out.append(dot)
    return out


def time_against_memory(
    title: str, dots: Sequence[Dot], *, limit_bytes: float | None = None, width: float
) -> Scene:
    """The scatter, with the front of the best and the limit.

    Args:
        title: for those who cannot see it.
        dots: what was tried.
        limit_bytes: of one device.
        width: of the picture.
    """
    height = min(400.0, max(280.0, width * 0.55))
    scene = Scene(width, height, title)
    times = [d.seconds for d in dots if d.seconds > 0]
    sizes = [d.num_bytes for d in dots]
    per_time = time_unit(max(times, default=1.0))
    log_time = bool(times) and max(times) > _LOG_FROM * min(times)
    left, right, top, bottom = 54.0, width - 14.0, 24.0, height - 40.0
    y = (
        logarithmic(times, bottom, top, 1.25)
        if log_time
        else linear(times, bottom, top, zero=bool(times) and min(times) < 0.5 * max(times))
    )
    known = [*sizes, *([limit_bytes] if limit_bytes and _near(limit_bytes, sizes) else [])]
    log_size = bool(sizes) and min(sizes) > 0 and max(known) > _LOG_FROM * min(sizes)
    spread = bool(sizes) and min(sizes) < 0.6 * max(known)
    x = logarithmic(known, left, right) if log_size else linear(known, left, right, zero=spread)
    per_byte = byte_unit((min if log_size else max)(known, default=1.0))
    labels = Labels(inside=(left + 1, top - 2, right + 12, bottom - 1))
    _axes(scene, x, y, per_byte, per_time, (left, top, right, bottom))
    if limit_bytes is not None and limit_bytes in known:
        _limit(scene, limit_bytes, x, top, bottom, right, labels)
    elif limit_bytes is not None:
        text = f"limit {bytes_text(limit_bytes)}: far to the right"
        scene.add(Text(x=right + 12, y=12, text=text, size=SMALL, anchor="end", color=GREY))
    front = pareto(dots)
    if len(front) > 1:
        _front(scene, front, x, y, labels)
    for dot in dots:
        r = 8.0 if dot.chosen else 5.5
        labels.keep_free(
            (x(dot.num_bytes) - r, y(dot.seconds) - r, x(dot.num_bytes) + r, y(dot.seconds) + r)
        )
    for dot in sorted(dots, key=lambda d: d.chosen):
        scene.add(
            Circle(
                x=x(dot.num_bytes),
                y=y(dot.seconds),
                radius=7.0 if dot.chosen else 5.0,
                fill=dot.color if dot.fits else PAPER,
                stroke=INK if dot.chosen else dot.color if not dot.fits else PAPER,
                stroke_width=2.2 if dot.chosen or not dot.fits else 1.0,
                tip=f"{dot.label}: {seconds_text(dot.seconds)}, {bytes_text(dot.num_bytes)}"
                + ("" if dot.fits else ", does not fit"),
            )
        )
    on_front = {id(d) for d in front}
    for dot in sorted(dots, key=lambda d: (not d.chosen, id(d) not in on_front, d.seconds)):
        choices = []
        for words in filter(None, (dot.label, dot.short)):
            mark = Text(x=0, y=0, text=words, size=SMALL, color=INK, bold=dot.chosen, halo=True)
            choices += around(mark, x(dot.num_bytes), y(dot.seconds), 10.0)
        labels.place(scene, choices)
    entries = [Entry(d.color, d.kind) for d in {d.kind: d for d in dots}.values()]
    if any(not d.fits for d in dots):
        entries.append(Entry(GREY, "does not fit (hollow)", hollow=True))
    if len(front) > 1:
        entries.append(Entry(GREY, "line: none is both faster and leaner"))
    scene.height = 4 + legend(scene, entries, x=2, y=height, width=width - 4, ink=INK)
    return scene


def _near(limit: float, sizes: Sequence[float]) -> bool:
    """Whether a limit is worth its room on the axis."""
    return limit < 2.5 * max(sizes, default=limit)


def _limit(
    scene: Scene,
    limit: float,
    x: Scale,
    top: float,
    bottom: float,
    right: float,
    labels: Labels,
) -> None:
    at = x(limit)
    if right - at > 3:
        beyond = Rect(x=at, y=top, width=right - at, height=bottom - top, fill=WASH)
        scene.shapes.insert(0, beyond)
    scene.add(Line(x1=at, y1=top, x2=at, y2=bottom, color=INK, width=1.4, dashed=True))
    labels.keep_free((at - 1, top, at + 1, bottom))
    text = f"limit {bytes_text(limit)}"
    half = text_width(text, SMALL, bold=True) / 2
    caption = text_width("step time, ms, log", SMALL) + 12
    at = min(max(at, caption + half), right + 12 - half)
    scene.add(Text(x=at, y=12, text=text, size=SMALL, anchor="middle", bold=True, color=INK))


def _axes(
    scene: Scene,
    x: Scale,
    y: Scale,
    per_byte: Unit,
    per_time: Unit,
    box: tuple[float, float, float, float],
) -> None:
    left, top, right, bottom = box
    across = Scale(
        low=x.low / per_byte.size, high=x.high / per_byte.size, start=left, end=right, log=x.log
    )
    up = Scale(
        low=y.low / per_time.size, high=y.high / per_time.size, start=bottom, end=top, log=y.log
    )
    for value in across.ticks(max(3, int((right - left) / 90))):
        at = across(value)
        scene.shapes.insert(0, Line(x1=at, y1=top, x2=at, y2=bottom, color=PALE))
        scene.add(
            Text(
                x=at,
                y=bottom + 16,
                text=number_text(value),
                size=SMALL,
                anchor="middle",
                color=GREY,
            )
        )
    for value in up.ticks(6):
        at = up(value)
        scene.shapes.insert(0, Line(x1=left, y1=at, x2=right, y2=at, color=PALE))
        scene.add(
            Text(
                x=left - 6, y=at + 4, text=number_text(value), size=SMALL, anchor="end", color=GREY
            )
        )
    step = f"step time, {per_time.name}" + (", log" if y.log else "")
    memory = f"memory of the fullest device, {per_byte.name}" + (", log" if x.log else "")
    scene.add(
        Text(x=2, y=12, text=step, size=SMALL, color=GREY),
        Text(
            x=(left + right) / 2,
            y=bottom + 33,
            text=memory,
            size=SMALL,
            anchor="middle",
            color=GREY,
        ),
    )


def _front(scene: Scene, front: Sequence[Dot], x: Scale, y: Scale, labels: Labels) -> None:
    points: list[tuple[float, float]] = []
    for dot in front:
        if points:
            points.append((x(dot.num_bytes), points[-1][1]))
        points.append((x(dot.num_bytes), y(dot.seconds)))
    scene.add(Path(points=tuple(points), stroke=GREY, width=1.5))
    for (ax, ay), (bx, by) in pairwise(points):
        labels.keep_free((min(ax, bx), min(ay, by), max(ax, bx), max(ay, by)))
