"""``AUTOSHARD_TRACE_COMM=1``: every call's communication as a Chrome trace, and as lines of text.

The file opens in Perfetto or chrome://tracing: one process a rank, in it one track for compute,
one for each mesh axis (or set of axes), and one for the stretches known by name. Times are in
microseconds; a message that was issued while an earlier one over the same axes was under way is
shown from the end of that one, and ``issued_us`` says when it was issued. What other tools look
for is ``distributedInfo.rank`` and ``world_size``.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoshard import chrome
from autoshard.errors import RequestError
from autoshard.runtime.watch.records import CallTrace, Interval, RankTrace, bytes_text

VARIABLE = "AUTOSHARD_TRACE_COMM"
DEFAULT_FILE = "comm_trace.json"
_OFF = ("", "0", "false", "no", "off")


def is_tracing() -> bool:
    """Whether the environment asks for a trace."""
    return os.environ.get(VARIABLE, "").lower() not in _OFF


def trace_file() -> Path:
    """Where the trace goes: ``comm_trace.json`` here, or the path in the variable."""
    value = os.environ.get(VARIABLE, "")
    return Path(value if value.endswith(".json") else DEFAULT_FILE)


def step_lines(call: CallTrace) -> list[str]:
    """``step 0: all_reduce 256 MB over data``, one line a kind of message."""
    sums: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for record in call.ranks[0].collectives:
        sums[record.op, record.axis] += record.bytes
        counts[record.op, record.axis] += 1
    if not sums:
        return [f"step {call.step}: no communication"]
    return [
        f"step {call.step}: {op} {bytes_text(num_bytes)} over {axis}"
        + (f" ({counts[op, axis]} messages)" if counts[op, axis] > 1 else "")
        for (op, axis), num_bytes in sums.items()
    ]


# ---- the document -----------------------------------------------------------------------------


def document(calls: Sequence[CallTrace]) -> dict[str, Any]:
    """The trace of all calls and ranks as one Chrome trace document."""
    first_s = min((t.start_s for call in calls for t in call.ranks), default=0.0)
    tracks = _tracks(calls)
    events: list[dict[str, Any]] = []
    ranks = sorted({t.rank for call in calls for t in call.ranks})
    for rank in ranks:
        events += chrome.names(rank, tracks)
    for call in calls:
        for trace in call.ranks:
            events += _events(call, trace, tracks, first_s)
    about = [{"step": call.step, "name": call.name, "mesh": dict(call.axes)} for call in calls]
    return chrome.document(
        events, world_size=len(ranks), backend=_backend(calls), about={"calls": about}
    )


def _backend(calls: Sequence[CallTrace]) -> str:
    return "gloo" if all(call.device == "cpu" for call in calls) else "nccl"


def _tracks(calls: Sequence[CallTrace]) -> dict[str, int]:
    """Track number of each axis, or set of axes, that carried a message, and of each mesh axis."""
    names = [axis for call in calls for axis in call.axes]
    names += [r.axis for call in calls for t in call.ranks for r in t.collectives]
    return chrome.axis_tracks(names)


def _events(
    call: CallTrace, trace: RankTrace, tracks: Mapping[str, int], first_s: float
) -> list[dict[str, Any]]:
    def event(
        name: str, kind: str, track: int, start_s: float, end_s: float, **args: object
    ) -> dict[str, Any]:
        return chrome.bar(
            name,
            kind,
            rank=trace.rank,
            track=track,
            start_s=start_s - first_s,
            end_s=end_s - first_s,
            args={"step": call.step, **args},
        )

    out = [
        event(call.name, "compute", chrome.COMPUTE_TRACK, start, end)
        for start, end in gaps(trace.start_s, trace.end_s, trace.blocked())
    ]
    out += [event(s.name, "phase", chrome.PHASE_TRACK, s.start_s, s.end_s) for s in trace.spans]
    free_s: dict[int, float] = {}  # events of one track must not overlap, unless they nest
    for number, record in enumerate(trace.collectives):
        predicted = predicted_s(call, record.op, record.axes, record.bytes)
        args: dict[str, object] = {
            "op": record.op,
            "axis": record.axis,
            "bytes": record.bytes,
            "phase": record.phase,
            "value": record.value,
            "number": number,
            "issued_us": chrome.microseconds(record.start_s - first_s),
            "measured_us": chrome.microseconds(record.duration_s),
            "blocked_us": chrome.microseconds(record.blocked_s),
        }
        if predicted is not None:
            args["predicted_us"] = chrome.microseconds(predicted)
        track = tracks[record.axis]
        start_s, free = record.start_s, free_s.get(track, 0.0)
        if record.end_s > free:
            start_s = max(start_s, free)
            free_s[track] = record.end_s
        out.append(event(record.op, "comm", track, start_s, record.end_s, **args))
    at_s = trace.end_s - first_s
    for kind, num_bytes in trace.memory_bytes.items():
        out.append(chrome.memory(kind, rank=trace.rank, at_s=at_s, num_bytes=num_bytes))
    return out


def gaps(start: float, end: float, blocked: Sequence[Interval]) -> list[Interval]:
    """What is left of a stretch without the blocked intervals."""
    out: list[Interval] = []
    at = start
    for begin, stop in blocked:
        if begin > at:
            out.append((at, begin))
        at = max(at, stop)
    if end > at:
        out.append((at, end))
    return out


def predicted_s(call: CallTrace, op: Any, axes: tuple[str, ...], num_bytes: int) -> float | None:
    """What the cost model says of a collective, or None where it does not know the devices."""
    price = _prices(call.device, call.shape)
    if price is None:
        return None
    names = tuple(call.axes)
    seconds: float = price(op, tuple(names.index(axis) for axis in axes), num_bytes)
    return seconds


@lru_cache
def _prices(device: str, shape: tuple[int, ...]) -> Any:
    from math import prod

    from autoshard.cluster import Cluster

    if device != "cpu":
        return None
    return Cluster.preset("local", prod(shape)).collective_seconds(shape)


# ---- keeping and writing ----------------------------------------------------------------------


class _Log:
    """The calls of this process; written at exit, and by :func:`write`."""

    def __init__(self) -> None:
        self.calls: list[CallTrace] = []
        self.owner = os.getpid()

    def add(self, call: CallTrace) -> None:
        if not self.calls:
            atexit.register(self.write)
        self.calls.append(call)
        for line in step_lines(call):
            print(line, flush=True)

    def write(self) -> None:
        if self.calls and os.getpid() == self.owner:
            path = trace_file()
            try:
                save(self.calls, path)
            except OSError as error:
                print(f"autoshard: cannot write {path}: {error.strerror}", file=sys.stderr)
            else:
                print(f"wrote {path} ({len(self.calls)} steps)", flush=True)


_log = _Log()


def log(call: CallTrace) -> None:
    """Keep a call for the file, and print its lines."""
    _log.add(call)


def next_step() -> int:
    """Number of the next call that is logged."""
    return len(_log.calls)


def save(calls: Sequence[CallTrace], path: str | Path) -> None:
    """Write calls as one trace file; it is there whole, or not at all.

    What is no file, such as ``/dev/null``, is written to as it is.
    """
    path = Path(path)
    text = json.dumps(document(calls), separators=(",", ":")) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def load(path: str | Path) -> dict[str, Any]:
    """Read a trace file of autoshard.

    Raises:
        RequestError: no such file, no JSON, or a trace without communication of autoshard's.
    """
    path = Path(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f"cannot read trace {path}: {error.strerror}; run the program with {VARIABLE}=1 to "
            f"get one"
        ) from error
    except ValueError as error:
        raise RequestError(f"trace {path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise RequestError(f"{path} is not a Chrome trace: it has no list 'traceEvents'")
    about = found.get("autoshard")
    if not isinstance(about, dict) or about.get("version") != chrome.VERSION:
        raise RequestError(
            f"trace {path} was not written by this version of autoshard; run the program with "
            f"{VARIABLE}=1 to get one"
        )
    return found
