"""What was seen of one call: collectives with their times, spans, memory; as values.

Times are seconds since the epoch, so that those of several processes stand on one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.sharding.collective import CollectiveOp, Phase
from autoshard.sharding.layout import Shape

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """One collective as one device issued it.

    Attributes:
        op: torch's spelling.
        axes: mesh axes whose devices take part.
        bytes: as :class:`~autoshard.sharding.collective.Collective` counts them.
        phase: which half of the step issued it.
        value: what moved; of a fused message, the first of it.
        start_s: when it was issued.
        end_s: when it was done; where the backend does not tell, when it had been waited for.
        blocked_s: seconds that the device's program stood still for it.
    """

    op: CollectiveOp
    axes: tuple[str, ...]
    bytes: int
    phase: Phase
    value: str
    start_s: float
    end_s: float
    blocked_s: float

    @property
    def axis(self) -> str:
        """The axes as one text: ``data``, or ``data x model``."""
        return " x ".join(self.axes)

    @property
    def duration_s(self) -> float:
        """Seconds from issue to end."""
        return self.end_s - self.start_s

    def __str__(self) -> str:
        return f"{self.op} {bytes_text(self.bytes)} over {self.axis} ({self.phase})"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the program that has a name: ``backward``, ``optimizer``."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One call as one rank saw it.

    Attributes:
        rank: from 0.
        coordinate: its place on each axis.
        start_s: when the body began.
        end_s: when it ended.
        collectives: in the order of issue.
        spans: stretches of the body that are known by name, in order of their start.
        memory_bytes: by category, where known: ``parameters``, ``gradients``, ``optimizer state``,
            and ``peak``, all that the device held at once beyond what it held before.
    """

    rank: int
    coordinate: tuple[int, ...]
    start_s: float
    end_s: float
    collectives: tuple[CollectiveRecord, ...] = ()
    spans: tuple[Span, ...] = ()
    memory_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        """Seconds of the body."""
        return self.end_s - self.start_s

    @property
    def exposed_s(self) -> float:
        """Seconds that the program stood still for communication."""
        return sum(record.blocked_s for record in self.collectives)

    @property
    def compute_s(self) -> float:
        """Seconds of the body in which it did not stand still for communication."""
        return max(0.0, self.wall_s - self.exposed_s)

    @property
    def communication_s(self) -> float:
        """Seconds in which at least one collective was under way."""
        return total(merged((r.start_s, r.end_s) for r in self.collectives))

    @property
    def hidden_s(self) -> float:
        """Seconds of communication during which the program went on."""
        return max(0.0, self.communication_s - self.exposed_s)

    def blocked(self) -> list[Interval]:
        """When the program stood still: the last ``blocked_s`` seconds of each collective."""
        return merged((r.end_s - r.blocked_s, r.end_s) for r in self.collectives if r.blocked_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTrace:
    """One call of a function, as all its ranks saw it.

    Attributes:
        step: number of the call, from 0.
        name: the function's.
        axes: size of each mesh axis, by name.
        device: device type of the ranks.
        ranks: in rank order.
    """

    step: int
    name: str
    axes: Mapping[str, int]
    device: str
    ranks: tuple[RankTrace, ...]

    @property
    def shape(self) -> Shape:
        """Sizes of the mesh axes."""
        return tuple(self.axes.values())


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint ones in order."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def total(intervals: Sequence[Interval]) -> float:
    """Summed length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def bytes_text(num_bytes: float) -> str:
    """``256 MB``, ``1.5 kB``: three figures, decimal units."""
    power = 0
    while num_bytes >= 999.5 and power < 4:
        num_bytes /= 1000
        power += 1
    return f"{num_bytes:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def seconds_text(seconds: float) -> str:
    """``12.3 ms``: three figures."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def as_json(value: CollectiveRecord) -> dict[str, Any]:
    """Op, axes, bytes, phase and value of a record."""
    return {
        "op": value.op,
        "axis": value.axis,
        "bytes": value.bytes,
        "phase": value.phase,
        "value": value.value,
    }
