"""No plan of the space is faster than a point of the front and takes no more than it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, RequestError
from autoshard.planner.family import Family
from autoshard.search import Asked, search
from autoshard.search.front import FullSpace, PlainSpace, Point, sampled, sweep, undominated
from autoshard.search.space import arrangements
from autoshard.search.whole import Problems
from autoshard.stretch import Growth
from tests.search.model_graphs import llama

GRAPH = llama(2, batch=8)
H100 = replace(Cluster.preset("h100", 8), reserve_bytes=0, reserve=None)


@cache
def full() -> FullSpace:
    family = Family(Growth(llama(3, 2), llama(3, 4)), 4)
    cluster = H100.with_devices(2)
    points = arrangements(cluster, 8, family.blocks, axes={"pipeline": (1, 2)})
    return FullSpace(points, Problems(family.few, family.blocks, cluster))


def check(points: list[Point]) -> None:
    sizes = [p.memory.total_bytes for p in points]
    times = [p.step_time.total_s for p in points]
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)
    assert len(set(sizes)) == len(set(times)) == len(points) > 2


def test_no_answer_of_the_plain_search_is_faster_than_the_front() -> None:
    cluster = H100.with_devices(2)
    space = PlainSpace(Asked(graph=GRAPH, cluster=cluster))
    points = sweep(space.best, space.limit, 0.1)
    check(points)
    assert search(GRAPH, cluster).best.step_time == points[0].step_time
    for candidate in space.candidates.values():
        other = space.one(candidate, space.limit)
        for point in points:
            fits = other.memory.total_bytes <= point.memory.total_bytes
            assert not fits or other.step_time.total_s >= point.step_time.total_s
    with pytest.raises(InfeasibleError):
        search(GRAPH, cluster, memory_limit=int(points[-1].memory.total_bytes * 0.9) - 1)


def test_nothing_that_was_priced_is_faster_and_smaller_than_a_point_of_the_full_front() -> None:
    space = full()
    points = sweep(space.best, space.limit, 0.1)
    check(points)
    limits = [p.memory.total_bytes for p in points]
    for candidate in space.candidates.values():
        for limit in limits:
            other = space.one(candidate, limit)
            for point in points:
                fits = other.memory.total_bytes <= point.memory.total_bytes
                assert not fits or other.step_time.total_s >= point.step_time.total_s * (1 - 1e-9)


def test_a_study_of_two_objectives_finds_nothing_better(tmp_path: Path) -> None:
    space = full()
    exact = sweep(space.best, space.limit, 0.05)
    storage = f"sqlite:///{tmp_path / 'front.db'}"

    def study(trials: int) -> list[Point]:
        return sampled(space, sampler="nsga", trials=trials, seed=1, storage=storage, name="front")

    first, found = study(15), study(30)
    assert found
    assert undominated([*first, *found]) == found
    for point in found:
        within = [p for p in exact if p.memory.total_bytes <= point.memory.total_bytes]
        if within:
            assert point.step_time.total_s >= within[0].step_time.total_s * (1 - 0.01)


def test_the_question_in_python() -> None:
    answer = autoshard.front(
        GRAPH.to_json(), cluster=H100.with_devices(2), spacing=0.2, progress=None
    )
    plan = autoshard.optimize(GRAPH.to_json(), cluster=H100.with_devices(2), progress=None)
    assert answer.points[0].step_time_s == plan.predicted_step_s
    assert answer.points[0].label in str(answer)
    assert type(answer).model_validate_json(answer.to_json()) == answer
    with pytest.raises(InfeasibleError):
        autoshard.front(GRAPH.to_json(), cluster=H100, memory_limit_bytes=1000, progress=None)
    with pytest.raises(RequestError, match="a share between 0 and 1"):
        autoshard.front(GRAPH.to_json(), cluster=H100, spacing=0.0, progress=None)
    with pytest.raises(RequestError, match="are a sampler's"):
        autoshard.front(GRAPH.to_json(), cluster=H100, trials=3, progress=None)
