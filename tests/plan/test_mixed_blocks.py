"""Plans in which some blocks have other strategies than the rest: priced whole, and run."""

from __future__ import annotations

import pytest

import autoshard
from autoshard.plan import Schedule
from autoshard.planner.plan import Plan
from autoshard.planner.predicted import model_of
from autoshard.search.step import price_step
from tests.test_stretch import LLAMA

MODEL = {**LLAMA, "num_hidden_layers": 8}


def planned(axes: dict[str, int], limit: int | None) -> Plan:
    return autoshard.optimize(
        MODEL,
        cluster="v100",
        devices=4,
        global_batch=8,
        seq_len=32,
        dtype="float32",
        space="full",
        axes=axes,
        memory_limit_bytes=limit,
        progress=None,
    )


def short(axes: dict[str, int], share: float) -> Plan:
    free = planned(axes, None)
    assert free.space is not None
    assert free.space.mixture is None
    reserve = free.memory.reserve_bytes
    found = planned(axes, reserve + int(share * (free.memory.total_bytes - reserve)))
    assert found.space is not None
    assert found.space.mixture is not None
    assert found.space.mixture in found.assumptions
    return found


@pytest.mark.parametrize(
    ("axes", "share"),
    [
        ({"pipeline": 1, "micro-batch": 4, "context": 1}, 0.83),
        ({"pipeline": 1, "micro-batch": 4, "context": 1}, 0.71),
        ({"pipeline": 2, "context": 1}, 0.89),
    ],
)
def test_the_price_of_the_whole_program_is_that_of_the_search(
    axes: dict[str, int], share: float
) -> None:
    plan = short(axes, share)
    program = plan.program(MODEL)
    step = price_step(model_of(program, plan), program, plan.schedule, plan.memory.limit_bytes)
    assert step.step_time.total_s == pytest.approx(plan.step_time.total_s)
    assert step.memory == plan.memory
    assert sorted(map(str, step.collectives)) == sorted(map(str, plan.collectives))
    told = plan.why(progress=None).alternatives
    for answer in told:
        assert answer.time[-1].plan == pytest.approx(plan.step_time.total_s)


def test_it_computes_what_one_device_does() -> None:
    plan = short({"pipeline": 1, "micro-batch": 8, "context": 1}, 0.77)
    program = plan.program(MODEL)
    blocks = {
        str(
            [program.strategies[n.name] for n in program.graph.nodes[start : start + repeat.length]]
        )
        for repeat in program.graph.repeats
        for start in repeat.starts
    }
    assert len(blocks) == 2
    alone = plan.model_copy(update={"schedule": Schedule()})
    report = alone.validate(MODEL, steps=1, progress=None)
    assert report.passed
    assert report.collectives.issued == report.collectives.predicted > 0
