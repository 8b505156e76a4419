"""The longest chain of tasks of a simulated pipeline, as a way that bounds others.

What a rank does in which order does not depend on what it costs. So the tasks that a simulated step
waits for, one after another, are a chain of every step of the same schedule, which cannot be
shorter than it; the step itself is just as long.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.search.bounds import Way
from autoshard.search.pipeline import TASKS, Chunk, Order, listed, simulated, times


def critical(order: Order, chunks: Sequence[Chunk], stages: int, microbatches: int) -> Way:
    """The longest chain of a step; it takes what :func:`autoshard.search.pipeline.duration` says.

    Args:
        order: of tasks.
        chunks: of each chunk of the model, in order; a multiple of ``stages``.
        stages: ranks of the pipeline.
        microbatches: of one step.

    Raises:
        RequestError: see :func:`autoshard.search.pipeline.check`.
    """
    count = len(chunks)
    if stages == 1:
        return Way((microbatches,) * count, (microbatches,) * count, 0)
    short = simulated(order, count, stages, microbatches)
    counts, sends = _walked(order, chunks, stages, short)
    if microbatches > short:
        slowest = max(
            range(stages),
            key=lambda rank: sum(c.forward_s + c.backward_s for c in chunks[rank::stages]),
        )
        for passed in counts:
            for chunk in range(slowest, count, stages):
                passed[chunk] += microbatches - short
    forward, backward, weight = map(tuple, counts)
    return Way(forward, backward, sends, weight if order == "zero-bubble" else None)


def _walked(
    order: Order, chunks: Sequence[Chunk], stages: int, microbatches: int
) -> tuple[list[list[int]], int]:
    """(times each chunk does each of ``TASKS``, sends): from the last to the one waited for."""
    count = len(chunks)
    rows = listed(order, stages, count // stages, microbatches)
    _, ends = times(order, chunks, stages, microbatches)
    sent = [*(chunk.send_s for chunk in chunks), 0.0]
    counts = [0] * (len(TASKS) * count)
    sends = 0
    at = ends.index(max(ends))
    while at >= 0:
        counts[rows.costs[at]] += 1
        own, needed, sender = rows.before[at], rows.needs[at], rows.sends[at]
        at = own
        if needed >= 0 and (own < 0 or ends[needed] + sent[sender] > ends[own]):
            at = needed
            sends += sender >= 0
    return [counts[i : i + count] for i in range(0, len(counts), count)], sends
