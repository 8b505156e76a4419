"""Llama-3-8B with AdamW in bf16 on eight H100."""

from __future__ import annotations

import pytest

from autoshard import InfeasibleError, Plan, estimate, optimize

REQUEST = {"cluster": "h100", "devices": 8, "dtype": "bf16", "progress": None}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return optimize("llama-3-8b", **REQUEST)


def test_pure_data_parallelism_is_refused_for_memory(plan: Plan) -> None:
    (data,) = [a for a in plan.alternatives if a.label.startswith("data")]
    assert not data.fits
    # 8.03e9 parameters: 2 bytes, 2 of gradient, 12 of AdamW with its float32 copy
    assert data.memory_bytes is not None
    assert data.memory_bytes > 8.03e9 * 16
    assert "GB too much" in data.why
    with pytest.raises(InfeasibleError, match=r"optimizer.*GB too much") as refused:
        optimize("llama-3-8b", strategy="data", **REQUEST)
    assert refused.value.nearest
    assert refused.value.exit_status == 3


def test_the_plan_is_never_slower_than_a_forced_one_that_fits(plan: Plan) -> None:
    assert plan.memory.fits
    forced = [("fsdp", "data=8"), ("tensor", "model=8")]
    for model in (1, 2, 4, 8):
        forced += [(s, f"data={8 // model},model={model}") for s in ("auto", "hybrid")]
    for strategy, mesh in forced:
        other = estimate("llama-3-8b", mesh=mesh, strategy=strategy, **REQUEST)
        if other.memory.fits:
            assert plan.step_time.total_s <= other.step_time.total_s * (1 + 1e-9), (strategy, mesh)


def test_the_bound_is_below_the_plan(plan: Plan) -> None:
    assert plan.lower_bound_s is not None
    assert 0 < plan.lower_bound_s <= plan.step_time.total_s


def test_same_seed_same_plan(plan: Plan) -> None:
    again = optimize("llama-3-8b", **REQUEST)
    assert again.to_json() == plan.to_json()


def test_a_plan_comes_back_from_its_json(plan: Plan, tmp_path) -> None:
    plan.save(tmp_path / "plan.json")
    back = Plan.load(tmp_path / "plan.json")
    assert back == plan
    assert back.program().collectives((0, 0)) == plan.program().collectives((0, 0))
