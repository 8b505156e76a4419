"""Bounds from below on the seconds of a step, as weights of segments.

Chunk c of a pipeline of p ranks lies on rank c mod p and takes t(c) seconds for one microbatch,
forward and backward. Whatever the order of tasks, rank r cannot begin before the first microbatch
has passed the chunks 0 .. r-1, and when it ends the last one must still come back through them. So
for every rank r, with m microbatches and s(c) seconds of a message there and back::

    step  >=  sum over c < r of (t(c) + s(c))  +  m * sum over c on rank r of t(c)

which is a sum of the seconds of segments, each with a whole weight. On equal chunks and free
messages rank p-1 has equality, for 1F1B and for interleaved schedules: (m + (p - 1) / v) t. The
optimizer of the slowest stage takes at least the mean of all stages.

Under 1F1B rank r works at most w = p - r microbatches ahead. So a chain may follow the first and
the last microbatch from rank r down to the last rank and back, and others w apart between them; of
rank r's own work it misses w - 1 microbatches for each of these laps but the first::

    step  >=  sum over c < r of (t(c) + s(c))  +  laps * sum over c > r of (t(c) + s(c))
              +  (m - (laps - 1) (w - 1)) t(r)                 2 <= laps <= (m - 1) // w + 1

On chunks where rank r is the slowest that is closer, and it sees the wait for messages.

With v chunks a rank and m a multiple of p, the first microbatch passes all chunks forward; then the
last rank does all that lies between it and the last microbatch, which comes back through all
chunks. What the last rank did before and does after is p microbatches of its other chunks::

    step  >=  sum over c of (t(c) + s(c))  +  (m - 1) t(last)
              +  (m - p) sum over c on rank p - 1, not the last one, of t(c)

Gradients that travel once a step are late by at least what backward's computing cannot hide; any
share e of that may be added to the bound. ``e`` = 0 hides them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.kernels import Style
from autoshard.plan import Schedule
from autoshard.search.cost import VIEWS, weight_values
from autoshard.search.folded import Weights
from autoshard.search.memory import Optimizer
from autoshard.search.roofline import attention_seconds
from autoshard.search.stages import alive_microbatches, chunk_bounds
from autoshard.search.step import crossing_nodes, recomputed, segments
from autoshard.search.work import Pass, passes

OFF_THE_WAY = 1e-3
"""Share of the microbatches that segments count with where a way passes them by."""


@dataclass(frozen=True, slots=True)
class Way:
    """A chain of tasks that the step cannot be shorter than.

    Attributes:
        forward: how many microbatches pass each chunk in forward.
        backward: the same of backward.
        sends: messages from stage to stage on it.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    sends: int


def ways(schedule: Schedule) -> tuple[Way, ...]:
    """The chains that are looked at: of the first, the last, and the ranks beside them."""
    chunks = schedule.stages * schedule.virtual_stages
    return _ways(schedule.stages, chunks, schedule.microbatches, schedule.order)


@cache
def _ways(p: int, chunks: int, m: int, order: str) -> tuple[Way, ...]:
    out: list[Way] = []
    for rank in sorted({p - 1, max(0, p - 2), min(1, p - 1), 0}, reverse=True):
        own = tuple(m * (c % p == rank) + (c < rank) for c in range(chunks))
        out.append(Way(own, own, 2 * rank))
        w = p - rank
        most = (m - 1) // w + 1
        for laps in sorted({2, most}) if order == "1f1b" and w > 1 else ():
            if 2 <= laps <= most:
                row = (*(1,) * rank, m - (laps - 1) * (w - 1), *(laps,) * (w - 1))
                out.append(Way(row, row, 2 * rank + 2 * laps * (w - 1)))
    if order == "interleaved" and chunks > p and m % p == 0:
        row = (*(1 + (m - p) * (c % p == p - 1) for c in range(chunks - 1)), m)
        out.append(Way(row, row, 2 * (chunks - 1)))
    return tuple(out)


def divides(blocks: int, chunks: int) -> bool:
    """Whether chunks can have equally many blocks, or would if both ends counted as a block.

    Then the division does not depend on what anything costs.
    """
    return chunks == 1 or (
        chunks <= blocks and (blocks % chunks == 0 or (blocks + 2) % chunks == 0)
    )


def runs_of(is_block: Sequence[bool], schedule: Schedule) -> list[range]:
    """Segments of each chunk of the whole model."""
    chunks = schedule.stages * schedule.virtual_stages
    bounds = chunk_bounds(is_block, [0.0] * len(is_block), chunks)
    return [range(a, b) for a, b in pairwise(bounds)]


