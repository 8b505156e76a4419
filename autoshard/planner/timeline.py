"""The predicted timeline of one step, in the form of a measured one.

Every operator and message of the simulation that gave the plan's step time is an event, as the
device at coordinate 0 sees it. A model of many layers has more than a viewer likes to open: above
``MOST_EVENTS`` the operators of one module that follow each other without a gap become one event,
by ever shorter module paths (``layers.3.mlp.up_proj``, ``layers.3.mlp``, ``layers.3``), then
messages that follow each other with nothing between, and in the end neighbours on a track whatever
they are. ``args`` of such an event say how many it stands for, and the document says what was done.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from autoshard import chrome
from autoshard.assemble import program_of
from autoshard.errors import RequestError
from autoshard.graph import ModelGraph
from autoshard.plan import Memory, PlanDocument
from autoshard.planner.predicted import model_of, trace_document
from autoshard.planner.stage_timeline import stages_trace
from autoshard.program import Program
from autoshard.search.price import Event, Priced, price

MOST_EVENTS = 7500
"""Bars in a document: some 250 bytes each, so that it stays about 2 MB at most."""

_LONGEST_NAME = 120
_SAME_MOMENT_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """One event, or several that became one.

    ``track`` is an axis (or set of axes), or empty for compute; ``place`` the module path in
    parts; ``what`` the operators, or the collective, with how many of each.
    """

    track: str
    place: tuple[str, ...]
    what: tuple[tuple[str, int], ...]
    phase: str
    start_s: float
    end_s: float
    busy_s: float
    issued_s: float
    blocked_s: float = 0.0
    num_bytes: int = 0
    value: str = ""

    @property
    def count(self) -> int:
        return sum(n for _, n in self.what)


def predicted_trace(
    graph: ModelGraph, plan: PlanDocument, *, most_events: int = MOST_EVENTS
) -> dict[str, Any]:
    """The predicted timeline of one step of ``plan`` as a Chrome trace document.

    Args:
        graph: of the model that the plan was made for.
        plan: the plan.
        most_events: bars that the document may have.

    Raises:
        RequestError: the plan was made for another graph.
    """
    program = program_of(graph, plan)
    if not plan.schedule.is_plain:
        return stages_trace(program, plan, most_events)
    priced = simulated(program, plan)
    bars = [*_compute(program, priced), *_messages(program, priced)]
    bars, merged = _fewer(bars, most_events)
    tracks = chrome.axis_tracks([*plan.mesh.active[0], *(b.track for b in bars if b.track)])
    events = chrome.names(0, tracks, f"rank 0, predicted ({plan.model.name})")
    events += [_event(bar, tracks) for bar in bars]
    events += _phases(priced)
    at_s = priced.step_time.total_s
    for kind, num_bytes in _memory(plan.memory).items():
        events.append(chrome.memory(kind, rank=0, at_s=at_s, num_bytes=num_bytes))
    return trace_document(plan, events, merged)


def save_trace(document: dict[str, Any], path: str | Path) -> None:
    """Write a trace; compressed where the name ends in ``.gz``.

    Raises:
        RequestError: it cannot be written.
    """
    path = Path(path)
    data = (json.dumps(document, separators=(",", ":")) + "\n").encode()
    try:
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; name another file") from error


def simulated(program: Program, plan: PlanDocument) -> Priced:
    """The figures of a plan's program, with every event."""
    model = model_of(program, plan)
    return price(model, program, memory_limit=plan.memory.limit_bytes, timeline=True)


# ---- what happens -------------------------------------------------------------------------------


def _compute(program: Program, priced: Priced) -> list[_Bar]:
    by_name = program.graph.by_name
    out = []
    for event in priced.timeline:
        if event.stream != "compute":
            continue
        node = by_name.get(event.name)
        what = event.name if node is None else node.family.split(".", 1)[-1]
        place = tuple(node.module.split(".")) if node is not None and node.module else ()
        out.append(_bar(event, track="", place=place, what=what, value=event.name))
    return out


def _messages(program: Program, priced: Priced) -> list[_Bar]:
    out = []
    goes_on_s = max(  # until when something else than a fused message keeps the program busy
        (
            e.start_s + e.seconds
            for e in priced.timeline
            if not e.is_fused and e.phase != "optimizer"
        ),
        default=0.0,
    )
    for event in priced.timeline:
        message = event.message
        if message is None:
            continue
        end = event.start_s + event.seconds
        since = max(goes_on_s, event.start_s) if event.is_fused else event.issued_s
        out.append(
            replace(
                _bar(
                    event,
                    track=" x ".join(message.axes),
                    place=_place(program.graph, message.value),
                    what=f"fused {message.op}" if event.is_fused else message.op,
                    value=_value(program.graph, message.value),
                ),
                issued_s=event.issued_s,
                blocked_s=max(0.0, end - since),
                num_bytes=message.num_bytes,
            )
        )
    return out


def _bar(event: Event, *, track: str, place: tuple[str, ...], what: str, value: str) -> _Bar:
    return _Bar(
        track=track,
        place=place,
        what=((what, 1),),
        phase=event.phase,
        start_s=event.start_s,
        end_s=event.start_s + event.seconds,
        busy_s=event.seconds,
        issued_s=event.start_s,
        value=value,
    )


def _place(graph: ModelGraph, name: str) -> tuple[str, ...]:
    node = graph.by_name[name]
    path = str(node.attrs.get("fqn", "")) if node.is_leaf else node.module
    return tuple(path.split(".")) if path else ()


