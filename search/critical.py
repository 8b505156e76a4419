"""The longest chain of tasks of a simulated pipeline, as a way that bounds others.

What a rank does in which order does not depend on what it costs. So the tasks that a simulated step
waits for, one after another, are a chain of every step of the same schedule, which cannot be
shorter than it; the step itself is just as long.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.search.bounds import Way
from autoshard.search.pipeline import Chunk, Order, Task, simulate, simulated

_Key = tuple[Task, int, int]


def critical(order: Order, chunks: Sequence[Chunk], stages: int, microbatches: int) -> Way:
    """The longest chain of a step; it takes what :func:`autoshard.search.pipeline.duration` says.

    Args:
        order: not ``zero-bubble``, where gradients of weights are tasks of their own.
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
    forward, backward, sends = _walked(order, chunks, stages, short)
    if microbatches > short:
        slowest = max(
            range(stages),
            key=lambda rank: sum(c.forward_s + c.backward_s for c in chunks[rank::stages]),
        )
        for chunk in range(slowest, count, stages):
            forward[chunk] += microbatches - short
            backward[chunk] += microbatches - short
    return Way(tuple(forward), tuple(backward), sends)


def _walked(
    order: Order, chunks: Sequence[Chunk], stages: int, microbatches: int
) -> tuple[list[int], list[int], int]:
    """(forward, backward, sends): back from the last task to the one that was waited for."""
    _, placed = simulate(order, chunks, stages, microbatches)
    last = len(chunks) - 1
    ends: dict[_Key, float] = {}
    before: dict[_Key, _Key | None] = {}
    latest: list[_Key | None] = [None] * stages
    for p in placed:
        key = p.action.task, p.action.chunk, p.action.microbatch
        ends[key], before[key] = p.start_s + p.seconds, latest[p.rank]
        latest[p.rank] = key
    counts: dict[Task, list[int]] = {"F": [0] * len(chunks), "B": [0] * len(chunks)}
    sends = 0
    at: _Key | None = max(ends, key=ends.__getitem__)
    while at is not None:
        task, chunk, m = at
        counts[task][chunk] += 1
        own = before[at]
        waited: list[tuple[float, int, _Key]] = [] if own is None else [(ends[own], 0, own)]
        if task == "B" and chunk == last:
            waited.append((ends["F", chunk, m], 0, ("F", chunk, m)))
        elif task == "B":
            waited.append((ends["B", chunk + 1, m] + chunks[chunk].send_s, 1, ("B", chunk + 1, m)))
        elif chunk:
            there = ends["F", chunk - 1, m] + chunks[chunk - 1].send_s
            waited.append((there, 1, ("F", chunk - 1, m)))
        _, sent, at = max(waited, key=lambda w: w[0], default=(0.0, 0, None))
        sends += sent
    return counts["F"], counts["B"], sends
