"""Exported specs are executed under JAX with four devices."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch

from autoshard.errors import ExportUnsupported
from tests.exports.models import batch, build, planned, reference

PROGRAM = Path(__file__).parent / "jax_program.py"


def test_loss_and_gradients_equal_one_device() -> None:
    pytest.importorskip("jax")
    plans = {strategy: planned("mlp", strategy) for strategy in ("fsdp", "hybrid")}
    arrays = {n: p.detach().double().tolist() for n, p in build("mlp").named_parameters()}
    inputs = {n: v.tolist() for n, v in batch("mlp").items()}
    texts = {s: plan.export("jax").files["jax_specs.py"] for s, plan in plans.items()}
    found = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps({"texts": texts, "arrays": arrays, "batch": inputs}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    loss, gradients = reference("mlp")
    for strategy, result in json.loads(found.stdout).items():
        assert result["devices"] == 4
        assert result["loss"] == pytest.approx(loss, rel=1e-12)
        for name, gradient in gradients.items():
            got = torch.tensor(result["gradients"][name], dtype=torch.float64)
            torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-12, msg=name)
        for name, document in plans[strategy].parameters.items():
            assert prod(result["shards"][name]) * 4 == document.local_bytes, name


def test_fused_cuts_are_reported() -> None:
    losses = planned("gpt2", "tensor").export("jax").losses
    assert any("c_attn.weight" in line and "contiguously" in line for line in losses)


def test_uneven_cuts_are_refused() -> None:
    plan = planned("mlp", "fsdp")
    odd = plan.parameters["up.weight"].model_copy(update={"shape": (63, 32)})
    uneven = plan.model_copy(update={"parameters": {**plan.parameters, "up.weight": odd}})
    with pytest.raises(ExportUnsupported, match=r"up\.weight"):
        uneven.export("jax")
