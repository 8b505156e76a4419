"""Blocks with one choice of strategies beside blocks with another."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.plan import Schedule
from autoshard.search.mixing import _beside, inside
from autoshard.search.scheduled import Found, Scheduled
from autoshard.search.space import Arrangement
from autoshard.search.stages import chunk_bounds
from autoshard.search.step import crossing_nodes, later_blocks
from autoshard.search.sums import Others
from autoshard.search.whole import Problems, search_whole
from tests.search.test_whole import problems, reserved, space

points = st.lists(
    st.tuples(st.integers(0, 40).map(float), st.integers(0, 40).map(float)), min_size=1, max_size=9
)


@given(points, st.floats(0, 40))
def test_the_pair_beside_the_room_is_the_best_of_all_pairs(
    drawn: list[tuple[float, float]], room: float
) -> None:
    seconds, sizes = np.array(drawn).T
    found = _beside(seconds, sizes, room)

    def between(low: int, high: int) -> float:
        share = (room - sizes[low]) / (sizes[high] - sizes[low])
        return float(seconds[low] + share * (seconds[high] - seconds[low]))

    every = range(len(drawn))
    alone = min((seconds[i] for i in every if sizes[i] <= room), default=np.inf)
    mixtures = [
        between(*sorted(pair, key=lambda i: sizes[i]))
        for pair in combinations(every, 2)
        if min(sizes[list(pair)]) <= room < max(sizes[list(pair)])
    ]
    if found is None:
        assert alone <= min(mixtures, default=np.inf) + 1e-9
        return
    low, high = found
    assert sizes[low] <= room < sizes[high]
    assert seconds[high] < seconds[low]
    assert between(low, high) == pytest.approx(min([alone, *mixtures]))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_ranks_and_their_chunks_have_the_same_share(
    stages: int, virtual: int, each: int, data: st.DataObject
) -> None:
    blocks = stages * virtual * each
    count = data.draw(st.integers(0, blocks))
    is_block = [False, *(True,) * blocks, False]
    schedule = Schedule(
        microbatches=stages,
        stages=stages,
        virtual_stages=virtual if stages > 1 else 1,
        order="interleaved" if virtual > 1 and stages > 1 else "1f1b",
    )
    chosen = later_blocks(is_block, schedule, count)
    assert len(chosen) == count
    chunks = schedule.stages * schedule.virtual_stages
    bounds = chunk_bounds(is_block, [0.0] * len(is_block), chunks)
    inside_of = [
        [i in chosen for i in range(low, high) if is_block[i]] for low, high in pairwise(bounds)
    ]
    ranks = [sum(map(sum, inside_of[r::stages])) for r in range(stages)]
    assert max(ranks) - min(ranks) <= 1
    for rank in range(stages):
        own = [sum(chunk) for chunk in inside_of[rank::stages]]
        assert own == sorted(own)
        assert own[-1] - own[0] <= 1
    for chunk in inside_of:
        assert chunk == sorted(chunk)  # the last ones


def test_what_a_block_hands_on_is_not_inside() -> None:
    inner = problems("llama", reserved("h100", 4))
    folded = inner.folded(space("llama", inner.cluster, 8, {"pipeline": (1, 1)})[-1])
    within = inside(folded)
    names = {}
    for name, kind in zip(folded.tables.variables, folded.kind, strict=True):
        names.setdefault(kind, set()).add(name)
    crossing = crossing_nodes(folded.graph, folded.parts)
    assert crossing
    for kind, is_inside in enumerate(within):
        segments = {folded.segment_of[name] for name in names[kind]}
        if is_inside:
            assert all(folded.is_block[i] for i in segments)
            assert not names[kind] & set(crossing)
    assert 0 < within.sum() < len(within)


def mixed(inner: Problems, points: list[Arrangement]) -> list[tuple[Arrangement, Found]]:
    inner.prepare(points)
    solved = [(a, inner.solve(a)) for a in points if inner.floors.room(a) >= 0]
    return [(a, found) for a, found in solved if found.others is not None]


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "axes"),
    [
        ("llama", "v100", 4, {"context": (1, 1)}),
        ("wide", "v100", 8, {"context": (1, 1), "pipeline": (1, 2)}),
    ],
)
def test_it_is_faster_fits_and_is_no_faster_than_the_bound(
    model: str, cluster: str, batch: int, axes: dict[str, tuple[int, int | None]]
) -> None:
    inner = problems(model, reserved(cluster, 4))
    points = space(model, inner.cluster, batch, axes)
    need = search_whole(points, inner).found.step.memory.total_bytes
    least = min(inner.scheduled(a).leanest_bytes() for a in points)
    short = inner.under(int(0.5 * (need + least)))
    found = mixed(short, points)
    assert found
    for a, one in found:
        assert one.others is not None
        assert 0 < one.others.blocks < inner.blocks
        assert one.fits
        assert one.bound <= one.step.step_time.total_s
        run = Scheduled(short.folded(a), short.schedule(a), short.limit)
        run.bound()
        assert one.step.step_time.total_s < run.solve(alike=True).step.step_time.total_s
        # Alike outside of the blocks, and in what one hands to the next.
        within = inside(short.folded(a))
        assert (one.tied.choice == one.others.tied.choice)[~within].all()
        folded, schedule = short.folded(a), short.schedule(a)
        both = [folded.step(t, schedule, None) for t in (one.tied, one.others.tied)]
        assert both[0].memory.total_bytes < one.step.memory.total_bytes
        assert both[1].memory.total_bytes > one.step.memory.total_bytes
        assert both[1].step_time.total_s < both[0].step_time.total_s
        # As many as fit: with one more it does not, or is no faster.
        others = Others(one.others.tied, one.others.blocks + 1)
        more = folded.step(one.tied, schedule, short.limit, others)
        seconds = more.step_time.total_s
        assert not more.memory.fits or not one.bound <= seconds < one.step.step_time.total_s
