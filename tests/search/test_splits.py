"""Uneven stages: the balanced split, and the search of a space that has it."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster import Cluster
from autoshard.errors import MeshError
from autoshard.graph import ModelGraph
from autoshard.search.ends import ends_of
from autoshard.search.space import Arrangement, arrangements
from autoshard.search.stages import balanced, slowest
from autoshard.search.whole import Problems, search_whole
from tests.search.model_graphs import llama
from tests.search.test_whole import bounds, reserved

BLOCKS = 6


def headed(batch: int) -> ModelGraph:
    """A head that works as much as several blocks."""
    return llama(3, batch, 256, 1024, 8, 4, 2048, 32000)


def points(cluster: Cluster, batch: int, blocks: int = BLOCKS) -> list[Arrangement]:
    ends = ends_of(headed(2), cluster, "eager", ("none", "full"))
    return arrangements(cluster, batch, blocks, tokens=256, ends=ends)


@given(
    blocks=st.integers(1, 9),
    stages=st.integers(1, 5),
    before=st.floats(0.0, 4.0),
    after=st.floats(0.0, 4.0),
)
@settings(deadline=None, max_examples=150)
def test_no_split_has_a_faster_slowest_stage(
    blocks: int, stages: int, before: float, after: float
) -> None:
    found = balanced(blocks, stages, (before, after))
    seconds = [before, *(1.0,) * blocks, after]
    # A stage begins at a block, or is what stands before or after them.
    starts = [i for i in range(1, len(seconds)) if (i > 1 or before > 0)]
    starts = [i for i in starts if i <= blocks or after > 0]
    every = [
        max(sum(seconds[a:b]) for a, b in zip((0, *cut), (*cut, len(seconds)), strict=True))
        for cut in combinations(starts, stages - 1)
    ]
    if found is None:
        assert not every
        return
    assert sum(found) == blocks
    assert len(found) == stages
    assert slowest(blocks, stages, (before, after), found) == pytest.approx(min(every))


def test_a_heavy_head_gets_fewer_blocks_beside_it() -> None:
    cluster = reserved("v100", 4)
    (before, after) = ends_of(headed(2), cluster, "eager", ("none",))["none"]
    assert before < 0.5 < 1.0 < after
    splits = {a.stage_blocks for a in points(cluster, 8) if a.pipeline == 2}
    assert None in splits
    (uneven,) = splits - {None}
    assert uneven is not None
    assert uneven[0] > uneven[1]
    # Recomputation makes blocks dearer, but not the head.
    again = ends_of(headed(2), cluster, "eager", ("full",))["full"]
    assert again[1] < after


@pytest.mark.parametrize(("devices", "batch"), [(2, 32), (4, 32)])
def test_the_search_finds_the_best_split(devices: int, batch: int) -> None:
    found = reserved("v100", devices)
    inner = Problems(headed, BLOCKS, found)
    space = [a for a in points(found, batch) if a.pipeline > 1 and a.micro_batch == 2]
    result = search_whole(space, inner)
    other = inner.under(inner.limit)
    other.prepare(space)
    prices = {}
    for a in space:
        solved = other.solve(a)
        assert solved.fits
        prices[a] = solved.step.step_time.total_s
        for bound in (*bounds(other, a), solved.bound):
            assert bound <= prices[a] * (1 + 1e-9), a.label
    assert result.certificate.step_time_s == min(prices.values())
    assert result.arrangement.stage_blocks is not None
    assert prices[result.arrangement] < min(p for a, p in prices.items() if a.stage_blocks is None)
    schedule = result.arrangement.schedule()
    assert schedule.stage_blocks == result.arrangement.stage_blocks
    assert "+" in result.arrangement.label


def test_blocks_that_do_not_divide_have_uneven_stages() -> None:
    cluster = reserved("v100", 4)
    space = points(cluster, 8, blocks=7)
    splits = {a.stage_blocks for a in space if a.pipeline == 4 and a.virtual_stages == 1}
    assert splits
    assert None not in splits
    assert all(split is not None and sum(split) == 7 for split in splits)
    with pytest.raises(MeshError, match="pipeline may be 1"):
        arrangements(cluster, 8, 7, axes={"pipeline": (3, 3)})


def test_uneven_stages_hold_within_a_memory_limit() -> None:
    found = reserved("v100", 2)
    free = Problems(headed, BLOCKS, found)
    space = [a for a in points(found, 8) if a.stage_blocks is not None]
    free.prepare(space)
    best = search_whole(space, free).found.step
    least = min(free.scheduled(a).leanest_bytes() for a in space)
    limit = int(least + 0.4 * (best.memory.total_bytes - least))
    result = search_whole(space, free.under(limit))
    other = free.under(limit)
    other.prepare(space)
    prices = []
    for a in space:
        solved = other.solve(a)
        if solved.fits:
            prices.append(solved.step.step_time.total_s)
            assert solved.step.memory.total_bytes <= limit
            assert all(bound <= prices[-1] * (1 + 1e-9) for bound in bounds(other, a)), a.label
    assert best.step_time.total_s < result.found.step.step_time.total_s == min(prices)
