"""``optimize(model)`` with nothing else: it works, and says what it assumed."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn

import autoshard


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))


def resnet() -> nn.Module:
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10)
    )


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=128))


@pytest.mark.parametrize("make", [mlp, resnet, gpt2])
def test_nothing_but_the_model_is_needed(make) -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    plan = autoshard.optimize(model, progress=None)
    assert plan.memory.fits
    assert set(plan.parameters) <= {n for n, _ in model.named_parameters(remove_duplicate=False)}
    said = " ".join(plan.assumptions)
    assert "cluster" in said
    assert "batch" in said
    assert any(word in said for word in ("inputs", "images", "sequences", "loss", "input"))
    after = model.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    assert "Assumed" in plan.explain()
    assert plan._repr_html_().startswith("<")


def test_fewer_samples_than_devices_is_said() -> None:
    plan = autoshard.optimize(
        mlp(), torch.zeros(2, 20), cluster="local", devices=4, strategy="data", progress=None
    )
    assert any("cut into 2 pieces over data=4" in w for w in plan.warnings)
