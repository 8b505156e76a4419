"""Memory of real steps: torch's tracker beside another count, and the prediction beside both."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from autoshard.analyzer import Captured, analyze
from autoshard.plan import Categories
from autoshard.planner import optimize
from autoshard.planner.checking import measure_plan
from autoshard.validation.tracker import StepTracker
from autoshard.validation.updates import Updates
from tests.live import LiveBytes
from tests.validation import small

PEAK = 0.05
"""Largest share by which a predicted peak may be off."""

CATEGORY = 0.10
"""The same of a category, or of a twentieth of the peak where a category is smaller than that."""


class Mixed(nn.Module):
    """Views, copies, a value used twice, something large that only backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = F.gelu(self.first(x))
        parts = h.reshape(8, 16, 3, 32).permute(0, 2, 1, 3).reshape(24, 16, 32).softmax(-1)
        h = h + parts.reshape(8, 3, 16, 32).permute(0, 2, 1, 3).reshape(8, 16, 96)
        out = self.second(h)
        return (out * out).sum(), {"out": out.detach()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd-momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tracker_counts_what_a_count_of_its_own_finds(
    optimizer: str, dtype: torch.dtype
) -> None:
    """Bytes are the same to the byte, and categories are what the tensors' sizes say."""
    torch.manual_seed(0)
    model, x = Mixed().to(dtype), torch.randn(8, 16, 32, dtype=dtype)
    updates = Updates(optimizer, model.parameters())

    def step(tracker: StepTracker | None = None) -> None:
        loss, outputs = model(x)
        if tracker is not None:
            tracker.backward_begins()
        loss.backward()
        if tracker is not None:
            tracker.finish()
        updates.step()
        del loss, outputs
        model.zero_grad()

    step()
    own = [*model.parameters(), x]
    with LiveBytes([*own, *updates.state]) as live:
        step()
    tracker = StepTracker(model.parameters(), [x], updates.state)
    with tracker:
        step(tracker)
    found = tracker.peak()
    assert found.allocated_bytes == live.peak == tracker.torch_peak_bytes
    elements = sum(p.numel() for p in model.parameters())
    assert found.parameters_bytes == elements * dtype.itemsize
    copies = {"adamw": 2, "sgd": 0, "sgd-momentum": 1}[optimizer]
    masters = dtype == torch.bfloat16 and optimizer == "adamw"
    wide = 4 if masters else dtype.itemsize
    counters = 8 * 4 if optimizer == "adamw" else 0
    assert found.optimizer_bytes - elements * wide * (copies + masters) in range(counters + 1)
    assert found.activations_bytes > x.nbytes


def test_a_gathered_parameter_is_told_from_other_gathered_values() -> None:
    model, x = Mixed(), torch.randn(8, 16, 32)
    tracker = StepTracker(model.parameters(), [x], [])
    with tracker:
        whole = torch.empty(4096)
        tracker.gathered(whole)
        ordered = whole.view(64, 64).t().clone()
        other = torch.empty(2048)
        del whole
        tracker.backward_begins()
        ordered.sum()
        assert other.numel()
        tracker.finish()
    found = tracker.peak()
    assert found.gathered_bytes == ordered.nbytes
    assert found.temporary_bytes == ordered.nbytes  # before it was put in order
    assert found.activations_bytes == x.nbytes + other.nbytes
    assert found.allocated_bytes == tracker.torch_peak_bytes


# ---- predicted beside measured ------------------------------------------------------------------


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 128],
        depths=[1, 1, 1, 1],
        layer_type="basic",
    )
    config.num_labels = 10
    with torch.device("meta"):
        model = ResNetForImageClassification(config)
    return model, {
        "pixel_values": torch.empty(8, 3, 64, 64, device="meta"),
        "labels": small.ids(8),
    }


MODELS: dict[str, Any] = {"gpt2": small.gpt2, "llama": small.llama, "resnet": resnet}


@cache
def captured(name: str) -> Captured:
    model, inputs = MODELS[name]()
    return analyze(model, inputs, name=name)


def off(predicted: Categories, measured: Categories) -> dict[str, float]:
    """By category, how far off: of the category, or of a twentieth of the peak."""
    floor = measured.allocated_bytes / 20
    out = {}
    for field in Categories.model_fields:
        said, found = getattr(predicted, field), getattr(measured, field)
        out[field] = abs(said - found) / max(found, floor)
    return out


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "strategy", "devices"),
    [
        ("gpt2", "data", 2),
        ("gpt2", "tensor", 4),
        ("llama", "fsdp", 2),
        ("llama", "hybrid", 4),
        ("resnet", "fsdp", 4),
        ("resnet", "data", 2),
    ],
)
def test_peak_and_categories_are_what_processes_measure(
    name: str, strategy: str, devices: int
) -> None:
    plan = optimize(
        "",
        captured=captured(name),
        cluster="local",
        devices=devices,
        strategy=strategy,
        progress=None,
    )
    found = measure_plan(plan, captured(name), steps=1)
    assert found.memory is not None
    assert found.predicted_memory is not None
    assert found.peak_bytes == found.memory.allocated_bytes
    assert plan.memory.allocated_bytes == found.predicted_peak_bytes
    assert found.predicted_peak_bytes == pytest.approx(found.peak_bytes, rel=PEAK)
    assert max(off(found.predicted_memory, found.memory).values()) <= CATEGORY
