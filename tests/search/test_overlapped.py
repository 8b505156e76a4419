"""Messages beside computing, as the search of the whole space sees them."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from autoshard.cluster import Cluster
from autoshard.errors import RequestError
from autoshard.plan import Schedule
from autoshard.search.bounds import ways, weights
from autoshard.search.folded import Shares
from autoshard.search.scheduled import Scheduled
from autoshard.search.space import Arrangement, Range, arrangements
from autoshard.search.step import Work, measure
from autoshard.search.whole import Problems, search_whole
from tests.search.test_whole import MODELS, TOKENS, bounds, reserved
from tests.search.test_whole import space as whole_space

OVERLAPS = (("data",), ("context", "model"), ("data", "context", "model"))


@cache
def problems(model: str, cluster: str, devices: int, overlapped: tuple[str, ...]) -> Problems:
    graphs, depth = MODELS[model]
    return Problems(graphs, depth, reserved(cluster, devices), overlapped=overlapped)


def space(
    model: str, cluster: Cluster, batch: int, axes: dict[str, Range] | None = None
) -> list[Arrangement]:
    """Zero-bubble is not searched with messages beside computing."""
    return [a for a in whole_space(model, cluster, batch, axes) if not a.splits_backward]


CASES: list[tuple[str, str, int, int, dict[str, Range]]] = [
    ("llama", "h100", 4, 8, {"pipeline": (1, 2), "model": (1, 2)}),
    ("llama", "v100", 4, 4, {"pipeline": (1, 1)}),
    ("mlp", "v100", 4, 8, {}),
    ("wide", "v100", 4, 2, {"context": (2, None)}),
    ("llama", "h100", 16, 16, {"pipeline": (2, 2), "model": (1, 1), "context": (1, 1)}),
]


@pytest.mark.parametrize("overlapped", OVERLAPS, ids="+".join)
@pytest.mark.parametrize(("model", "cluster", "devices", "batch", "axes"), CASES)
def test_bounds_hold_and_the_search_finds_what_enumeration_finds(
    model: str,
    cluster: str,
    devices: int,
    batch: int,
    axes: dict[str, Range],
    overlapped: tuple[str, ...],
) -> None:
    inner = problems(model, cluster, devices, overlapped)
    points = space(model, inner.cluster, batch, axes)
    result = search_whole(points, inner)
    other = inner.under(inner.limit)
    other.prepare(points)
    prices = []
    for a in points:
        found = other.solve(a)
        assert found.fits
        prices.append(found.step.step_time.total_s)
        for bound in (*bounds(other, a), found.bound):
            assert bound <= prices[-1] * (1 + 1e-9), a.label
    assert result.found.step.step_time.total_s == min(prices)
    assert result.certificate.lower_bound_s <= min(prices)


@pytest.mark.parametrize(("model", "share"), [("llama", 0.2), ("wide", 0.5)])
def test_bounds_hold_within_a_memory_limit(model: str, share: float) -> None:
    inner = problems(model, "v100", 4, ("data",))
    points = space(model, inner.cluster, 8, {"context": (1, 1), "pipeline": (1, 1)})
    best = search_whole(points, inner)
    least = min(inner.scheduled(a).leanest_bytes() for a in points)
    need = best.found.step.memory.total_bytes
    other = inner.under(int(least + share * (need - least)))
    result = search_whole(points, other)
    prices = []
    for a in points:
        found = other.solve(a)
        if found.fits:
            prices.append(found.step.step_time.total_s)
            for bound in (*bounds(other, a), found.bound):
                assert bound <= prices[-1] * (1 + 1e-9), a.label
    assert result.found.step.step_time.total_s == min(prices)


def test_what_runs_beside_is_no_longer_waited_for() -> None:
    plain, beside = (problems("mlp", "v100", 8, axes) for axes in ((), OVERLAPS[-1]))
    points = space("mlp", plain.cluster, 16)
    faster = [
        beside.solve(a).step.step_time.total_s / plain.solve(a).step.step_time.total_s
        for a in points
    ]
    assert all(ratio <= 1 + 1e-9 for ratio in faster)
    assert min(faster) < 0.9


def sharded(recompute: str = "none") -> Arrangement:
    return Arrangement(
        pipeline=1,
        replica=1,
        data=4,
        model=2,
        micro_batch=2,
        microbatches=2,
        virtual_stages=1,
        recompute=recompute,
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("overlapped", OVERLAPS, ids="+".join)
def test_tables_tell_messages_beside_computing_as_the_step_does(
    overlapped: tuple[str, ...], recompute: str
) -> None:
    a = sharded(recompute)
    inner = problems("wide", "v100", 8, overlapped)
    folded, schedule = inner.folded(a), inner.schedule(a)
    run = inner.scheduled(a)
    random = np.random.default_rng(1)
    for shares in (*run.extremes, run._leaning(folded.minimum(run.sums(0.0))[1])):
        run.beside = shares
        _, tied = folded.minimum(run.sums(0.0), float(random.choice([0.0, 1e-11, 1e-9])))
        told = folded.beside_at(schedule, tied.choice, tied.again)
        parts = measure(folded.model, folded.program(tied), schedule).parts
        for part, passes in zip(parts, told, strict=True):
            for happenings, (computing, messages) in zip(
                (part.forward, part.backward), passes, strict=True
            ):
                works = sum(folded.model.seconds(h) for h in happenings if isinstance(h, Work))
                sent = sum(
                    h.seconds for h in happenings if not isinstance(h, Work | tuple) and h.is_beside
                )
                assert computing == pytest.approx(works)
                if part.is_block:
                    assert messages == pytest.approx(sent)


@pytest.mark.parametrize("shares", list(product((0.0, 0.4, 1.0), repeat=2)))
def test_any_shares_give_a_bound_and_the_right_ones_the_sum(shares: tuple[float, float]) -> None:
    a = sharded()
    inner = problems("wide", "v100", 8, ("data",))
    folded, schedule = inner.folded(a), inner.schedule(a)
    run = inner.scheduled(a)

    def seconds(beside: Shares) -> float:
        found = weights(
            folded.is_block,
            folded.stands_for,
            schedule,
            way=ways(schedule)[0],
            memory_rank=0,
            beside=beside,
        )
        return folded.measure(folded.sums(schedule, found), tied.choice, tied.again).seconds

    _, tied = folded.minimum(run.sums(0.0))
    step = folded.step(tied, schedule, None)
    total = step.step_time.total_s - step.late_s
    assert seconds((shares,) * len(folded.parts)) <= total * (1 + 1e-9)
    assert seconds(run._leaning(tied)) == pytest.approx(total, rel=1e-6)


def test_the_leanest_gathers_every_parameter_again() -> None:
    # As FSDP does, vectors too: a plan within what that needs may be that.
    run = Scheduled(problems("llama", "h100", 8, ("data",)).folded(sharded()), Schedule(), 1)
    found = run.solve()
    assert not found.fits
    assert found.step.memory.gathered_bytes == 0


def test_a_schedule_without_overlap_has_one_sum() -> None:
    inner = problems("llama", "h100", 4, ())
    a = arrangements(inner.cluster, 8, 8, tokens=TOKENS["llama"])[0]
    assert inner.folded(a).extremes == (None,)
    assert inner.schedule(a) == a.schedule()
    assert isinstance(inner.schedule(a), Schedule)


def test_zero_bubble_is_refused_where_messages_run_beside_computing() -> None:
    inner = problems("llama", "h100", 4, ("data",))
    points = whole_space("llama", inner.cluster, 8, {"pipeline": (2, 2)})
    with pytest.raises(RequestError, match="leave zero-bubble out"):
        inner.under(inner.limit).prepare(points)
