"""Recomputation of some blocks: bounds below prices, and the optimum where memory is short."""

from __future__ import annotations

from functools import cache

import pytest

from autoshard.cluster import Cluster
from autoshard.errors import RequestError
from autoshard.graph import ModelGraph
from autoshard.plan import Schedule
from autoshard.search.space import Arrangement, arrangements
from autoshard.search.step import again_of, price_step
from autoshard.search.whole import Problems, search_whole
from tests.search.model_graphs import llama
from tests.search.test_whole import bounds, reserved

BLOCKS = 8


@cache
def wide(batch: int) -> ModelGraph:
    return llama(3, batch, 512, 2048, 16, 4, 8192, 4000)


def points(cluster: Cluster, stages: int) -> list[Arrangement]:
    return arrangements(cluster, 8, BLOCKS, tokens=512, axes={"pipeline": (stages, stages)})


@pytest.mark.parametrize("stages", [1, 2])
def test_some_blocks_are_recomputed_where_memory_is_short(stages: int) -> None:
    cluster = reserved("h100", stages)
    free = Problems(wide, BLOCKS, cluster)
    space = points(cluster, stages)
    assert {a.recomputed_blocks for a in space} == {None, *range(2, BLOCKS, 2)}
    free.prepare(space)
    steps = {a: free.solve(a).step for a in space}
    # A limit within which recomputing some blocks is faster than all or none, as they are.
    limit = next(
        step.memory.total_bytes
        for a, step in steps.items()
        if a.recomputed_blocks is not None
        and all(
            other.memory.total_bytes > step.memory.total_bytes
            or other.step_time.total_s > step.step_time.total_s
            for b, other in steps.items()
            if b.recomputed_blocks is None
        )
    )
    inner = free.under(limit)
    result = search_whole(space, inner)
    inner.prepare(space)
    prices: dict[Arrangement, float] = {}
    for a in space:
        solved = inner.solve(a)
        if not solved.fits:
            continue
        prices[a] = solved.step.step_time.total_s
        for bound in (*bounds(inner, a), solved.bound):
            assert bound <= prices[a] * (1 + 1e-9), a.label
    assert result.certificate.step_time_s == min(prices.values())
    some = result.arrangement.recomputed_blocks
    assert some is not None
    assert f"recompute full of {some} blocks" in result.arrangement.label
    others = [p for a, p in prices.items() if a.recomputed_blocks is None]
    assert result.certificate.step_time_s < min(others)


@pytest.mark.parametrize(("stages", "some"), [(1, 2), (1, 6), (2, 4)])
def test_a_few_blocks_price_as_the_whole_model(stages: int, some: int) -> None:
    cluster = reserved("h100", 4 * stages)
    a = next(
        a
        for a in arrangements(cluster, 16, BLOCKS, axes={"pipeline": (stages, stages)})
        if a.recomputed_blocks == some and a.model == 2 and a.virtual_stages == 1
    )
    inner = Problems(wide, BLOCKS, cluster)
    folded, found = inner.folded(a), inner.solve(a)
    schedule = a.schedule().model_copy(update={"blocks": BLOCKS})
    few = price_step(folded.model, folded.program(found.tied), schedule)
    assert few.step_time == found.step.step_time
    assert few.memory.allocated_bytes == found.step.memory.allocated_bytes
    # Between none and all: time grows and memory shrinks with each block.
    steps = [
        price_step(
            folded.model,
            folded.program(found.tied),
            schedule.model_copy(update={"recomputed_blocks": n}),
        )
        for n in range(0, BLOCKS + 1, stages)
    ]
    seconds = [s.step_time.total_s for s in steps]
    kept = [s.memory.activations_bytes for s in steps]
    assert seconds == sorted(seconds)
    assert kept == sorted(kept, reverse=True)
    assert seconds[0] < found.step.step_time.total_s < seconds[-1]


def test_recomputed_blocks_are_shared_by_ranks() -> None:
    is_block = [False, *(True,) * 8, False]
    for some in range(9):
        for virtual in (1, 2, 4):
            order = "interleaved" if virtual > 1 else "1f1b"
            schedule = Schedule(
                microbatches=4,
                stages=2,
                virtual_stages=virtual,
                order=order,
                recompute="full",
                recomputed_blocks=some,
            )
            chosen = again_of(is_block, schedule)
            assert len(chosen) == some
            assert chosen <= {*range(1, 9)}
            each = 8 // (2 * virtual)
            ranks = [0, 0]
            for block in range(8):
                ranks[block // each % 2] += 1 + block in chosen
            assert abs(ranks[0] - ranks[1]) <= 1


def test_more_blocks_than_there_are_cannot_be_recomputed() -> None:
    schedule = Schedule(recompute="full", recomputed_blocks=3)
    with pytest.raises(RequestError, match="at most 2"):
        again_of([False, True, True], schedule)
    with pytest.raises(RequestError, match="recompute 'none'"):
        Arrangement(
            pipeline=1,
            replica=1,
            data=1,
            model=1,
            micro_batch=1,
            microbatches=1,
            virtual_stages=1,
            recompute="full",
            recomputed_blocks=0,
        )
