"""Splits of blocks into stages: exact, within memory, and bounds that hold for every one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import RequestError
from autoshard.plan import Schedule
from autoshard.search.pipeline import Chunk, Order, simulate
from autoshard.search.stages import chunk_bounds, held_microbatches, partition


def cuts(count: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """Every split of so many blocks."""
    for inner in combinations(range(1, count), stages - 1):
        yield list(pairwise([0, *inner, count]))


def splits(values: Sequence[float], stages: int) -> Iterator[list[float]]:
    """The sums of the stages of every split."""
    for cut in cuts(len(values), stages):
        yield [sum(values[a:b]) for a, b in cut]


@given(st.data(), st.integers(1, 9), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_slowest_stage_is_as_fast_as_any_split_allows(
    data: st.DataObject, blocks: int, limited: bool
) -> None:
    stages = data.draw(st.integers(1, blocks))
    seconds = data.draw(st.lists(st.floats(0.1, 5), min_size=blocks, max_size=blocks))
    sizes: list[list[list[float]]] = []
    room = float("inf")
    if limited:  # blocks take equally much, ends more, later stages hold fewer microbatches
        stored, kept, first, last = (data.draw(st.floats(0, 1)) for _ in range(4))
        rows = [[stored + n * kept] * blocks for n in range(stages, 0, -1)]
        sizes = [[[row[0] + first, *row[1:]]] for row in rows]
        sizes[-1][0][-1] += last
        room = data.draw(st.floats(0.5, 8))
    allowed = [
        max(sum(seconds[a:b]) for a, b in cut)
        for cut in cuts(blocks, stages)
        if not sizes
        or all(
            sum(row[a:b]) <= room for (a, b), rows in zip(cut, sizes, strict=True) for row in rows
        )
    ]
    found = partition([True] * blocks, seconds, stages, sizes, room)
    if not allowed:
        assert found is None
        return
    assert found is not None
    ends = [0, *accumulate(found)]
    assert (len(found), ends[-1]) == (stages, blocks)
    assert max(sum(seconds[a:b]) for a, b in pairwise(ends)) == pytest.approx(min(allowed))
    for (a, b), rows in zip(pairwise(ends), sizes, strict=False):
        assert all(sum(row[a:b]) <= room for row in rows)


def test_stages_after_the_slowest_are_even() -> None:
    assert partition([True] * 130, [1.0] * 130, 16) == (9, 9, *[8] * 14)
    # Llama-3-405B's depth on 16 stages, the head two thirds of a block.
    seconds = [0.02, *[1.0] * 126, 0.66]
    whole = [False, *[True] * 126, False]
    assert partition(whole, seconds, 16) == (7, *[8] * 14, 7)
    assert partition(whole, seconds, 127) is None


@pytest.mark.parametrize("order", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 5, 11])
def test_microbatches_held_are_those_of_the_simulation(order: Order, stages: int, m: int) -> None:
    chunks = [Chunk(1.0, 2.0, 0.9)] * stages
    _, placed = simulate(order, chunks, stages, m)
    for rank in range(stages):
        own = [p.action.task for p in placed if p.rank == rank]
        for kept, later in ((3.0, 1.0), (1.0, 1.0), (1.0, 3.0)):
            now = wait = 0
            most = 0.0
            for task in own:
                # A backward begins with what forward kept and ends with what its W needs.
                now += (task == "F") - (task == "B")
                wait += (order == "zero-bubble") * ((task == "B") - (task == "W"))
                most = max(most, now * kept + wait * later)
            held = held_microbatches(Schedule(microbatches=m, stages=stages, order=order), rank)
            assert max(a * kept + b * later for a, b in held) == most


def test_listed_stages_are_taken_or_refused() -> None:
    whole = [False, *[True] * 6, False]
    assert chunk_bounds(whole, [1.0] * 8, 3, (1, 2, 3)) == [0, 2, 4, 8]
    assert chunk_bounds(whole, [1.0] * 8, 3, (0, 6, 0)) == [0, 1, 7, 8]
    for wrong in ((1, 2, 4), (2, 4), (3, 0, 3), (7, -1, 0)):
        with pytest.raises(RequestError, match="3 chunks that hold all 6 blocks"):
            chunk_bounds(whole, [1.0] * 8, 3, wrong)
