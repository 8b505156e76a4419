"""The predicted timeline of a pipeline: a lane for each stage, its tasks, and where it waits.

Tasks too narrow to be told apart are drawn as shares of each stretch of some pixels: the lower part
of a column is forward, what stands on it backward, and what is left open is waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.drawing.scene import Color, Line, Rect, Scene, Text, text_width
from autoshard.figures.labels import PLAIN, SMALL, Entry, legend
from autoshard.figures.palette import GREY, INK, PALE, PAPER, TIME, WASH
from autoshard.figures.scale import Scale, number_text, time_unit
from autoshard.render.units import seconds_text

_COLUMN = 3.0
"""Pixels of a column of shares."""

_NARROW = 2.5
"""Mean width of a task in pixels below which shares are drawn."""

_MOST_LANES = 32
_PHASES = ("forward", "backward", "optimizer")

_Bar = Mapping[str, Any]


def stages(trace: _Bar, *, width: float) -> Scene:
    """The picture of a trace document with one process a stage.

    Args:
        trace: as :func:`autoshard.planner.stage_timeline.stages_trace` makes it.
        width: of the picture.
    """
    lanes: dict[int, list[_Bar]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event["cat"] == "compute":
            lanes[event["pid"]].append(event)
    end_s = max((_end(e) for bars in lanes.values() for e in bars), default=0.0) or 1e-6
    scene = Scene(width, 0.0, f"Predicted timeline of one step: {seconds_text(end_s)}")
    shown = sorted(lanes)[:_MOST_LANES]
    names = [f"stage {number}" if len(lanes) > 1 else "compute" for number in range(len(shown))]
    left = max(text_width(name, SMALL) for name in names) + 10 if names else 10.0
    right = width - 12
    x = Scale(low=0.0, high=end_s, start=left, end=right)
    y = 19.0
    scene.add(
        Text(x=2, y=y - 2, text="The whole step", size=PLAIN, bold=True, color=INK),
        Text(x=right, y=y - 2, text=seconds_text(end_s), size=PLAIN, anchor="end", color=GREY),
    )
    y += 6
    height = 26.0 if len(shown) <= 8 else 14.0
    first, under = y, len(scene.shapes)
    for pid, name in zip(shown, names, strict=True):
        bars = lanes[pid]
        scene.shapes.insert(under, Rect(x=left, y=y, width=right - left, height=height, fill=WASH))
        at = y + height / 2 + 4
        scene.add(Text(x=left - 6, y=at, text=name, size=SMALL, anchor="end", color=INK))
        busy = sum(e["dur"] for e in bars) * 1e-6
        if (x(busy) - x(0.0)) / len(bars) < _NARROW:
            _shares(scene, bars, x, y, height)
        else:
            _tasks(scene, bars, x, y, height)
        y += height + 3
    y = _axis(scene, x, first, y, under + len(shown))
    if len(lanes) > len(shown):
        rest = f"and {len(lanes) - len(shown)} stages more"
        scene.add(Text(x=2, y=y, text=rest, size=SMALL, color=GREY))
        y += 16
    busy = sum(e["dur"] for bars in lanes.values() for e in bars) * 1e-6
    waiting = 1 - busy / (end_s * max(1, len(lanes)))
    entries = [
        *(Entry(TIME[phase], phase) for phase in _PHASES),
        Entry(WASH, f"waiting: {waiting:.1%} of all stages' time"),
    ]
    scene.height = 4 + legend(scene, entries, x=2, y=y + 4, width=width - 4, ink=INK)
    return scene


def _end(event: _Bar) -> float:
    return float(event["ts"] + event["dur"]) * 1e-6


def _tasks(scene: Scene, bars: Sequence[_Bar], x: Scale, y: float, height: float) -> None:
    for event in bars:
        start, end = event["ts"] * 1e-6, _end(event)
        wide = x(end) - x(start)
        chunk = event["args"].get("chunk")
        where = f", {chunk}" if chunk else ""
        scene.add(
            Rect(
                x=x(start),
                y=y + 2,
                width=max(0.6, wide - 0.6),
                height=height - 4,
                fill=_color(event),
                tip=f"{event['name']}{where}: {seconds_text(end - start)}",
            )
        )
        text = str(event["args"].get("microbatch", ""))
        if height > 20 and text and text_width(text, 10.5) + 4 <= wide:
            middle = (x(start) + x(end)) / 2
            at = y + height / 2 + 4
            scene.add(Text(x=middle, y=at, text=text, size=10.5, anchor="middle", color=PAPER))


def _color(event: _Bar) -> Color:
    return TIME[event["args"]["phase"]]


def _shares(scene: Scene, bars: Sequence[_Bar], x: Scale, y: float, height: float) -> None:
    count = max(1, round((x.end - x.start) / _COLUMN))
    wide = (x.end - x.start) / count
    per_s = count / (x.high - x.low)
    found: dict[str, list[float]] = {phase: [0.0] * count for phase in _PHASES}
    for event in bars:
        start, end = event["ts"] * 1e-6 * per_s, _end(event) * per_s
        shares = found[event["args"]["phase"]]
        for index in range(int(start), min(count - 1, int(end)) + 1):
            shares[index] += max(0.0, min(end, index + 1) - max(start, index))
    for index in range(count):
        base = y + height
        for phase in _PHASES:
            part = min(1.0, found[phase][index]) * height
            if part >= 0.2:
                part = min(part, base - y)
                scene.add(
                    Rect(
                        x=x.start + index * wide,
                        y=base - part,
                        width=wide,
                        height=part,
                        fill=TIME[phase],
                    )
                )
                base -= part


def _axis(scene: Scene, x: Scale, first: float, y: float, under: int) -> float:
    unit = time_unit(x.high)
    at = Scale(low=0.0, high=x.high / unit.size, start=x.start, end=x.end)
    for value, text in _ticks(at, unit.name):
        half = text_width(text, SMALL) / 2
        scene.shapes.insert(under, Line(x1=at(value), y1=first, x2=at(value), y2=y, color=PALE))
        place = min(at(value), scene.width - half - 1)
        scene.add(Text(x=place, y=y + 14, text=text, size=SMALL, anchor="middle", color=GREY))
    return y + 28


def _ticks(at: Scale, unit: str) -> Iterator[tuple[float, str]]:
    for value in at.ticks(max(2, int((at.end - at.start) / 72))):
        yield value, f"{number_text(value)} {unit}" if value else "0"
