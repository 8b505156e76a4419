"""The predicted timeline: the whole step by how busy each track is, and one block close up.

Thousands of events do not fit into some hundred pixels. The whole step is therefore drawn as
shares: how high a track stands says how much of that moment it is busy. One repeated block (a
layer in the middle) is drawn event by event, forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.drawing.scene import Color, Line, Path, Rect, Scene, Text, shortened, text_width
from autoshard.figures.labels import PLAIN, SMALL, Entry, legend
from autoshard.figures.palette import BLUE, GREY, INK, PALE, PAPER, TIME, WASH
from autoshard.figures.scale import Scale, number_text, time_unit
from autoshard.render.units import bytes_text, seconds_text

_LANE = 26.0
_BIN = 2.0
"""Pixels that one share is of."""

_WAITED, _HIDDEN = TIME["communication not hidden"], TIME["communication hidden"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """One bar of the trace, in seconds; ``waited_s`` of it, at its end, hold up the program."""

    name: str
    phase: str
    start_s: float
    end_s: float
    waited_s: float
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Track:
    name: str
    is_compute: bool
    events: tuple[_Event, ...]

    def busy_in(self, span: tuple[float, float]) -> bool:
        return any(e.start_s < span[1] and span[0] < e.end_s for e in self.events)


def timeline(trace: Mapping[str, Any], *, width: float) -> Scene:
    """The picture of a trace document that holds one step of one rank.

    Args:
        trace: as :func:`autoshard.planner.timeline.predicted_trace` makes it.
        width: of the picture.
    """
    tracks, phases = _read(trace)
    end_s = max((e.end_s for t in tracks for e in t.events), default=0.0) or 1e-6
    scene = Scene(width, 0.0, f"Predicted timeline of one step: {seconds_text(end_s)}")
    left = min(max((text_width(t.name, SMALL) for t in tracks), default=40.0), 0.24 * width) + 10
    y = _window(scene, tracks, phases, (0.0, end_s), left, 4.0, "The whole step", close=False)
    block = _block(tracks)
    for phase in ("forward", "backward"):
        span = _span(tracks, block, phase)
        if block and span:
            y = _window(scene, tracks, (), span, left, y + 14, f"{block}, {phase}", close=True)
    entries = [
        Entry(BLUE, "compute"),
        Entry(_WAITED, "communication, compute waits"),
        Entry(_HIDDEN, "communication beside compute"),
    ]
    scene.height = 4 + legend(scene, entries, x=2, y=y + 4, width=width - 4, ink=INK)
    return scene


# ---- reading ------------------------------------------------------------------------------------


def _read(trace: Mapping[str, Any]) -> tuple[list[_Track], list[tuple[str, float, float]]]:
    compute: list[_Event] = []
    axes: dict[tuple[int, str], list[_Event]] = {}
    phases: list[tuple[str, float, float]] = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        start, args = event["ts"] * 1e-6, event["args"]
        end = start + event["dur"] * 1e-6
        if event["cat"] == "phase":
            phases.append((event["name"], start, end))
            continue
        waited = args.get("blocked_us", 0.0) * 1e-6
        tip = f"{event['name']}: {seconds_text(end - start)}"
        if event["cat"] == "comm":
            tip += f", {bytes_text(args['bytes'])} over {args['axis']} ({args['value']})"
        found = _Event(
            name=event["name"],
            phase=args.get("phase", ""),
            start_s=start,
            end_s=end,
            waited_s=min(waited, end - start),
            tip=tip,
        )
        if event["cat"] == "comm":
            axes.setdefault((event["tid"], args["axis"]), []).append(found)
        else:
            compute.append(found)
    tracks = [_Track(name="compute", is_compute=True, events=tuple(compute))]
    tracks += [
        _Track(name=axis, is_compute=False, events=tuple(events))
        for (_, axis), events in sorted(axes.items())
    ]
    return tracks, phases


def _block(tracks: Sequence[_Track]) -> str:
    """Module path of the middle one of the blocks that repeat most, or nothing."""
    found: Counter[tuple[str, str]] = Counter()
    for event in tracks[0].events:
        parts = event.name.split(":")[0].split(".")
        for index, part in enumerate(parts):
            if part.isdecimal():
                found[".".join(parts[:index]), part] += 1
                break
    if not found:
        return ""
    frames: Counter[str] = Counter()
    for (frame, _), count in found.items():
        frames[frame] += count
    frame = frames.most_common(1)[0][0]
    numbers = sorted(int(number) for name, number in found if name == frame)
    number = numbers[len(numbers) // 2]
    return f"{frame}.{number}" if frame else str(number)


def _span(tracks: Sequence[_Track], block: str, phase: str) -> tuple[float, float] | None:
    """From when to when a block computes, with the messages right before and after."""
    mine = [
        e
        for e in tracks[0].events
        if e.phase == phase and (e.name + ".").startswith((f"{block}.", f"{block}:"))
    ]
    if not mine:
        return None
    start, end = min(e.start_s for e in mine), max(e.end_s for e in mine)
    room = 0.03 * (end - start)
    return max(0.0, start - room), end + room


# ---- drawing ------------------------------------------------------------------------------------


def _window(
    scene: Scene,
    tracks: Sequence[_Track],
    phases: Sequence[tuple[str, float, float]],
    span: tuple[float, float],
    left: float,
    top: float,
    title: str,
    *,
    close: bool,
) -> float:
    """All tracks from one moment to another; returns the lower edge."""
    right = scene.width - 12
    if close:
        tracks = [t for t in tracks if t.busy_in(span)]
    x = Scale(low=span[0], high=span[1], start=left, end=right)
    y = top + 15
    scene.add(
        Text(
            x=2,
            y=y - 2,
            text=shortened(title, PLAIN, scene.width - 90, bold=True),
            size=PLAIN,
            bold=True,
            color=INK,
        ),
        Text(
            x=right,
            y=y - 2,
            text=seconds_text(span[1] - span[0]),
            size=PLAIN,
            anchor="end",
            color=GREY,
        ),
    )
    y += 6
    if phases:
        y = _phases(scene, phases, x, y)
    first, under = y, len(scene.shapes)
    for track in tracks:
        scene.shapes.insert(under, Rect(x=left, y=y, width=right - left, height=_LANE, fill=WASH))
        scene.add(
            Text(
                x=left - 6,
                y=y + _LANE / 2 + 4,
                text=shortened(track.name, SMALL, left - 10),
                size=SMALL,
                anchor="end",
                color=INK,
            ),
        )
        if close:
            _bars(scene, track, span, x, y)
        else:
            _shares(scene, track, x, y)
        y += _LANE + 4
    unit = time_unit(span[1] - span[0])
    at = Scale(low=0.0, high=(span[1] - span[0]) / unit.size, start=left, end=right)
    for value in at.ticks(max(2, int((right - left) / 72))):
        text = f"{number_text(value)} {unit.name}" if value else "0"
        half = text_width(text, SMALL) / 2
        line = Line(x1=at(value), y1=first, x2=at(value), y2=y, color=PALE)
        scene.shapes.insert(under + len(tracks), line)
        scene.add(
            Text(
                x=min(at(value), scene.width - half - 1),
                y=y + 14,
                text=text,
                size=SMALL,
                anchor="middle",
                color=GREY,
            ),
        )
    return y + 20


def _phases(scene: Scene, phases: Sequence[tuple[str, float, float]], x: Scale, y: float) -> float:
    free = x.start - 4
    for name, start, end in phases:
        color: Color = TIME.get(name, GREY)
        begin = x(start)
        scene.add(
            Rect(
                x=begin,
                y=y + 14,
                width=max(1.0, x(end) - begin - 1),
                height=4,
                fill=color,
                tip=f"{name}: {seconds_text(end - start)}",
            )
        )
        at = min(begin, x.end + 10 - text_width(name, SMALL))
        if at >= free + 4:
            scene.add(Text(x=at, y=y + 10, text=name, size=SMALL, color=GREY))
            free = at + text_width(name, SMALL)
    return y + 22


def _shares(scene: Scene, track: _Track, x: Scale, y: float) -> None:
    """How much of each moment a track is busy, as areas: what is waited for, the rest on it."""
    count = max(1, round((x.end - x.start) / _BIN))
    waited, busy = [0.0] * count, [0.0] * count
    per_s = count / (x.high - x.low)
    for event in track.events:
        _spread(busy, event.start_s * per_s, event.end_s * per_s)
        since = event.start_s if track.is_compute else event.end_s - event.waited_s
        _spread(waited, since * per_s, event.end_s * per_s)
    base = y + _LANE
    if track.is_compute:
        _area(scene, busy, x, base, BLUE)
        return
    _area(scene, busy, x, base, _HIDDEN)
    _area(scene, waited, x, base, _WAITED)


def _spread(shares: list[float], start: float, end: float) -> None:
    """Add what lies between two places, in bins, to each bin."""
    last = len(shares) - 1
    for index in range(max(0, int(start)), min(last, int(end)) + 1):
        shares[index] += max(0.0, min(end, index + 1) - max(start, index))


def _area(scene: Scene, shares: Sequence[float], x: Scale, base: float, color: Color) -> None:
    """Steps, without the stretches in which nothing happens."""
    wide = (x.end - x.start) / len(shares)
    points: list[tuple[float, float]] = []
    for index, share in enumerate([*shares, 0.0]):
        height = min(1.0, share) * _LANE
        if height < 0.2:
            if points:
                points.append((points[-1][0], base))
                scene.add(Path(points=tuple(points), fill=color))
                points = []
            continue
        left = x.start + index * wide
        if not points:
            points.append((left, base))
        if len(points) > 1 and abs(points[-1][1] - (base - height)) < 0.3:
            points[-1] = (left + wide, points[-1][1])
            continue
        points += [(left, base - height), (left + wide, base - height)]


def _bars(scene: Scene, track: _Track, span: tuple[float, float], x: Scale, y: float) -> None:
    """Each event, with its name where that has room."""
    for event in track.events:
        start, end = max(event.start_s, span[0]), min(event.end_s, span[1])
        if end <= start:
            continue
        turn = end if track.is_compute else max(start, min(end, event.end_s - event.waited_s))
        for begin, stop, color in (
            (start, turn, BLUE if track.is_compute else _HIDDEN),
            (turn, end, _WAITED),
        ):
            if stop > begin:
                scene.add(
                    Rect(
                        x=x(begin),
                        y=y + 2,
                        width=max(0.6, x(stop) - x(begin) - 0.4),
                        height=_LANE - 4,
                        fill=color,
                        tip=event.tip,
                    )
                )
        name = event.name.rsplit(": ", 1)[-1]
        where = event.name.rsplit(": ", 1)[0].rsplit(".", 1)[-1]
        room = x(end) - x(start) - 6
        for text in (f"{where}: {name}" if where != name else name, name, where):
            if text_width(text, 10.5) <= room and (track.is_compute or turn <= start):
                scene.add(
                    Text(
                        x=(x(start) + x(end)) / 2,
                        y=y + _LANE / 2 + 4,
                        text=text,
                        size=10.5,
                        anchor="middle",
                        color=PAPER,
                    )
                )
                break