def weights(
    is_block: Sequence[bool],
    stands_for: Sequence[int],
    schedule: Schedule,
    *,
    way: Way,
    memory_rank: int,
    exposed: float = 0.0,
    floor: bool = False,
) -> Weights:
    """Weights of the short graph's segments for the bound of one way.

    Args:
        is_block: of each segment of the short graph, whether it is a repeated block.
        stands_for: for each segment of the whole model its number there.
        schedule: of a step; its chunks divide the blocks.
        way: what bounds the step.
        memory_rank: whose bytes count.
        exposed: share of the late gradients that counts.
        floor: see :class:`autoshard.search.folded.Weights`.
    """
    p, count = schedule.stages, len(is_block)
    forward, backward = [0.0] * count, [0.0] * count
    update, late = [0.0] * count, [0.0] * count
    stored, kept = [0.0] * count, [0.0] * count
    alive = alive_microbatches(schedule, memory_rank)
    whole = [is_block[i] for i in stands_for]
    for chunk, run in enumerate(runs_of(whole, schedule)):
        # What is off the way counts a little, so that it is not chosen at random.
        least = 0.0 if floor else OFF_THE_WAY * schedule.microbatches
        here = chunk % p == memory_rank
        for i in run:
            part = stands_for[i]
            forward[part] += max(least, way.forward[chunk])
            backward[part] += max(least, way.backward[chunk])
            update[part] += 1.0 / p
            late[part] += exposed / p
            stored[part] += here
            kept[part] += alive * here
    return Weights(
        forward=tuple(forward),
        backward=tuple(backward),
        update=tuple(update),
        late=tuple(late),
        stored=tuple(stored),
        kept=tuple(kept),
        sends=float(way.sends),
        floor=floor,
    )


