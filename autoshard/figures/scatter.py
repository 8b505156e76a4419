"""Step time against memory: what was tried, what is best, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.drawing.scene import Circle, Color, Line, Path, Rect, Scene, Text, text_width
from autoshard.figures.labels import SMALL, Entry, Labels, around, legend
from autoshard.figures.palette import GREY, INK, PAPER, WASH
from autoshard.figures.plot import Axis, frame
from autoshard.figures.scale import Scale, byte_unit, linear, logarithmic, time_unit
from autoshard.render.units import bytes_text, seconds_text

_LOG_FROM = 8.0
"""Ratio of the most to the least from which an axis is logarithmic."""

_MOST_NAMED = 32
"""Of more dots only the best are named; the others have their tooltips."""


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
    title: str,
    dots: Sequence[Dot],
    *,
    limit_bytes: float | None = None,
    what: str = "step time",
    width: float,
) -> Scene:
    """The scatter, with the front of the best and the limit.

    Args:
        title: for those who cannot see it.
        dots: what was tried.
        limit_bytes: of one device.
        what: the seconds are of.
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
    up = Axis(scale=y, caption=what, unit=per_time)
    frame(scene, Axis(scale=x, caption="memory of the fullest device", unit=per_byte), up)
    if limit_bytes is not None and limit_bytes in known:
        _limit(scene, limit_bytes, x, up, labels)
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
    named = [d for d in dots if len(dots) <= _MOST_NAMED or d.chosen or id(d) in on_front]
    for dot in sorted(named, key=lambda d: (not d.chosen, id(d) not in on_front, d.seconds)):
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


def _limit(scene: Scene, limit: float, x: Scale, up: Axis, labels: Labels) -> None:
    at, right, top, bottom = x(limit), x.end, up.scale.end, up.scale.start
    if right - at > 3:
        beyond = Rect(x=at, y=top, width=right - at, height=bottom - top, fill=WASH)
        scene.shapes.insert(0, beyond)
    scene.add(Line(x1=at, y1=top, x2=at, y2=bottom, color=INK, width=1.4, dashed=True))
    labels.keep_free((at - 1, top, at + 1, bottom))
    text = f"limit {bytes_text(limit)}"
    half = text_width(text, SMALL, bold=True) / 2
    caption = text_width(up.said, SMALL) + 12
    at = min(max(at, caption + half), right + 12 - half)
    scene.add(Text(x=at, y=12, text=text, size=SMALL, anchor="middle", bold=True, color=INK))


def _front(scene: Scene, front: Sequence[Dot], x: Scale, y: Scale, labels: Labels) -> None:
    points: list[tuple[float, float]] = []
    for dot in front:
        if points:
            points.append((x(dot.num_bytes), points[-1][1]))
        points.append((x(dot.num_bytes), y(dot.seconds)))
    scene.add(Path(points=tuple(points), stroke=GREY, width=1.5))
    for (ax, ay), (bx, by) in pairwise(points):
        labels.keep_free((min(ax, bx), min(ay, by), max(ax, bx), max(ay, by)))
