"""Exported DTensor code is executed on four processes and does what the plan says."""

from __future__ import annotations

import pytest
import torch

from autoshard.errors import ExportUnsupported
from autoshard.planner import Plan
from autoshard.runtime.processes import Pool
from tests.exports.bodies import run_exported
from tests.exports.models import DOCUMENTS, imported, planned, reference

EXPRESSIBLE = [
    ("mlp", "data"),
    ("mlp", "fsdp"),
    ("mlp", "tensor"),
    ("mlp", "hybrid"),
    ("gpt2", "data"),
    ("gpt2", "fsdp"),
    ("llama", "data"),
    ("llama", "fsdp"),
    ("llama", "tensor"),
    ("llama", "hybrid"),
]


@pytest.mark.multirank
@pytest.mark.parametrize(("name", "strategy"), EXPRESSIBLE)
def test_loss_and_gradients_equal_one_device(name: str, strategy: str, pool: Pool) -> None:
    check(planned(name, strategy), name, pool)


@pytest.mark.multirank
@pytest.mark.parametrize("document", DOCUMENTS)
def test_meshes_of_two_kinds_of_shards_do_too(document: str, pool: Pool) -> None:
    plan = imported("llama", document)
    assert plan.memory.fits
    check(plan, "llama", pool)


def check(plan: Plan, name: str, pool: Pool) -> None:
    """Run the exported code and compare it with one device and with the plan."""
    text = plan.export("dtensor").files["parallelize.py"]
    loss, gradients = reference(name)
    results = pool.run(run_exported, name, text)
    for mean, found, _ in results:
        # Llama's norms, softmax and loss are computed in float32, whatever the model's dtype.
        assert mean == pytest.approx(loss, rel=1e-6)
        assert found.keys() == gradients.keys()
        for fqn, gradient in gradients.items():
            torch.testing.assert_close(found[fqn], gradient, rtol=1e-6, atol=1e-6, msg=fqn)
    local = {n: t.local_bytes // 4 for n, t in plan.parameters.items()}
    assert {n: results[0][2][n] for n in local} == local


@pytest.mark.parametrize("strategy", ["tensor", "hybrid"])
def test_weights_without_a_parallel_style_are_refused(strategy: str) -> None:
    with pytest.raises(ExportUnsupported, match="c_attn") as caught:
        planned("gpt2", strategy).export("dtensor")
    assert len(caught.value.lost) == 3
    assert "strategy data or fsdp" in str(caught.value)


def test_half_precision_is_computed_from_float32_shards() -> None:
    text = planned("mlp", "fsdp", "bf16").export("dtensor").files["parallelize.py"]
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)" in text
    assert "float32 parameters" in text