class Least:
    """Seconds that each segment takes at least, from work and bytes alone.

    Every operator's work and bytes divided by the devices of a stage, no message counted.

    Args:
        graph: at the largest batch that is asked for: what does not grow with the batch then counts
            least.
        cluster: what it runs on.
        style: how operators between products are run.
    """

    def __init__(self, graph: ModelGraph, cluster: Cluster, style: Style = "eager") -> None:
        self.graph, self.cluster = graph, cluster
        kernels = cluster.device.kernels
        self.traffic, self.attention_gain = kernels.traffic(style), kernels.attention_gain(style)
        self.parts = segments(graph)
        self.is_block = tuple(part.is_block for part in self.parts)
        by_name = graph.by_name
        self._rows: dict[str, tuple[float, float, int, int]] = {}
        for node in graph.nodes:
            if node.is_leaf or node.family in VIEWS:
                continue
            operands = [by_name[o] for o in node.operands]
            forward, backward = passes(
                node,
                tuple(o.shape for o in operands),
                tuple(o.itemsize for o in operands),
                node.shape,
                tuple(node.differentiable and o.differentiable for o in operands),
                1.0,
                bias=any(o.op == "parameter" for o in operands),
            )
            self._rows[node.name] = (
                self._seconds(forward, node.dtype, node.itemsize),
                self._seconds(backward, node.dtype, node.itemsize),
                forward.launches,
                backward.launches,
            )
        self._known: dict[str, list[tuple[float, float]]] = {}
        self._sizes: dict[str, tuple[list[float], list[float]]] = {}

    def _seconds(self, work: Pass, dtype: str, itemsize: int) -> float:
        rate, bandwidth = self.cluster.flops_per_second(dtype), self.cluster.copy_bytes_per_second
        total = sum(
            max(2.0 * p.batch * p.m * p.n * p.k / rate, p.elements * itemsize / bandwidth)
            for p in work.products
        )
        attended = attention_seconds(self.cluster, work, dtype, self.attention_gain)
        traffic = min(1.0, self.traffic)
        return total + max(work.flops / rate + attended, traffic * work.num_bytes / bandwidth)

    def _parts(self, schedule: Schedule) -> list[tuple[float, float]]:
        """(seconds on one device, seconds of launches) of each segment, forward and backward."""
        kind = schedule.recompute
        if kind not in self._known:
            out = []
            launch = self.cluster.device.launch_s
            for s in self.parts:
                nodes = self.graph.nodes[s.start : s.end]
                again = recomputed(nodes, schedule) if s.is_block else frozenset()
                work = fixed = 0.0
                for node in nodes:
                    forward, backward, there, back = self._rows.get(node.name, (0.0, 0.0, 0, 0))
                    times = 1 + (node.name in again)
                    work += times * forward + backward
                    fixed += (times * there + back) * launch
                out.append((work, fixed))
            self._known[kind] = out
        return self._known[kind]

    def step_seconds(
        self,
        schedule: Schedule,
        stands_for: Sequence[int],
        batch: int,
        devices: int,
        first_s: float = 0.0,
    ) -> float:
        """The least that a step takes.

        Args:
            schedule: of the step.
            stands_for: see :func:`weights`.
            batch: samples of one microbatch.
            devices: of one stage.
            first_s: see :func:`step_of_parts`.
        """
        scale = batch / self.graph.batch / devices
        seconds = [work * scale + fixed for work, fixed in self._parts(schedule)]
        if self.cluster.device.measured is not None:
            seconds = [0.0] * len(seconds)  # factors of its own for every family
        return step_of_parts(schedule, self.is_block, stands_for, seconds, first_s)

    def stage_bytes(
        self,
        schedule: Schedule,
        stands_for: Sequence[int],
        batch: int,
        devices: int,
        optimizer: Optimizer,
        kept: Sequence[float] | None = None,
    ) -> float:
        """The least that the first stage's devices keep: everything cut over all of them.

        ``kept``: bytes that one device keeps of each segment, if that is known better.
        """
        stored, over_all = self._bytes(schedule, optimizer)
        if kept is None:
            kept = [n * batch / self.graph.batch / devices for n in over_all]
        whole = [self.is_block[i] for i in stands_for]
        p, total = schedule.stages, 0.0
        alive = alive_microbatches(schedule, 0)
        for run in runs_of(whole, schedule)[::p]:
            for i in run:
                part = stands_for[i]
                total += stored[part] / devices + alive * kept[part]
        return total

    def _bytes(self, schedule: Schedule, optimizer: Optimizer) -> tuple[list[float], list[float]]:
        """(stored, kept for one microbatch) of each segment, over all devices."""
        key = f"{schedule.recompute} {optimizer.name}"
        if key not in self._sizes:
            by_name, weights_ = self.graph.by_name, weight_values(self.graph)
            crossing = sum(by_name[o].num_bytes for o in crossing_nodes(self.graph, self.parts))
            stored, kept = [], []
            for s in self.parts:
                own = held = 0.0
                nodes = self.graph.nodes[s.start : s.end]
                again = recomputed(nodes, schedule) if s.is_block else frozenset()
                for node in nodes:
                    if node.op == "parameter":
                        elements = node.num_bytes // node.itemsize
                        state = optimizer.state_bytes(elements, node.dtype, node.itemsize)
                        own += node.num_bytes + (node.num_bytes + state) * node.differentiable
                    elif node.differentiable and not node.is_leaf and not again:
                        for role in node.saved:
                            name = (
                                node.name
                                if role == "result"
                                else node.operands[node.roles.index(role)]
                            )
                            if name not in weights_ and (
                                role == "result" or not by_name[name].is_leaf
                            ):
                                held += by_name[name].num_bytes
                stored.append(own)
                kept.append(held if not again else float(crossing))
            self._sizes[key] = stored, kept
        return self._sizes[key]


def step_of_parts(
    schedule: Schedule,
    is_block: Sequence[bool],
    stands_for: Sequence[int],
    seconds: Sequence[float],
    first_s: float = 0.0,
) -> float:
    """The longest way through the pipeline where segments take at least ``seconds``.

    Args:
        schedule: of the step.
        is_block: see :func:`weights`.
        stands_for: see :func:`weights`.
        seconds: of one microbatch in each segment of the short graph.
        first_s: what one microbatch takes beside that in all segments of the first stage.
    """
    chains = ways(schedule)
    rows = rows_of(tuple(is_block), tuple(stands_for), chains)
    return max(
        sum(w * t for w, t in zip(row, seconds, strict=True))
        + min(way.forward[:: schedule.stages]) * first_s
        for way, row in zip(chains, rows, strict=True)
    )


@cache
def rows_of(
    is_block: tuple[bool, ...], stands_for: tuple[int, ...], chains: tuple[Way, ...]
) -> tuple[tuple[int, ...], ...]:
    """How often each segment of the short graph is passed on each way, there and back."""
    out = []
    chunks = len(chains[0].forward)
    bounds = chunk_bounds([is_block[i] for i in stands_for], [0.0] * len(stands_for), chunks)
    for way in chains:
        row = [0] * len(is_block)
        for passed, (a, b) in zip(way.forward, pairwise(bounds), strict=True):
            for i in range(a, b):
                row[stands_for[i]] += passed
        out.append(tuple(row))
    return tuple(out)
