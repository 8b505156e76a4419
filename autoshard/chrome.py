"""The form of a timeline that Perfetto and chrome://tracing open.

What a program measured and what a plan predicts are written alike, so that both open side by side:
one process a rank, in it one track for compute, one for the stretches known by name, and one for
each mesh axis, or set of axes, that carries messages. Times in a document are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VERSION = 1

COMPUTE_TRACK = 0
PHASE_TRACK = 1
_FIRST_AXIS_TRACK = 2


def axis_tracks(axes: Iterable[str]) -> dict[str, int]:
    """Track number of each axis, or set of axes, in the order in which they come."""
    return {name: _FIRST_AXIS_TRACK + n for n, name in enumerate(dict.fromkeys(axes))}


def names(rank: int, tracks: Mapping[str, int], process: str = "") -> list[dict[str, Any]]:
    """The events that name a rank's process (``rank 0`` if left out) and its tracks."""
    named = {COMPUTE_TRACK: "compute", PHASE_TRACK: "phases"}
    named |= {number: f"comm: {axis}" for axis, number in tracks.items()}
    out = [
        _meta(rank, 0, "process_name", name=process or f"rank {rank}"),
        _meta(rank, 0, "process_sort_index", sort_index=rank),
    ]
    for number, name in named.items():
        out.append(_meta(rank, number, "thread_name", name=name))
        out.append(_meta(rank, number, "thread_sort_index", sort_index=number))
    return out


def _meta(rank: int, track: int, kind: str, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}


def microseconds(seconds: float) -> float:
    """As a document holds it: to a nanosecond."""
    return round(seconds * 1e6, 3)


def bar(
    name: str,
    kind: str,
    *,
    rank: int,
    track: int,
    start_s: float,
    end_s: float,
    args: Mapping[str, object],
) -> dict[str, Any]:
    """One bar; ``kind`` is ``compute``, ``comm`` or ``phase``."""
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank,
        "tid": track,
        "ts": microseconds(start_s),
        "dur": microseconds(max(0.0, end_s - start_s)),
        "args": dict(args),
    }


def memory(kind: str, *, rank: int, at_s: float, num_bytes: int) -> dict[str, Any]:
    """What a category of memory holds at a moment."""
    return {
        "ph": "C",
        "name": f"memory: {kind}",
        "pid": rank,
        "tid": 0,
        "ts": microseconds(at_s),
        "args": {"bytes": num_bytes},
    }


def document(
    events: Sequence[Mapping[str, Any]],
    *,
    world_size: int,
    backend: str,
    about: Mapping[str, object],
) -> dict[str, Any]:
    """The whole file; ``distributedInfo`` is what other tools look for."""
    return {
        "displayTimeUnit": "ms",
        "distributedInfo": {"rank": 0, "world_size": world_size, "backend": backend},
        "autoshard": {"version": VERSION, **about},
        "traceEvents": list(events),
    }
