"""``with profiler() as prof:``: what the calls inside it communicated, and what that cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from statistics import fmean

from autoshard.runtime.watch.records import (
    CallTrace,
    CollectiveRecord,
    RankTrace,
    bytes_text,
    seconds_text,
)

_ALIKE = 1.05  # a rank is named the slowest if it computes this much longer than the median


class Profiler:
    """What was seen of the calls made while it was open.

    Attributes:
        calls: one trace a call, in order.
    """

    def __init__(self) -> None:
        self.calls: list[CallTrace] = []

    @property
    def collectives(self) -> list[CollectiveRecord]:
        """The collectives of all calls, in the order in which one device (rank 0) issued them."""
        return [record for call in self.calls for record in call.ranks[0].collectives]

    def summary(self) -> str:
        """Compute time, communication time, how much was hidden, and memory, rank by rank.

        Times are per call, as the program on each rank saw them: *compute* is all time in which it
        did not stand still for a message, *hidden* is communication beside which it went on. A
        message counts from its issue until it is done (on backends that do not tell: until it was
        waited for), time for a slower partner included.
        """
        if not self.calls:
            return "no call of an @spmd function was seen"
        first = self.calls[0]
        world = len(first.ranks)
        calls = [call for call in self.calls if len(call.ranks) == world]
        names = list(dict.fromkeys(call.name for call in calls))
        lines = [
            f"{len(calls)} call{'s' if len(calls) > 1 else ''} of {', '.join(names)} on {world} "
            f"{'processes' if first.device == 'cpu' else 'devices'} "
            f"({', '.join(f'{n}={s}' for n, s in first.axes.items())}), mean of a call",
            "",
            *_table([_row(rank, calls) for rank in range(world)]),
            "",
            *_slowest(calls),
            *_messages(calls),
            *_memory(calls),
        ]
        if len(calls) < len(self.calls):
            lines.append(
                f"not shown: {len(self.calls) - len(calls)} calls on meshes of other sizes"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<profiler: {len(self.calls)} calls, {len(self.collectives)} collectives>"


def _of(rank: int, calls: list[CallTrace]) -> list[RankTrace]:
    return [call.ranks[rank] for call in calls]


def _row(rank: int, calls: list[CallTrace]) -> list[str]:
    traces = _of(rank, calls)
    communication = fmean(t.communication_s for t in traces)
    hidden = fmean(t.hidden_s for t in traces)
    share = f" ({hidden / communication:.0%})" if communication else ""
    return [
        str(rank),
        seconds_text(fmean(t.wall_s for t in traces)),
        seconds_text(fmean(t.compute_s for t in traces)),
        seconds_text(communication),
        seconds_text(hidden) + share,
        f"{fmean(len(t.collectives) for t in traces):.3g}",
        bytes_text(fmean(sum(r.bytes for r in t.collectives) for t in traces)),
    ]


def _table(rows: list[list[str]]) -> list[str]:
    head = ["rank", "total", "compute", "communication", "of it hidden", "messages", "bytes"]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [head, *rows]
    ]


def _slowest(calls: list[CallTrace]) -> list[str]:
    """Who computes longest: the others wait for it."""
    seconds = [fmean(t.compute_s for t in _of(r, calls)) for r in range(len(calls[0].ranks))]
    if len(seconds) == 1:
        return []
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    median = sorted(seconds)[(len(seconds) - 1) // 2]
    if seconds[slowest] < median * _ALIKE:
        return ["slowest: none, all ranks compute about equally long"]
    return [
        f"slowest: rank {slowest}, computes {seconds_text(seconds[slowest])} where the median is "
        f"{seconds_text(median)} ({seconds[slowest] / median - 1:+.0%})"
    ]


def _messages(calls: list[CallTrace]) -> list[str]:
    """Rank 0's messages by kind."""
    found: dict[tuple[str, str, str], list[CollectiveRecord]] = {}
    for trace in _of(0, calls):
        for record in trace.collectives:
            found.setdefault((record.op, record.axis, record.phase), []).append(record)
    if not found:
        return ["no communication"]
    lines = ["communication of rank 0, all calls:"]
    for (op, axis, phase), records in found.items():
        seconds = sum(r.duration_s for r in records)
        lines.append(
            f"  {op} over {axis}, {phase}: {len(records)} x, "
            f"{bytes_text(sum(r.bytes for r in records))}, {seconds_text(seconds)}"
        )
    return lines


def _memory(calls: list[CallTrace]) -> list[str]:
    """The most that a call took, by category, and on which rank."""
    kinds = dict.fromkeys(k for call in calls for t in call.ranks for k in t.memory_bytes)
    if not kinds:
        return []
    lines = ["memory, most of any call:"]
    for kind in kinds:
        most = [
            max(trace.memory_bytes.get(kind, 0) for trace in _of(rank, calls))
            for rank in range(len(calls[0].ranks))
        ]
        worst = max(range(len(most)), key=most.__getitem__)
        lines.append(f"  {kind}: {bytes_text(most[worst])} (rank {worst})")
    return lines


_open: ContextVar[tuple[Profiler, ...]] = ContextVar("autoshard_profilers", default=())


@contextmanager
def profiler() -> Iterator[Profiler]:
    """Watch every @spmd call inside the ``with`` block.

    >>> with profiler() as prof:
    ...     loss = step(model, batch)
    >>> [(record.op, record.axis, record.bytes) for record in prof.collectives]
    [('all_reduce', 'data', 148744), ('all_reduce', 'data', 4)]
    >>> print(prof.summary())

    Under torchrun every rank opens it, and every rank sees all ranks.
    """
    prof = Profiler()
    token = _open.set((*_open.get(), prof))
    try:
        yield prof
    finally:
        _open.reset(token)


def is_profiling() -> bool:
    """Whether a profiler is open here."""
    return bool(_open.get())


def tell(call: CallTrace) -> None:
    """Give a trace to every profiler that is open here."""
    for prof in _open.get():
        prof.calls.append(call)