def _value(graph: ModelGraph, name: str) -> str:
    """A value as people know it: a parameter's dotted name, else the node's."""
    node = graph.by_name[name]
    return str(node.attrs.get("fqn") or node.attrs.get("path") or name)


def _phases(priced: Priced) -> list[dict[str, Any]]:
    time = priced.step_time
    turns = (0.0, time.forward_s, time.forward_s + time.backward_s, time.total_s)
    return [
        chrome.bar(
            name,
            "phase",
            rank=0,
            track=chrome.PHASE_TRACK,
            start_s=start,
            end_s=end,
            args={"step": 0},
        )
        for name, start, end in zip(
            ("forward", "backward", "optimizer"), turns, turns[1:], strict=False
        )
        if end > start
    ]


def _memory(memory: Memory) -> dict[str, int]:
    """As a measured timeline names it; what the reserve is kept for is not seen there either."""
    return {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_bytes,
        "peak": memory.total_bytes - memory.reserve_bytes,
    }


# ---- fewer events -------------------------------------------------------------------------------


def _fewer(bars: list[_Bar], most: int) -> tuple[list[_Bar], str]:
    """At most ``most`` bars, and in words what became of the others."""
    if len(bars) <= most:
        return bars, "nothing: each operator and each message is an event"
    depth = max(len(b.place) for b in bars)
    for parts in range(depth, -1, -1):
        fewer = _joined(bars, partial(_module, parts))
        if len(fewer) <= most:
            return fewer, (
                "operators that follow each other in one module are one event; "
                f"modules by the first {parts} parts of their path"
            )
    fewer = _joined(fewer, lambda bar: bar.track or None)
    if len(fewer) <= most:
        return fewer, "operators, and messages over one axis, that follow each other are one event"
    return _chunks(fewer, most), "neighbours on a track are one event, what lies between included"


def _module(parts: int, bar: _Bar) -> tuple[str, ...] | None:
    return None if bar.track else bar.place[:parts]


def _joined(bars: Sequence[_Bar], key: Callable[[_Bar], object]) -> list[_Bar]:
    """Neighbours on a track that touch, of one phase and one key; a key of None joins nothing."""
    out: list[_Bar] = []
    for bar in bars:
        last = out[-1] if out else None
        if (
            last is not None
            and key(bar) is not None
            and (last.track, last.phase, key(last)) == (bar.track, bar.phase, key(bar))
            and abs(bar.start_s - last.end_s) <= _SAME_MOMENT_S
        ):
            out[-1] = _join(last, bar)
        else:
            out.append(bar)
    return out


def _chunks(bars: Sequence[_Bar], most: int) -> list[_Bar]:
    tracks = dict.fromkeys(b.track for b in bars)
    size = -(-len(bars) // max(1, most - 3 * len(tracks)))  # each phase of a track has a remainder
    out: list[_Bar] = []
    for track in tracks:
        for phase in ("forward", "backward", "optimizer"):
            mine = [b for b in bars if b.track == track and b.phase == phase]
            for first in range(0, len(mine), size):
                joined = mine[first]
                for bar in mine[first + 1 : first + size]:
                    joined = _join(joined, bar)
                out.append(joined)
    return out


def _join(a: _Bar, b: _Bar) -> _Bar:
    what = Counter(dict(a.what))
    what.update(dict(b.what))
    common = [p for p, q in zip(a.place, b.place, strict=False)]
    for index, (p, q) in enumerate(zip(a.place, b.place, strict=False)):
        if p != q:
            common = common[:index]
            break
    return replace(
        a,
        place=tuple(common),
        what=tuple(what.items()),
        end_s=b.end_s,
        busy_s=a.busy_s + b.busy_s,
        blocked_s=a.blocked_s + b.blocked_s,
        num_bytes=a.num_bytes + b.num_bytes,
    )


# ---- as JSON ------------------------------------------------------------------------------------


def _event(bar: _Bar, tracks: dict[str, int]) -> dict[str, Any]:
    args: dict[str, object] = {"step": 0, "phase": bar.phase}
    module = _short(".".join(bar.place))
    if bar.track:
        name = _listed(bar.what) if bar.count > 1 else bar.what[0][0]
        args |= {
            "op": bar.what[0][0].removeprefix("fused "),
            "axis": bar.track,
            "bytes": bar.num_bytes,
            "value": _short(bar.value),
            "issued_us": chrome.microseconds(bar.issued_s),
            "predicted_us": chrome.microseconds(bar.busy_s),
            "blocked_us": chrome.microseconds(bar.blocked_s),
        }
        if bar.count > 1:
            args["messages"] = bar.count
        kind, track = "comm", tracks[bar.track]
    else:
        operators = f"{bar.count} operators" if bar.count > 1 else bar.what[0][0]
        name = f"{module}: {operators}" if module else operators
        args["predicted_us"] = chrome.microseconds(bar.busy_s)
        if bar.count > 1:
            args |= {"operators": bar.count, "of them": _listed(bar.what)}
        kind, track = "compute", chrome.COMPUTE_TRACK
    return chrome.bar(
        name, kind, rank=0, track=track, start_s=bar.start_s, end_s=bar.end_s, args=args
    )


def _listed(what: Iterable[tuple[str, int]]) -> str:
    """``linear x 4, add x 2``: the most frequent ones."""
    most = sorted(what, key=lambda item: -item[1])
    text = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in most[:4])
    return text + (", ..." if len(most) > 4 else "")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_NAME else "..." + text[3 - _LONGEST_NAME :]
