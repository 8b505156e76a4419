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

from autoshard.plan import Schedule
from autoshard.search.folded import Shares, Weights
from autoshard.search.stages import alive_microbatches, chunk_bounds

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
) -> tuple[tuple[int, ...], ...]:
    """How often each segment of the short graph is passed on each way, there and back."""
    out = []
    chunks = len(chains[0].forward)
    whole = [is_block[i] for i in stands_for]
    bounds = chunk_bounds(whole, [0.0] * len(stands_for), chunks, stage_blocks)
    for way in chains:
        row = [0] * len(is_block)
        for passed, (a, b) in zip(way.forward, pairwise(bounds), strict=True):
            for i in range(a, b):
                row[stands_for[i]] += passed
        out.append(tuple(row))
    return tuple(out)
