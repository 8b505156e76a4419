"""Zero-bubble in the whole space: tables of W, bounds, memory, and where it wins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import RequestError
from autoshard.kernels import STYLES, Style
from autoshard.plan import Schedule
from autoshard.search.bounds import ways
from autoshard.search.feasible import SURE
from autoshard.search.folded import Folded, Weights
from autoshard.search.pipeline import Chunk, duration, simulate
from autoshard.search.places import seconds_by_place
from autoshard.search.problem import LEANEST
from autoshard.search.scheduled import Scheduled
from autoshard.search.space import Arrangement, Range, arrangements
from autoshard.search.whole import Problems, search_whole
from tests.search.test_whole import MODELS, bounds, problems, reserved, space

SECONDS = st.lists(st.tuples(*[st.floats(0, 3)] * 3), min_size=8, max_size=8)


@given(st.integers(2, 8), st.integers(1, 25), SECONDS, st.sampled_from([0.0, 0.3]))
@settings(max_examples=300, deadline=None)
def test_no_way_is_longer_than_the_step(
    stages: int, m: int, seconds: list[tuple[float, float, float]], send_s: float
) -> None:
    chunks = [Chunk(f, b + w, w, send_s) for f, b, w in seconds[:stages]]
    total, _ = simulate("zero-bubble", chunks, stages, m)
    for way in ways(Schedule(microbatches=m, stages=stages, order="zero-bubble")):
        assert way.seconds(chunks) <= total * (1 + 1e-9), way


@given(st.integers(2, 8), st.integers(0, 20), *[st.floats(0.1, 3) for _ in range(3)])
@settings(max_examples=200, deadline=None)
def test_a_way_has_the_closed_form_on_equal_chunks(
    stages: int, more: int, forward: float, back: float, weight: float
) -> None:
    m = stages + more
    chunks = [Chunk(forward, back + weight, weight)] * stages
    found = ways(Schedule(microbatches=m, stages=stages, order="zero-bubble"))
    waiting = (stages - 1) * max(forward + back - weight, forward, back)
    longest = max(way.seconds(chunks) for way in found)
    assert longest == pytest.approx(m * (forward + back + weight) + waiting)


@pytest.mark.parametrize("m", [40, 3000])
def test_ways_bound_long_steps_that_are_not_simulated_whole(m: int) -> None:
    uneven = [Chunk(1.0, 2.1, 0.9, 0.1)] * 15 + [Chunk(1.5, 2.9, 1.4, 0.1)]
    total = duration("zero-bubble", uneven, 16, m)
    longest = max(
        way.seconds(uneven)
        for way in ways(Schedule(microbatches=m, stages=16, order="zero-bubble"))
    )
    assert 0.97 * total < longest <= total * (1 + 1e-9)


def arrangement(recompute: str = "none", **sizes: int) -> Arrangement:
    found = {"pipeline": 2, "replica": 1, "data": 2, "model": 2} | sizes
    return Arrangement(
        **found,
        micro_batch=1,
        microbatches=4,
        virtual_stages=1,
        order="zero-bubble",
        recompute=recompute,
    )


def placed(name: str, a: Arrangement, style: Style = "eager") -> Folded:
    graphs, blocks = MODELS[name]
    cluster = reserved("h100", a.pipeline * a.devices)
    return Problems(graphs, blocks, cluster, style=style).folded(a)


def some_weights(folded: Folded, **rows: tuple[float, ...]) -> Weights:
    none = (0.0,) * len(folded.parts)
    names = ("forward", "backward", "update", "late", "stored", "kept", "weight")
    return Weights(**(dict.fromkeys(names, none) | rows))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("price", [0.0, 1e-10])
@pytest.mark.parametrize("name", MODELS)
def test_tables_take_as_long_as_the_tasks_of_a_step(
    name: str, price: float, recompute: str
) -> None:
    a = arrangement(recompute)
    folded, schedule = placed(name, a), a.schedule()
    sums = Scheduled(folded, schedule, None).sums(0.0)
    _, tied = folded.minimum(sums, price)
    tied = replace(tied, again=frozenset())  # gathers of a choice of their own
    _, measured = folded.measured(tied, schedule)
    found = folded.passes_at(schedule, tied.choice)
    for stands, part in zip(folded.stands_for, measured.parts, strict=True):
        exact = part.forward_s, part.backward_s - part.weight_s, part.weight_s
        assert found[:, stands] == pytest.approx(exact, rel=1e-9)
    assert (found[:, folded.is_block.index(True)] > 0).all()
    # And the sum that is minimised counts each of the three by itself.
    for row, kind in enumerate(("forward", "backward", "weight")):
        one = some_weights(folded, **{kind: (1.0,) * len(folded.parts)})
        total = folded.measure(folded.sums(Schedule(recompute=recompute), one), *choice(tied))
        assert total.seconds == pytest.approx(found[row].sum(), rel=1e-9)


def choice(tied: object) -> tuple[object, frozenset[int]]:
    return tied.choice, frozenset()  # type: ignore[attr-defined]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("price", [0.0, 1e-10, LEANEST])
@pytest.mark.parametrize("name", MODELS)
def test_what_waits_by_the_tables_is_no_more_than_what_waits(
    name: str, price: float, style: Style
) -> None:
    a = arrangement()
    folded, schedule = placed(name, a, style), a.schedule(style)
    _, tied = folded.minimum(Scheduled(folded, schedule, None).sums(0.0), price)
    _, measured = folded.measured(tied, schedule)
    for part in sorted({*folded.stands_for}):
        one = tuple(float(i == part) for i in range(len(folded.parts)))
        sums = folded.sums(schedule, some_weights(folded, waiting=one))
        found = folded.measure(sums, tied.choice, tied.again).num_bytes
        exact = measured.parts[folded.stands_for.index(part)].waiting
        assert found <= SURE * exact
        if folded.is_block[part]:
            assert found >= 0.3 * exact > 0


WON = [
    ("llama", "h100", 8, 8, {"pipeline": (2, None)}, None),
    ("llama", "v100", 8, 16, {"pipeline": (4, None)}, None),
    ("wide", "h100", 4, 8, {"pipeline": (2, None)}, None),
    ("mlp", "v100", 8, 16, {"pipeline": (2, None)}, None),
    ("experts", "v100", 4, 8, {"pipeline": (2, None), "expert": (1, 2)}, None),
    ("wide", "v100", 4, 8, {"pipeline": (2, None)}, 0.5),
]
"""Model, cluster, devices, samples of a step, ranges of axes: spaces where zero-bubble is fastest;
and what there is of the bytes that the best takes more than the leanest, None: enough."""


@pytest.mark.parametrize(
    ("model", "cluster", "devices", "batch", "axes", "share"),
    WON,
    ids=lambda v: str(v).replace(" ", ""),
)
def test_the_search_finds_zero_bubble_where_it_is_the_fastest(
    model: str,
    cluster: str,
    devices: int,
    batch: int,
    axes: dict[str, Range],
    share: float | None,
) -> None:
    found = reserved(cluster, devices)
    points = space(model, found, batch, axes)
    inner = problems(model, found)
    if share is not None:
        inner.prepare(points)
        best = search_whole(points, inner).found.step
        least = min(inner.scheduled(a).leanest_bytes() for a in points)
        inner = inner.under(int(least + share * (best.memory.total_bytes - least)))
        assert best.memory.total_bytes > inner.limit
    result = search_whole(points, inner)
    assert result.arrangement.order == "zero-bubble"
    other = inner.under(inner.limit)
    other.prepare(points)
    prices = []
    for a in points:
        solved = other.solve(a)
        if solved.fits:
            prices.append(solved.step.step_time.total_s)
            for bound in (*bounds(other, a), solved.bound):
                assert bound <= prices[-1] * (1 + 1e-9), a.label
    assert result.found.step.step_time.total_s == min(prices)
    assert result.certificate.lower_bound_s <= min(prices)


def test_an_order_goes_with_its_chunks() -> None:
    with pytest.raises(RequestError, match="2 chunks a stage do not go with the order '1f1b'"):
        replace(arrangement(), virtual_stages=2, order="1f1b")
    assert arrangement().label == "pipeline=2 zero-bubble, data=2, model=2, 4 microbatches of 1"
    assert arrangement().params["order"] == arrangement().schedule().order == "zero-bubble"


def test_each_pipeline_of_one_chunk_may_be_zero_bubble() -> None:
    cluster = reserved("h100", 16)
    points = arrangements(cluster, 16, 8)
    split = [a for a in points if a.order == "zero-bubble"]
    assert {a.pipeline for a in split} == {2, 4, 8}
    assert {replace(a, order="1f1b") for a in split} == {
        a for a in points if a.order == "1f1b" and a.pipeline > 1
    }
    left = arrangements(cluster, 16, 8, orders=("1f1b", "interleaved"))
    assert left == [a for a in points if a.order != "zero-bubble"]
    alone = arrangements(cluster, 16, 8, orders=("zero-bubble",))
    assert {a.order for a in alone if a.pipeline == 1} == {"1f1b"}
    assert {a.order for a in alone if a.pipeline > 1} == {"zero-bubble"}


def test_seconds_by_place_have_both_halves_of_backward() -> None:
    a = arrangement()
    folded = placed("llama", a)
    tied = Scheduled(folded, a.schedule(), None).solve().tied
    program, _ = folded.measured(tied, a.schedule())
    found = [
        sum(
            seconds
            for (_, what), seconds in seconds_by_place(folded.model, program, schedule).items()
            if what == "computing"
        )
        for schedule in (a.schedule(), replace(a, order="1f1b").schedule())
    ]
    assert found[0] == pytest.approx(found[1], rel=0.02)
    assert found[0] >= found[1] * (1 - 1e-9)
