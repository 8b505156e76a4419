"""Plans that cut the tokens of each sample, from the whole space, on real processes."""

from __future__ import annotations

import pytest

import autoshard
from autoshard.plan import Schedule
from autoshard.planner.family import family_of
from tests.test_stretch import LLAMA


@pytest.mark.parametrize("batch", [1, 2])
def test_a_plan_over_context_computes_what_one_device_does(batch: int) -> None:
    model = {**LLAMA, "num_hidden_layers": 3}
    plan = autoshard.optimize(
        model,
        cluster="h100",
        devices=4,
        global_batch=batch,
        seq_len=16,
        dtype="float32",
        space="full",
        axes={"context": 4 // batch, "pipeline": 1},
    )
    assert plan.label.endswith(f"context parallel over context={4 // batch}")
    assert plan.schedule.optimizer_shards == 4
    assert any("context" in c.axes and c.op == "reduce_scatter" for c in plan.collectives)
    # Each device updates all that it holds: what is shared is not run.
    alone = plan.model_copy(update={"schedule": Schedule()})
    report = alone.validate(model, steps=1, progress=None)
    assert report.passed
    assert report.collectives.issued == report.collectives.predicted > 0


def test_images_have_no_tokens() -> None:
    def say(text: str) -> None: ...

    assert family_of("vit-base", seq_len=None, dtype=None, say=say).tokens == 1
    assert family_of(LLAMA, seq_len=24, dtype=None, say=say).tokens == 24
