"""Small captured models and random legal programs of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autoshard.analyzer import Captured, analyze
from autoshard.candidates import AxisUse, Candidates, Rules
from autoshard.program import DEFAULT_BUCKET_BYTES, Program
from autoshard.sharding.layout import Shape
from autoshard.sharding.reshard import Resharder
from autoshard.sharding.strategy import Passing, Strategy

AXES = ("data", "model", "context")


def ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """Grouped-query attention, batch 3, 7 tokens: uneven everywhere."""
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return model, {"input_ids": ids(3, 7), "labels": ids(3, 7)}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """Tied embeddings, fused QKV, 3 heads over 2, vocabulary 57."""
    config = GPT2Config(
        n_embd=24,
        n_layer=1,
        n_head=3,
        vocab_size=57,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    return model, {"input_ids": ids(4, 6), "labels": ids(4, 6)}


def frozen() -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2 with frozen embeddings and attention."""
    model, inputs = gpt2()
    for name, parameter in model.named_parameters():
        if "wte" in name or "attn" in name:
            parameter.requires_grad_(False)
    return model, inputs


class Convolutions(nn.Module):
    """Batch norms change buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, stride=2, groups=2)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = F.relu(self.norm(self.first(x)))
        logits = self.head(F.relu(self.second(h)).mean((2, 3)))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def convolutions() -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        model = Convolutions()
    return model, {"x": torch.empty(6, 3, 9, 9, device="meta"), "y": ids(6)}


class Perceptron(nn.Module):
    """A weight used twice, dropout, an output that is not the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.norm, self.drop = nn.LayerNorm(7), nn.Dropout(0.3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.a(x))
        h = h + self.drop(self.b(self.norm(h)))
        out = self.c(F.gelu(self.b(h)))
        return {"loss": ((out - y) ** 2).mean(), "out": out, "hidden": h * 2}


def perceptron() -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        model = Perceptron()
    x, y = torch.empty(6, 5, device="meta"), torch.empty(6, 3, device="meta")
    return model, {"x": x, "y": y}


class Looped(nn.Module):
    """One block three times over, as ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.embed(x)
        for _ in range(3):
            h = torch.tanh(self.block(h)) + h
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits.view(-1, 11), y.view(-1)), "logits": logits}


def looped() -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        model = Looped()
    return model, {"x": ids(4, 5), "y": ids(4, 5)}


class Constructs(nn.Module):
    """Noise, complex numbers, integers that become floats, strided writes, optional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(3, 8, 1)
        self.norm = nn.InstanceNorm1d(8)
        turn = torch.polar(torch.ones(5, 4), torch.outer(torch.arange(5.0), torch.arange(1, 5.0)))
        self.register_buffer("turn", turn)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.lift(x)).transpose(1, 2)
        pairs = torch.view_as_complex(h.contiguous().reshape(*h.shape[:2], 4, 2))
        h = torch.view_as_real(pairs * self.turn).flatten(2)
        wide = F.interpolate(h, scale_factor=2.0, mode="linear")
        noisy = wide + torch.randn_like(wide) * torch.randn(5, 1)
        written = torch.zeros_like(h)
        written[..., ::2] = h[..., 1::2]
        places = (h.argsort(-1) * 0.5).mean()
        return noisy.square().mean() + written.square().sum() + places * h.sum()


def constructs() -> tuple[nn.Module, dict[str, Tensor]]:
    return Constructs(), {"x": torch.empty(6, 3, 5, device="meta")}


def recurrent() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.LSTM(6, 8, 2, batch_first=True), {"input": torch.empty(6, 5, 6, device="meta")}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "llama": llama,
    "gpt2": gpt2,
    "frozen": frozen,
    "convolutions": convolutions,
    "perceptron": perceptron,
    "looped": looped,
    "constructs": constructs,
    "recurrent": recurrent,
}


@cache
def captured(name: str) -> Captured:
    """The model as a graph, once."""
    model, inputs = MODELS[name]()
    return analyze(model, inputs, name=name)


def seconds(op: str, axes: tuple[int, ...], num_bytes: int) -> float:
    """A price list: latency and bandwidth."""
    return 1e-5 + num_bytes / 1e9


@cache
def _candidates(
    name: str, sizes: Shape, uses: tuple[AxisUse, ...] | None, passing: Passing
) -> Candidates:
    graph = captured(name).graph
    return Candidates(graph, sizes, uses=uses, passing=passing, rules=Rules(graph))


def random_program(
    model: Captured,
    sizes: Shape,
    seed: int,
    *,
    uses: tuple[AxisUse, ...] | None = None,
    passing: Passing = "full",
    regather: bool = False,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Program:
    """A program in which every operator has a random legal strategy.

    Args:
        model: of what.
        sizes: axis sizes.
        seed: of the choice.
        uses: what axes are for.
        passing: which pass-through strategies there are.
        regather: whether every gathered parameter is dropped and gathered again.
        bucket_bytes: size of fused gradients.
    """
    graph, rng = model.graph, random.Random(seed)
    candidates = _candidates(model.graph.name, sizes, uses, passing)
    rules = candidates.rules
    chosen: dict[str, Strategy] = {n.name: rng.choice(candidates[n.name]) for n in graph.nodes}
    for node in graph.nodes:
        if not node.is_leaf:
            for index in rules[node.name].mutates:  # its edge moves nothing
                taken = chosen[node.name].operands[index]
                stored = candidates[node.operands[index]]
                chosen[node.operands[index]] = next(s for s in stored if s.result == taken)
    edges = frozenset(
        (node.name, index)
        for node in graph.nodes
        for index, operand in enumerate(node.operands)
        if graph.by_name[operand].op == "parameter"
    )
    return Program(
        graph,
        AXES[: len(sizes)],
        sizes,
        chosen,
        Resharder(sizes, seconds),
        regather=edges if regather else frozenset(),
        bucket_bytes=bucket_bytes,
        rules=rules,
    )
