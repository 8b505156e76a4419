"""The plan that ran fastest is picked; what failed is kept; a stored run is not repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import RankError, RequestError, UnknownNameError, ValidationError
from autoshard.planner.measured import SAMPLERS, candidates, chosen, pick
from autoshard.search import Configuration, SearchResult, search
from tests.search.model_graphs import llama

GRAPH = llama(2, batch=8)


def result() -> SearchResult:
    return search(GRAPH, Cluster.preset("h100", 8))


def test_candidates_differ_and_the_plan_is_first() -> None:
    found = result()
    order = candidates(found)
    assert order[0] == found.configuration
    times = [found.priced[c].step_time.total_s for c in order]
    assert times == sorted(times)
    programs = [(c.sizes, found.priced[c].strategies) for c in order]
    assert all(a != b for i, a in enumerate(programs) for b in programs[:i])


def test_the_fastest_run_is_picked_whatever_was_predicted() -> None:
    found, ran = result(), []
    wanted = candidates(found)[2]

    def run(c: Configuration) -> float:
        ran.append(c)
        return 0.5 if c == wanted else 1.0

    choice = pick(found, 3, run, say=lambda text: None)
    assert choice.best == wanted
    assert ran == candidates(found)[:3]
    assert choice.runs[0].measured_step_s == 0.5
    predicted = found.priced[wanted].step_time.total_s
    assert choice.runs[0].predicted_step_s == predicted


def test_what_fails_is_kept_with_its_first_line() -> None:
    found = result()
    first = candidates(found)[0]

    def run(c: Configuration) -> float:
        if c == first:
            raise RankError("rank 3: no room\nmore", rank=3)
        return 1.0

    choice = pick(found, 2, run, say=lambda text: None)
    assert choice.best != first
    failed = choice.runs[-1]
    assert failed.label == first.label
    assert failed.measured_step_s is None
    assert "rank 3: no room" in failed.error

    def none(c: Configuration) -> float:
        raise RankError("nothing works", rank=0)

    with pytest.raises(ValidationError, match=r"none of 2 plans ran; .*nothing works"):
        pick(found, 2, none, say=lambda text: None)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_proposes_and_no_plan_runs_twice(sampler: str) -> None:
    found = result()
    ran: list[str] = []

    def run(c: Configuration) -> float:
        ran.append(c.label)
        return found.priced[c].step_time.total_s * (1 + len(c.label) % 3)

    choice = pick(found, 4, run, sampler=sampler, seed=1, say=lambda text: None)
    assert len(ran) == len(set(ran)) == 4
    assert ran[0] == found.configuration.label
    best = min(choice.runs, key=lambda r: r.measured_step_s or 0.0)
    assert choice.best.label == best.label
    with pytest.raises(UnknownNameError, match="unknown sampler of real runs 'tp'"):
        pick(found, 1, run, sampler="tp", say=lambda text: None)


def test_a_stored_run_is_not_repeated(tmp_path: Path) -> None:
    found = result()
    storage = f"sqlite:///{tmp_path / 'runs.db'}"
    ran: list[str] = []

    def run(c: Configuration) -> float:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(c.label)
        return 1.0 + len(ran)

    with pytest.raises(KeyboardInterrupt):
        pick(found, 4, run, storage=storage, name="x", say=lambda text: None)
    again: list[str] = []

    def go_on(c: Configuration) -> float:
        again.append(c.label)
        return 9.0

    choice = pick(found, 4, go_on, storage=storage, name="x", say=lambda text: None)
    assert not set(ran) & set(again)
    assert len(ran) + len(again) == len(choice.runs) == 4
    assert choice.best.label == ran[0]


def test_a_small_model_is_really_run() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    plan = autoshard.optimize(model, torch.zeros(8, 16), devices=2, measure=2, progress=None)
    assert [r.error for r in plan.real_runs] == ["", ""]
    times = [r.measured_step_s for r in plan.real_runs]
    assert all(t is not None and t > 0 for t in times)
    assert times == sorted(times, key=lambda t: t or 0.0)
    assert "Really run" in plan.explain()
    loaded = autoshard.Plan.from_json(plan.to_json())
    assert loaded.real_runs == plan.real_runs
    assert plan.real_runs[0].predicted_step_s == plan.predicted_step_s


def test_measuring_is_of_the_plain_space() -> None:
    with pytest.raises(RequestError, match="leave validate and measure out"):
        autoshard.optimize("gpt2", cluster="h100", space="full", measure=1, progress=None)
    with pytest.raises(RequestError, match="measure must be a positive whole number"):
        autoshard.optimize("gpt2", cluster="h100", measure=0, progress=None)


def test_what_lost_by_measurement_says_so() -> None:
    plan = autoshard.optimize(GRAPH.to_json(), cluster="h100", progress=None)
    found = search(GRAPH, Cluster.preset("h100", 8))
    slow = candidates(found)[1]
    choice = pick(found, 2, lambda c: 1.0 if c == slow else 2.0, say=lambda text: None)
    other = plan.model_copy(
        update={"step_time": found.priced[slow].step_time, "alternatives": _all_but(found, slow)}
    )
    whys = {a.label: a.why for a in chosen(other, choice).alternatives}
    assert whys[found.configuration.label] == "predicted no slower, but ran in 2.00 s"


def _all_but(found: SearchResult, best: Configuration) -> tuple[object, ...]:
    from autoshard.search import alternatives

    return alternatives(found.priced, best)
