"""Inference: the batch that gives most tokens a second within the memory, and within a latency.

A step of B sequences takes ``t(B)`` seconds on the best mesh, and gives ``B / t(B)`` sequences'
tokens a second. Looked at are powers of two below the number of devices, and its multiples: those
can be cut evenly over any axes. ``t`` does not fall from one to the next: whatever serves the
larger serves the smaller, with places left free. So what does not fit, or is too slow, rules out
all that is larger, and of those between two batches ``a < b`` that were solved none gives more
than::

    (the one before b) / bound(a)

where ``bound(a)`` is what no strategies at a beat. Batches are doubled until one fails, the largest
that holds is found by halving, and then the stretch with the highest bound is halved until none
can be more than ``GAP`` better than the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.kernels import Style
from autoshard.search.inner import Prepared, Solution, solve
from autoshard.search.outer import Pins, Strategy, binding, configurations, pinned
from autoshard.search.preference import preference

GAP = 0.02
"""How much better a batch that was not solved may be, as a share, before the search goes on."""

MOST = 1 << 20
"""Largest batch that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a batch is looked for.

    Attributes:
        graph_of: the model's graph of so many sequences.
        cluster: what it runs on.
        strategy: what is forced, or ``auto``.
        mesh: axis sizes that are forced; None: any.
        memory_limit: bytes of a device that may be used; None: all it has.
        pins: stored layouts that some parameters must have.
        style: how operators between products are run.
        max_latency_s: longest step; None: any.
    """

    graph_of: Callable[[int], ModelGraph]
    cluster: Cluster
    strategy: Strategy = "auto"
    mesh: Mapping[str, int] | None = None
    memory_limit: int | None = None
    pins: Pins = field(default_factory=dict)
    style: Style = "fused"
    max_latency_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Busiest:
    """The batch that was found.

    Attributes:
        batch: sequences of a step; 0 where not even one fits and is fast enough.
        first: the best of one sequence.
        why: what the next larger batch lacks, in words.
        gap: no batch gives more than (1 + gap) times as many tokens a second.
        solved: seconds of each batch that was solved and holds.
    """

    batch: int
    first: Solution
    why: str
    gap: float
    solved: Mapping[int, float]

    @property
    def note(self) -> str:
        """What was searched, in words."""
        return (
            f"batch: {len(self.solved)} from 1 to {max(self.solved):,} sequences were solved; no "
            f"other gives more than {self.gap:.1%} more tokens a second; one larger than "
            f"{max(self.solved):,} lacks: {self.why}"
        )


def busiest(asked: Asked, told: Callable[[int, float, bool], None]) -> Busiest:
    """The batch with most tokens a second, within ``GAP``.

    Args:
        asked: what is looked for.
        told: called with each batch that was solved, its seconds, and whether it fits.
    """
    return _Search(asked, told).run()


class _Search:
    def __init__(self, asked: Asked, told: Callable[[int, float, bool], None]) -> None:
        self.asked, self.told = asked, told
        limit = asked.memory_limit
        self.limit = asked.cluster.device.memory_bytes if limit is None else limit
        self.space = configurations(
            asked.cluster.devices,
            asked.strategy,
            asked.mesh,
            devices_per_node=asked.cluster.devices_per_node,
        )
        self.solutions: dict[int, Solution] = {}
        self.bounds: dict[int, float] = {}

    def run(self) -> Busiest:
        held, failed = 0, 1
        while failed <= MOST and self._holds(failed):
            held, failed = failed, self._next(2 * failed - 1)
        first = self.at(1)
        if not held:
            return Busiest(batch=0, first=first, why=self._why(first), gap=0.0, solved={})
        while (middle := self._between(held, failed)) is not None:
            if self._holds(middle):
                held = middle
            else:
                failed = middle
        gap = self._close(held)
        holding = {b: s.step_time.total_s for b, s in self.solutions.items() if b <= held}
        best = max(holding, key=lambda b: (b / holding[b], -b))
        why = self._why(self.at(failed)) if failed in self.solutions else f"{MOST:,} are the most"
        solved = dict(sorted(holding.items()))
        return Busiest(batch=best, first=first, why=why, gap=gap, solved=solved)

    def _next(self, batch: int) -> int:
        """The smallest larger batch that is looked at."""
        devices = self.asked.cluster.devices
        if batch < devices:
            return min(devices, 1 << batch.bit_length())
        return (batch // devices + 1) * devices

    def _before(self, batch: int) -> int:
        """The largest smaller batch that is looked at."""
        devices = self.asked.cluster.devices
        if batch <= devices:
            return 1 << ((batch - 1).bit_length() - 1)
        return (batch - 1) // devices * devices

    def _between(self, a: int, b: int) -> int | None:
        """A batch that is looked at, about half way; None where there is none."""
        after = self._next(a)
        return max(after, self._before((a + b) // 2 + 1)) if after < b else None

    def at(self, batch: int) -> Solution:
        """The fastest that fits, or the leanest where nothing does."""
        if batch not in self.solutions:
            graph = self.asked.graph_of(batch)
            prepared = Prepared(graph)
            found = [
                solve(
                    graph,
                    self.asked.cluster,
                    c.sizes,
                    c.axis_names,
                    c.uses,
                    optimizer="none",
                    memory_limit=self.limit,
                    pins=pinned(c, self.asked.pins),
                    prepared=prepared,
                    style=self.asked.style,
                )
                for c in self.space
            ]
            best = min(found, key=_rank)
            bound = min(s.lower_bound_s for s in found)
            self.solutions[batch] = best
            self.bounds[batch] = bound
            self.told(batch, best.step_time.total_s, best.fits)
        return self.solutions[batch]

    def _holds(self, batch: int) -> bool:
        found, most = self.at(batch), self.asked.max_latency_s
        return found.fits and (most is None or found.step_time.total_s <= most)

    def _why(self, found: Solution) -> str:
        if not found.fits:
            return binding(found.memory)
        seconds, most = found.step_time.total_s, self.asked.max_latency_s or 0.0
        return f"a step of {seconds * 1e3:,.4g} ms, longer than the {most * 1e3:,.4g} ms allowed"

    def _close(self, held: int) -> float:
        """Solve between the batches that were solved until nothing much better may hide there."""
        while True:
            points = sorted(b for b in self.solutions if b <= held)
            best = max(b / self.at(b).step_time.total_s for b in points)
            hidden = [
                (self._before(b) / min(self.bounds[a], self.bounds[b]), middle)
                for a, b in pairwise(points)
                if (middle := self._between(a, b)) is not None
            ]
            most, middle = max(hidden, default=(0.0, 0))
            if most <= (1 + GAP) * best:
                return max(0.0, most / best - 1)
            self.at(middle)


def _rank(found: Solution) -> tuple[bool, float]:
    return preference(found.step_time, found.memory)
