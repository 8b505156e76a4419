"""Operations against torch's own counter; what autograd keeps against its own hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autoshard.analyzer import analyze
from autoshard.graph import ModelGraph
from tests.analyzer.families import FAMILIES


class One(nn.Module):
    """One operator on parameters."""

    def __init__(self, function: Callable[..., Tensor], shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(s) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(*self.weights) * x).sum()


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(2, 5, 8), (6, 8), (6,)]),
    "mm": (torch.mm, [(5, 8), (8, 6)]),
    "addmm": (torch.addmm, [(6,), (5, 8), (8, 6)]),
    "bmm": (torch.bmm, [(3, 5, 8), (3, 8, 6)]),
    "matmul": (torch.matmul, [(2, 3, 5, 8), (2, 3, 8, 6)]),
    "conv1d": (F.conv1d, [(2, 4, 9), (6, 4, 3)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(2, 4, 9, 9), (6, 4, 3, 3)]),
    "grouped conv2d": (lambda x, w: F.conv2d(x, w, groups=2), [(2, 4, 9, 9), (6, 2, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 4, 5, 5), (4, 6, 3, 3)]),
    "einsum": (lambda a, b: torch.einsum("bsk,kn->bsn", a, b), [(2, 5, 8), (8, 6)]),
}


def counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def products(graph: ModelGraph, which: str) -> int:
    """Operations of the operators that torch counts."""
    kinds = ("linear", "mm", "bmm", "matmul", "conv", "einsum", "scaled_dot")
    return sum(int(getattr(n, which)) for n in graph.nodes if any(k in n.family for k in kinds))


@pytest.mark.parametrize("name", PRODUCTS)
def test_operations_of_products_are_torchs(name: str) -> None:
    module = One(*PRODUCTS[name])
    x = torch.ones(())
    graph = analyze(module, x).graph
    loss: list[Tensor] = []
    forward = counted(lambda: loss.append(module(x)))
    assert products(graph, "flops_forward") == forward
    if "grouped" in name:
        # torch's counter leaves the groups out of the weight's gradient.
        assert products(graph, "flops_backward") == 2 * forward
    else:
        assert products(graph, "flops_backward") == counted(lambda: loss[0].backward())


@pytest.mark.parametrize("family", ["gpt2", "llama", "vit", "t5"])
def test_operations_of_models_are_torchs(family: str) -> None:
    build, inputs = FAMILIES[family]
    module = build()
    graph = analyze(module, inputs).graph
    math = sum(n.flops_backward - 2 * n.flops_forward for n in graph.nodes if "scaled_dot" in n.op)
    loss: list[Tensor] = []
    with sdpa_kernel(SDPBackend.MATH):
        assert products(graph, "flops_forward") == counted(
            lambda: loss.append(module(**inputs).loss)
        )
        # The fused kernels compute the scores again in backward, the plain one does not.
        assert products(graph, "flops_backward") - math == counted(lambda: loss[0].backward())


def kept_bytes(graph: ModelGraph) -> int:
    """Bytes of activations that autograd keeps, by the graph."""
    total = 0
    for node in graph.nodes:
        total += node.saved_extra_bytes
        for role in node.saved:
            source = (
                node if role == "result" else graph.by_name[node.operands[node.roles.index(role)]]
            )
            root = source
            while root.op in ("autoshard.identity", "aten.permute.default", "aten.reshape.default"):
                root = graph.by_name[root.operands[0]]
            if root.op not in ("parameter", "constant", "buffer"):
                total += source.num_bytes
    return total


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norm(x)
        h = self.down(torch.tanh(self.up(h)).relu())
        return (x + h).sigmoid().pow(2).mean()


def test_saved_bytes_are_what_autograd_keeps() -> None:
    module = Mixed()
    ids = torch.randint(0, 10, (4, 6))
    graph = analyze(module, ids).graph
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        alive.append(t)
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        module(ids)
    assert kept_bytes(graph) == sum(kept.values())


def test_every_operator_that_keeps_a_parameter_lists_it() -> None:
    graph = analyze(Mixed(), torch.zeros(4, 6, dtype=torch.int64)).graph
    keepers = {
        str(graph.by_name[n.operands[n.roles.index(r)]].attrs.get("fqn"))
        for n in graph.nodes
        for r in n.saved
        if r != "result" and graph.by_name[n.operands[n.roles.index(r)]].op == "parameter"
    }
    assert {"up.weight", "down.weight", "norm.weight"} <= keepers
    assert "embed.weight" not in keepers


def test_each_part_of_a_fused_projection_is_kept_once() -> None:
    graph = analyze(FAMILIES["gpt2"][0](), FAMILIES["gpt2"][1]).graph
    attention = [n for n in graph.nodes if "scaled_dot" in n.op]
    assert all(set(n.saved) == {"query", "key", "value", "result"} for n in attention)
    # One float32 for each row of each head.
    assert all(n.saved_extra_bytes == 4 * 2 * 4 * 12 for n in attention)
