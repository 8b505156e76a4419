"""Memory of a real step beside the prediction, by category.

GPT-2, Llama and ResNet in small configs under every strategy on 2 and 4 processes. Bytes do not
hang on load, so any machine gives the same table. Off by: the peak's share; and of the categories
the worst, each by its own bytes, or by a twentieth of the peak where it is smaller than that.

    python benchmarks/memory_accuracy.py [--json]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

from autoshard.analyzer import Captured, analyze
from autoshard.plan import Categories
from autoshard.planner import optimize
from autoshard.planner.checking import measure_plan
from autoshard.render.memory import NAMES

STRATEGIES = ("data", "fsdp", "tensor", "hybrid")
FLOOR = 1 / 20
"""Share of the peak by which smaller categories are measured."""

Model = tuple[nn.Module, dict[str, Tensor]]


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def gpt2(dropout: float = 0.0) -> Model:
    """4 layers of 128, 8 samples of 64 tokens."""
    config = GPT2Config(
        n_embd=128,
        n_layer=4,
        n_head=4,
        vocab_size=1024,
        n_positions=128,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        return GPT2LMHeadModel(config), {"input_ids": _ids(8, 64), "labels": _ids(8, 64)}


def llama() -> Model:
    """4 layers of 128 with grouped queries, 8 samples of 64 tokens."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config), {"input_ids": _ids(8, 64), "labels": _ids(8, 64)}


def resnet(kind: str = "basic") -> Model:
    """4 stages of one layer up to 128 channels, 8 images of 64 x 64."""
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], layer_type=kind
    )
    with torch.device("meta"):
        model = ResNetForImageClassification(config)
    return model, {
        "pixel_values": torch.empty(8, 3, 64, 64, device="meta"),
        "labels": _ids(8),
    }


MODELS: dict[str, Callable[[], Model]] = {
    "gpt2": gpt2,
    "gpt2, dropout 0.1": lambda: gpt2(0.1),
    "llama": llama,
    "resnet": resnet,
    "resnet, bottleneck": lambda: resnet("bottleneck"),
}


def off(predicted: Categories, measured: Categories) -> tuple[float, str, float]:
    """How far off the peak is, the worst category, and how far that is off."""
    peak = measured.allocated_bytes
    each = {
        name: (getattr(predicted, field) - getattr(measured, field))
        / max(getattr(measured, field), FLOOR * peak)
        for field, name in NAMES
    }
    worst = max(each, key=lambda name: abs(each[name]))
    return predicted.allocated_bytes / peak - 1, worst, each[worst]


def rows() -> Iterator[dict[str, Any]]:
    """One for each model, strategy and number of processes."""
    for name, make in MODELS.items():
        captured = _captured(name, make)
        for strategy in STRATEGIES:
            for devices in (2, 4):
                plan = optimize(
                    "",
                    captured=captured,
                    cluster="local",
                    devices=devices,
                    strategy=strategy,
                    progress=None,
                )
                found = measure_plan(plan, captured, steps=1)
                assert found.memory is not None
                assert found.predicted_memory is not None
                peak, worst, by = off(found.predicted_memory, found.memory)
                yield {
                    "model": name,
                    "strategy": strategy,
                    "devices": devices,
                    "mesh": str(plan.mesh),
                    "predicted": found.predicted_memory.model_dump(),
                    "measured": found.memory.model_dump(),
                    "peak_off": peak,
                    "worst_category": worst,
                    "category_off": by,
                }


def _captured(name: str, make: Callable[[], Model]) -> Captured:
    model, inputs = make()
    return analyze(model, inputs, name=name)


def main(arguments: list[str] | None = None) -> None:
    """Print the table, or with ``--json`` the rows."""
    as_json = "--json" in (arguments or [])
    found = []
    if not as_json:
        print(f"{'model':19} {'strategy':8} {'mesh':16} {'predicted':>10} {'measured':>10}", end="")
        print(f" {'off':>7}  worst category")
    for row in rows():
        found.append(row)
        if as_json:
            continue
        said, seen = (sum(row[k].values()) / 2**20 for k in ("predicted", "measured"))
        print(
            f"{row['model']:19} {row['strategy']:8} {row['mesh']:16}"
            f" {said:6.2f} MiB {seen:6.2f} MiB"
            f" {row['peak_off']:+7.2%}  {row['worst_category']} {row['category_off']:+.2%}",
            flush=True,
        )
    if as_json:
        print(json.dumps(found, indent=1))
        return
    peak = max(abs(row["peak_off"]) for row in found)
    worst = max(abs(row["category_off"]) for row in found)
    print(f"{len(found)} plans: peak within {peak:.2%}, categories within {worst:.2%}")


if __name__ == "__main__":
    main(sys.argv[1:])
