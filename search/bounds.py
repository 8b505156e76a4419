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

Where gradients of weights, W, are tasks of their own (zero-bubble) and B is backward without them,
rank r has done all but min(m, r + 1) of its W when its last B ends, which goes back to rank 0::

    step  >=  sum over c < r of (F(c) + B(c) + s(c))  +  m (F(r) + B(r))
              +  max(0, m - 1 - r) W(r)  +  W(0)                                 0 < r

Before its first microbatch comes back, rank r begins no more than w = min(m, p - r)::

    step  >=  sum over c < r of F(c)  +  sum over c > r of (F(c) + B(c) + s(c))
              +  (m + 1 - w) F(r)  +  m (B(r) + W(r))

These two, and the way of rank p - 1 alone, sum over c < r of F(c) + m t(r), have equality on equal
chunks and free messages (the closed form of :mod:`autoshard.search.pipeline`). Laps are as under
1F1B; they miss at most as many W as B.

Gradients that travel once a step are late by at least what backward's computing cannot hide; any
share e of that may be added to the bound. ``e`` = 0 hides them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoshard.plan import Schedule
from autoshard.search.folded import Shares, Weights
from autoshard.search.pipeline import Chunk
from autoshard.search.stages import bounding_microbatches, chunk_bounds

OFF_THE_WAY = 1e-3
"""Share of the microbatches that segments count with where a way passes them by."""


@dataclass(frozen=True, slots=True)
class Way:
    """A chain of tasks that the step cannot be shorter than.

    Attributes:
        forward: how many microbatches pass each chunk in forward.
        backward: the same of backward.
        sends: messages from stage to stage on it.
        weight: the same of gradients of weights, where they are tasks of their own and not part of
            backward; None: they are.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    sends: int
    weight: tuple[int, ...] | None = None

    @property
    def passes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """How often each chunk is passed: forward, backward, gradients of weights."""
        return self.forward, self.backward, self.backward if self.weight is None else self.weight

    def seconds(self, chunks: Sequence[Chunk]) -> float:
        """How long it takes where the chunks take what is given."""
        total = self.sends * chunks[0].send_s
        for there, back, later, c in zip(*self.passes, chunks, strict=True):
            total += there * c.forward_s + back * (c.backward_s - c.weight_s) + later * c.weight_s
        return total


def ways(schedule: Schedule) -> tuple[Way, ...]:
    """The chains that are looked at: of the first, the last, and the ranks beside them."""
    chunks = schedule.stages * schedule.virtual_stages
    if schedule.splits_backward:
        return _apart(schedule.stages, schedule.microbatches)
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


@cache
def _apart(p: int, m: int) -> tuple[Way, ...]:
    """Those of a schedule whose gradients of weights are tasks of their own."""
    out: list[Way] = []
    for rank in sorted({p - 1, max(0, p - 2), min(1, p - 1), 0}, reverse=True):
        w, ahead = p - rank, min(m, p - rank)
        early = max(0, m - 1 - rank)
        starts = [(m, 0), (m + 1 - ahead, 1)] if w > 1 else [(m, 0)]
        for there, laps in starts:
            out.append(_by(p, rank, (there, m, m), laps=laps))
            if rank:
                out.append(_by(p, rank, (there, m, early), laps=laps, is_back=True))
        most = (m - 1) // w + 1
        for laps in sorted({2, most}) if w > 1 else ():
            if 2 <= laps <= most:
                own = m - (laps - 1) * (w - 1)
                out.append(_by(p, rank, (own, own, own), laps=laps))
    return tuple(out)


def _by(
    p: int, rank: int, own: tuple[int, int, int], *, laps: int = 0, is_back: bool = False
) -> Way:
    """Down to a rank, what it does (forward, backward, W), and back to rank 0 if ``is_back``."""
    beyond, back = p - 1 - rank, int(is_back)
    weight = [0] * p
    weight[rank] = own[2]
    weight[0] += back
    return Way(
        (*(1,) * rank, own[0], *(laps,) * beyond),
        (*(back,) * rank, own[1], *(laps,) * beyond),
        (1 + back) * rank + 2 * laps * beyond,
        tuple(weight),
    )


def runs_of(is_block: Sequence[bool], schedule: Schedule) -> list[range]:
    """Segments of each chunk of the whole model."""
    chunks = schedule.stages * schedule.virtual_stages
    bounds = chunk_bounds(is_block, [0.0] * len(is_block), chunks, schedule.stage_blocks)
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
    beside: Shares | None = None,
) -> Weights:
    """Weights of the short graph's segments for the bound of one way.

    Args:
        is_block: of each segment of the short graph, whether it is a repeated block.
        stands_for: for each segment of the whole model its number there.
        schedule: of a step; its chunks divide the blocks, or it lists them.
        way: what bounds the step.
        memory_rank: whose bytes count.
        exposed: share of the late gradients that counts.
        floor: see :class:`autoshard.search.folded.Weights`.
        beside: see there.
    """
    p, count = schedule.stages, len(is_block)
    forward, backward = [0.0] * count, [0.0] * count
    weight, update, late = [0.0] * count, [0.0] * count, [0.0] * count
    stored, kept, waiting = [0.0] * count, [0.0] * count, [0.0] * count
    alive, later = bounding_microbatches(schedule, memory_rank)
    whole = [is_block[i] for i in stands_for]
    for chunk, (run, *passes) in enumerate(zip(runs_of(whole, schedule), *way.passes, strict=True)):
        # What is off the way counts a little, so that it is not chosen at random.
        least = 0.0 if floor else OFF_THE_WAY * schedule.microbatches
        here = chunk % p == memory_rank
        for i in run:
            part = stands_for[i]
            for row, passed in zip((forward, backward, weight), passes, strict=True):
                row[part] += max(least, passed)
            update[part] += 1.0 / p
            late[part] += exposed / p
            stored[part] += here
            kept[part] += alive * here
            waiting[part] += later * here
    return Weights(
        forward=tuple(forward),
        backward=tuple(backward),
        update=tuple(update),
        late=tuple(late),
        stored=tuple(stored),
        kept=tuple(kept),
        weight=None if way.weight is None else tuple(weight),
        waiting=tuple(waiting) if later else None,
        sends=float(way.sends),
        temporary=1.0,
        working=1.0,
        floor=floor,
        beside=beside,
    )


@cache
def rows_of(
    is_block: tuple[bool, ...],
    stands_for: tuple[int, ...],
    chains: tuple[Way, ...],
    stage_blocks: tuple[int, ...] | None,
) -> NDArray[np.float64]:
    """How often ways pass segments of the short graph.

    In forward, in backward and for gradients of weights; of each way; each segment.
    """
    chunks = len(chains[0].forward)
    whole = [is_block[i] for i in stands_for]
    bounds = chunk_bounds(whole, [0.0] * len(stands_for), chunks, stage_blocks)
    inside = np.zeros((chunks, len(is_block)))
    for chunk, (a, b) in enumerate(pairwise(bounds)):
        for i in range(a, b):
            inside[chunk, stands_for[i]] += 1
    passes = np.array([way.passes for way in chains], dtype=np.float64)
    rows: NDArray[np.float64] = np.moveaxis(passes, 1, 0) @ inside
    rows.setflags(write=False)
    return rows
