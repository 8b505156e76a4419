"""Why a plan: what stands beside it is the best of its kind, and the parts add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autoshard
from autoshard.assemble import program_of
from autoshard.cluster import Cluster
from autoshard.errors import RequestError
from autoshard.planner.predicted import model_of
from autoshard.search.places import seconds_by_place
from tests.search.model_graphs import llama
from tests.test_stretch import LLAMA

GRAPH = llama(2, batch=8)
H100 = replace(Cluster.preset("h100", 8), reserve_bytes=0, reserve=None)


def test_all_seconds_have_a_place() -> None:
    plan = autoshard.optimize(GRAPH.to_json(), cluster=H100, progress=None)
    program = program_of(GRAPH, plan)
    places = seconds_by_place(model_of(program, plan), program, plan.schedule)
    computing = sum(s for (_, what), s in places.items() if what == "computing")
    assert computing == pytest.approx(plan.step_time.compute_s)
    fused = {"all_reduce over data", "all_reduce over model", "all_reduce over data x model"}
    for what in {w for _, w in places if w != "computing"} - fused:
        op, _, axes = what.partition(" over ")
        groups = [g for g in plan.collectives if g.op == op and " x ".join(g.axes) == axes]
        sent = sum(s for (_, w), s in places.items() if w == what)
        assert sent == pytest.approx(sum(g.seconds for g in groups))


def test_the_plain_space_has_every_strategy_and_mesh() -> None:
    plan = autoshard.optimize(GRAPH.to_json(), cluster=H100, progress=None)
    answer = plan.why(progress=None)
    labels = [other.label for other in plan.alternatives]
    asked = [a.asked for a in answer.alternatives]
    assert asked == sorted(asked, key=labels.index)
    assert len({a.split(",")[0] for a in asked}) >= 3
    for a in answer.alternatives:
        other = next(o for o in plan.alternatives if o.label == a.asked)
        assert a.time[-1].other == other.step_time_s
        assert a.memory[-1].other == other.memory_bytes
        assert (a.time[-1].plan, a.plan) == (plan.predicted_step_s, plan.label)
        assert a.places[0].other - a.places[0].plan >= a.places[-2].other - a.places[-2].plan
        assert "too much" in a.verdict or not a.fits or a.time[-1].other >= a.time[-1].plan
    assert f"Why {plan.label}" in str(answer)
    again = type(answer).model_validate_json(answer.to_json())
    assert again.to_json() == answer.to_json()


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "pipeline": ("without stages", {"pipeline": 1}),
    "model": ("without a model axis", {"model": 1}),
    "stages": ("with stages", {"pipeline": (2, None)}),
    "a model axis": ("with a model axis", {"model": (2, None)}),
}


def test_the_full_space_has_the_best_of_each_kind() -> None:
    def plan(**options: Any) -> autoshard.Plan:
        return autoshard.optimize(
            LLAMA,
            cluster=H100,
            global_batch=16,
            seq_len=64,
            space="full",
            progress=None,
            **options,
        )

    best = plan()
    answer = best.why(progress=None)
    assert len(answer.alternatives) >= 3
    compared = 0
    for a in answer.alternatives:
        assert a.time[-1].other >= best.predicted_step_s * (1 - 1e-9)
        for parts, total in ((a.time, a.time[-1]), (a.memory, a.memory[-1])):
            assert sum(p.other for p in parts[:-1]) == pytest.approx(total.other)
            assert sum(p.plan for p in parts[:-1]) == pytest.approx(total.plan)
        for words, axes in KINDS.values():
            if a.asked == words:
                compared += 1
                assert plan(axes=axes).predicted_step_s == a.time[-1].other
    assert compared
    loaded = autoshard.Plan.from_json(best.to_json())
    if not loaded.schedule.is_plain:
        with pytest.raises(RequestError, match="explained where it was searched"):
            loaded.why(progress=None)


@pytest.mark.parametrize("some", [0, 2, 4])
def test_places_of_some_recomputed_blocks_add_up(some: int) -> None:
    config = {**LLAMA, "num_hidden_layers": 4}
    plan = autoshard.estimate(
        config,
        mesh="data=2,model=2",
        cluster=H100.with_devices(4),
        global_batch=4,
        seq_len=64,
        recompute="full",
        recomputed_blocks=some,
        progress=None,
    )
    program = plan.program()
    places = seconds_by_place(model_of(program, plan), program, plan.schedule)
    busy = sum(seconds for (_, what), seconds in places.items() if what == "computing")
    assert busy == pytest.approx(plan.step_time.compute_s)
    none = plan.schedule.model_copy(update={"recompute": "none", "recomputed_blocks": None})
    alone = seconds_by_place(model_of(program, plan), program, none)
    least = sum(seconds for (_, what), seconds in alone.items() if what == "computing")
    full = none.model_copy(update={"recompute": "full"})
    every = seconds_by_place(model_of(program, plan), program, full)
    most = sum(seconds for (_, what), seconds in every.items() if what == "computing")
    assert busy == pytest.approx(least + some / 4 * (most - least))
    assert least < most


def test_what_waits_for_stages_loses_by_that() -> None:
    plan = autoshard.optimize(
        {**LLAMA, "num_hidden_layers": 6, "hidden_size": 1024, "vocab_size": 32000},
        cluster=H100.with_devices(2),
        global_batch=64,
        seq_len=512,
        space="full",
        axes={"pipeline": 2, "virtual-stages": 1, "micro-batch": 4},
        progress=None,
    )
    assert plan.schedule.stage_blocks is not None
    answer = next(a for a in plan.why(progress=None).alternatives if a.asked == "even stages")
    waiting = next(part for part in answer.time if part.name == "waiting for stages")
    assert waiting.other > waiting.plan
    assert "waiting for other stages" in answer.verdict
