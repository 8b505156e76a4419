"""Plans that place experts, from the whole space, on real processes."""

from __future__ import annotations

import pytest

import autoshard
from autoshard.plan import Schedule

MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    "axes",
    [{"expert": 2}, {"expert": 4}, {"expert": 2, "data": 2}, {"expert": 2, "context": 2}],
    ids=str,
)
def test_a_plan_over_experts_computes_what_one_device_does(axes: dict[str, int]) -> None:
    devices = axes["expert"] * axes.get("data", 1) * axes.get("context", 1)
    plan = autoshard.optimize(
        MIXTRAL,
        cluster="h100",
        devices=devices,
        global_batch=devices // axes.get("context", 1),
        seq_len=8,
        dtype="float32",
        space="full",
        axes={"pipeline": 1, "model": 1, "replica": 1, **axes},
    )
    layers = [p for name, p in plan.parameters.items() if "experts" in name]
    assert layers
    assert all(p.layout["expert"] == "S(0)" for p in layers)
    assert plan.parameters["lm_head.weight"].layout["expert"] == "R"
    assert "expert parallel" in plan.label
    # Each device updates all that it holds: what is shared is not run.
    alone = plan.model_copy(update={"schedule": Schedule()})
    report = alone.validate(MIXTRAL, steps=1, progress=None)
    assert report.passed
    assert report.collectives.issued == report.collectives.predicted > 0
