"""Stages of a pipeline: which segments each has, and how many microbatches it holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from autoshard.errors import RequestError
from autoshard.plan import Schedule

Ends = tuple[float, float]
"""Seconds of what stands before the blocks, and after them, in those of a block; 0: nothing."""


def alive_microbatches(schedule: Schedule, rank: int) -> float:
    """Most microbatches of a whole stage that are between forward and backward at a time."""
    stages, virtual, microbatches = schedule.stages, schedule.virtual_stages, schedule.microbatches
    if stages == 1:
        return 1.0
    if schedule.order == "gpipe":
        return float(microbatches)
    if schedule.order == "interleaved":
        chunks = (virtual - 1) * stages + 2 * (stages - 1 - rank) + 1
        return min(chunks, microbatches * virtual) / virtual
    return float(min(microbatches, stages - rank))


def held_microbatches(schedule: Schedule, rank: int) -> tuple[tuple[float, float], ...]:
    """(between forward and backward, between backward and gradients of weights), where most are.

    Zero-bubble: rank r leaves the gradients of weights of r microbatches for later, so it has
    p - r of the first kind and r of the second when a backward begins, and one less and one more
    when it ends.
    """
    alive = alive_microbatches(schedule, rank)
    if not schedule.splits_backward:
        return ((alive, 0.0),)
    m, ahead = schedule.microbatches, schedule.stages - rank
    out = set()
    for done in {max(0, min(rank, m - ahead)), min(rank, m - 1)}:
        now = min(ahead, m - done)
        out |= {(float(now), float(done)), (now - 1.0, done + 1.0)}
    return tuple(sorted(out, reverse=True))


def bounding_microbatches(schedule: Schedule, rank: int) -> tuple[float, float]:
    """One pair of :func:`held_microbatches`, each of which bounds the bytes of a stage.

    Where most is computed again little is kept until backward, but all of it until W.
    """
    held = held_microbatches(schedule, rank)
    return held[-1] if schedule.recompute in ("full", "reentrant") else held[0]


def divides(blocks: int, chunks: int) -> bool:
    """Whether chunks can have equally many blocks, or would if both ends counted as a block.

    Then the division does not depend on what anything costs.
    """
    return chunks == 1 or (
        chunks <= blocks and (blocks % chunks == 0 or (blocks + 2) % chunks == 0)
    )


def chunk_bounds(
    is_block: Sequence[bool],
    seconds: Sequence[float],
    chunks: int,
    stage_blocks: Sequence[int] | None = None,
) -> list[int]:
    """Number of the first segment of each chunk, and the number of segments at the end.

    As ``stage_blocks`` says. Else blocks that divide evenly do; where two more would, what stands
    before and after the blocks counts as a block each; else the slowest chunk is made as fast as
    can be.

    Raises:
        RequestError: too few blocks, or ``stage_blocks`` of another number of chunks or blocks.
    """
    blocks = [i for i, repeated in enumerate(is_block) if repeated]
    count = len(blocks)
    if stage_blocks is not None:
        return _listed(is_block, blocks, chunks, stage_blocks)
    ends = count > 0 and (count + 2) % chunks == 0
    if chunks > max(1, count) and not ends:
        raise RequestError(
            f"the model has {count} repeated blocks, which cannot fill {chunks} stages; use "
            f"pipeline and virtual stages whose product is at most {count}"
        )
    if chunks == 1:
        return [0, len(is_block)]
    if count % chunks == 0:
        each = count // chunks
        firsts = [blocks[i * each] for i in range(chunks)]
    elif ends:
        each = (count + 2) // chunks
        starts = [*blocks, blocks[-1] + 1]
        firsts = [blocks[0]] + [starts[i * each - 1] for i in range(1, chunks)]
    else:
        found = partition(is_block, seconds, chunks)
        assert found is not None  # at least as many blocks as chunks, and no limit
        return _listed(is_block, blocks, chunks, found)
    return [0, *firsts[1:], len(is_block)]


def _listed(
    is_block: Sequence[bool], blocks: Sequence[int], chunks: int, stage_blocks: Sequence[int]
) -> list[int]:
    may_be_empty = {0: not is_block[0], chunks - 1: not is_block[-1]}
    empty = [i for i, n in enumerate(stage_blocks) if n < (not may_be_empty.get(i, False))]
    if len(stage_blocks) != chunks or sum(stage_blocks) != len(blocks) or empty:
        raise RequestError(
            f"stage_blocks {list(stage_blocks)} has {len(stage_blocks)} chunks and "
            f"{sum(stage_blocks)} blocks; it must have {chunks} chunks that hold all "
            f"{len(blocks)} blocks, none of them empty but one that begins or ends the model"
        )
    starts = [*blocks, blocks[-1] + 1]
    return [0, *(starts[n] for n in accumulate(stage_blocks[:-1])), len(is_block)]


def partition(
    is_block: Sequence[bool],
    seconds: Sequence[float],
    stages: int,
    sizes: Sequence[Sequence[Sequence[float]]] = (),
    room: float = inf,
) -> tuple[int, ...] | None:
    """Blocks of each stage such that the slowest stage is as fast as can be.

    Exact. Of those splits the one is taken whose first stage has the most blocks, and whose other
    stages are in their turn split so: under 1F1B what comes after the slowest stage is hidden best.
    Every stage has a block; what is no block goes with the one before it, at the start with the
    first.

    Args:
        is_block: of each segment of the whole model, whether it is a repeated block.
        seconds: of each segment.
        stages: how many are wanted.
        sizes: for each stage rows of bytes, of each segment; the sum of none may pass ``room``.
        room: bytes of a stage.

    Returns:
        None where there is no such split: fewer blocks than stages, or too little room.
    """
    firsts = [0, *[i for i, repeated in enumerate(is_block) if repeated][1:]]
    if not any(is_block) or len(firsts) < stages:
        return None
    atoms = list(pairwise([*firsts, len(is_block)]))

    def totals(values: Sequence[float]) -> list[float]:
        return [0.0, *accumulate(sum(values[a:b]) for a, b in atoms)]

    split = _Split(totals(seconds), [[totals(row) for row in rows] for rows in sizes], room, stages)
    at, most, out = 0, split.longest(0, 0), []
    if most is None:
        return None
    for stage in range(stages):
        less = most * (1 - 2 * NEAR)
        if stage and split.ends(at, stage, less)[0]:
            found = split.longest(at, stage, less)
            most = most if found is None else found
        end = split.end(at, stage, most)
        out.append(end - at)
        at = end
    return tuple(out)


NEAR = 1e-9
"""Sums of seconds that differ by less than this share are equal."""


def balanced(blocks: int, stages: int, ends: Ends) -> tuple[int, ...] | None:
    """Blocks of each stage such that the slowest is as fast as can be; see :func:`partition`.

    What stands before the blocks, or after them, may be a stage of its own.

    Args:
        blocks: of the model, alike.
        stages: how many are wanted.
        ends: see :data:`Ends`.
    """
    alone = [int(end > 0) for end in ends]
    seconds = [*ends[:1] * alone[0], *(1.0,) * blocks, *ends[1:] * alone[1]]
    found = list(partition([True] * len(seconds), seconds, stages) or ())
    if not found:
        return None
    found[0] -= alone[0]
    found[-1] -= alone[1]
    return tuple(found)


def slowest(blocks: int, stages: int, ends: Ends, stage_blocks: Sequence[int] | None) -> float:
    """Seconds of the slowest stage, in those of a block; ``stage_blocks`` as of a schedule."""
    is_block, seconds = [False, *(True,) * blocks, False], [ends[0], *(1.0,) * blocks, ends[1]]
    bounds = chunk_bounds(is_block, seconds, stages, stage_blocks)
    return max(sum(seconds[a:b]) for a, b in pairwise(bounds))


@dataclass(frozen=True, slots=True)
class _Split:
    """Consecutive atoms over stages.

    Attributes:
        seconds: of the first so many atoms.
        sizes: for each stage rows of bytes of the first so many atoms.
        room: bytes of a stage.
        stages: how many.
    """

    seconds: list[float]
    sizes: list[list[list[float]]]
    room: float
    stages: int

    def held(self, at: int, stage: int) -> int:
        """How far a stage that begins at ``at`` may go for its memory and for those after it."""
        end = len(self.seconds) - 1 - (self.stages - 1 - stage)
        for row in self.sizes[stage] if self.sizes else ():
            end = min(end, bisect_right(row, row[at] + self.room) - 1)
        return end

    def end(self, at: int, stage: int, most: float) -> int:
        """How far it goes within ``most`` seconds."""
        within = bisect_right(self.seconds, self.seconds[at] + most * (1 + NEAR)) - 1
        return min(within, self.held(at, stage))

    def ends(self, at: int, stage: int, most: float) -> tuple[bool, float]:
        """Whether the stages from ``stage`` on hold all from ``at`` on within ``most`` seconds.

        With the slowest of them if they do, or else the least that would change anything.
        """
        slowest, more = 0.0, inf
        for number in range(stage, self.stages):
            end = self.end(at, number, most)
            if end < self.held(at, number):
                more = min(more, self.seconds[end + 1] - self.seconds[at])
            if end <= at:
                return False, more
            slowest = max(slowest, self.seconds[end] - self.seconds[at])
            at = end
        whole = at == len(self.seconds) - 1
        return whole, slowest if whole else more

    def longest(self, at: int, stage: int, high: float = inf) -> float | None:
        """The least that the slowest of the stages from ``stage`` on can take."""
        low = (self.seconds[-1] - self.seconds[at]) / (self.stages - stage)
        fits, found = self.ends(at, stage, min(high, self.seconds[-1]))
        if not fits:
            return None
        high = found
        while low < high * (1 - NEAR):
            for most in (low, (low + high) / 2):
                fits, found = self.ends(at, stage, most)
                if fits:
                    high = found
                else:
                    low = max(low, found)
                if fits or low >= high * (1 - NEAR):
                    break
        return high
