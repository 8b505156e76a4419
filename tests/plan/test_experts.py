"""Plans that place experts, from the whole space, on real processes."""

from __future__ import annotations

import pytest

import autoshard
from autoshard.errors import MeshError
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


def test_an_estimate_over_experts_is_the_price_of_that_arrangement() -> None:
    asked = {"cluster": "h100", "devices": 4, "global_batch": 8, "seq_len": 8, "dtype": "float32"}
    found = autoshard.estimate(
        MIXTRAL,
        mesh="ep=2,dp=2",
        strategy="hybrid",
        micro_batch=2,
        shard_optimizer=True,
        progress=None,
        **asked,  # type: ignore[arg-type]
    )
    assert found.mesh.axis_names == ("data", "expert", "model")
    assert found.schedule.microbatches == 1
    assert "expert parallel" in found.label
    whole = autoshard.optimize(
        MIXTRAL,
        space="full",
        axes={"expert": 2, "data": 2, "model": 1, "pipeline": 1, "replica": 1, "micro-batch": 2},
        recompute="none",
        progress=None,
        **asked,  # type: ignore[arg-type]
    )
    assert found.predicted_step_s == pytest.approx(whole.predicted_step_s, rel=0.02)


def test_an_axis_that_does_not_divide_the_experts_is_refused() -> None:
    with pytest.raises(MeshError, match=r"expert=3 does not divide .* layers of 4"):
        autoshard.estimate(
            MIXTRAL, mesh="expert=3", cluster="h100", devices=3, seq_len=8, progress=None
        )
    with pytest.raises(MeshError, match="has none"):
        autoshard.optimize(
            "gpt2", mesh="expert=2", cluster="h100", devices=2, seq_len=8, progress=None
        )
