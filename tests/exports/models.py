"""The models and plans that the tests of exports share; built once a process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autoshard

if TYPE_CHECKING:
    from autoshard.planner import Plan

BATCH, LENGTH, VOCABULARY = 8, 16, 128
MESHES = {
    "data": {"data": 4},
    "fsdp": {"data": 4},
    "tensor": {"model": 4},
    "hybrid": {"data": 2, "model": 2},
}


class Perceptron(nn.Module):
    """Two layers and a loss, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(nn.functional.gelu(self.up(x))), target)


def build(name: str) -> nn.Module:
    """A model with the same weights each time."""
    torch.manual_seed(0)
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=2,
                n_head=4,
                n_embd=64,
                vocab_size=VOCABULARY,
                n_positions=32,
                bos_token_id=0,
                eos_token_id=0,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    if name == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCABULARY,
                max_position_embeddings=32,
            )
        )
    return Perceptron()


def batch(name: str) -> dict[str, Tensor]:
    """One global batch."""
    generator = torch.Generator().manual_seed(1)
    if name == "mlp":
        return {
            key: torch.randn(BATCH, 32, generator=generator, dtype=torch.float64)
            for key in ("x", "target")
        }
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def loss_of(result: object) -> Tensor:
    """The loss that a model of :func:`build` returned."""
    found = result if isinstance(result, Tensor) else result.loss  # type: ignore[attr-defined]
    assert isinstance(found, Tensor)
    return found


@cache
def planned(name: str, strategy: str, dtype: str = "fp32") -> Plan:
    """The plan of a model for four devices under a strategy."""
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in batch(name).items()}
    return autoshard.estimate(
        build(name),
        inputs,
        mesh=MESHES[strategy],
        cluster="h100",
        devices=4,
        strategy=strategy,
        dtype=dtype,
        progress=False,
    )


DOCUMENTS = {
    "replicated shards": {"dp_replicate_size": 2, "fsdp_size": 2},
    "shards x tensor": {"fsdp_size": 2, "tp_size": 2},
}
"""Plans that no strategy of autoshard names; asked for as transformers would be."""


@cache
def imported(name: str, document: str) -> Plan:
    """The plan that a document of :data:`DOCUMENTS` stands for."""
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in batch(name).items()}
    return autoshard.from_export(
        DOCUMENTS[document], "hf", build(name), inputs, cluster="h100", progress=False
    )


@cache
def reference(name: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one device, in float64."""
    model = build(name).double()
    loss = loss_of(model(**batch(name)))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
