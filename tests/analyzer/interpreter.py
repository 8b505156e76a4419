"""Evaluates a graph on one device, operator after operator."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autoshard.analyzer import evaluate_constants
from autoshard.graph import ModelGraph
from autoshard.normal.operators import run_operator


def run(
    graph: ModelGraph,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Values of all nodes by name."""
    constants = evaluate_constants(graph, buffers, dtype)
    values: dict[str, Tensor] = {}
    for node in graph.nodes:
        if node.op == "parameter":
            value = parameters[str(node.attrs["fqn"])]
        elif node.op == "buffer":
            value = buffers[str(node.attrs["fqn"])]
        elif node.op == "input":
            value = inputs[str(node.attrs["path"])]
        elif node.op == "constant":
            value = constants[str(node.attrs["constant"])]
        else:
            operands = [values[o] for o in node.operands]
            value = run_operator(node.op, node.roles, operands, node.attrs, node.shape)
        if node.op != "constant":
            assert tuple(value.shape) == node.shape, node
            assert str(value.dtype) == f"torch.{node.dtype}", node
        values[node.name] = value
    return values


def loss_and_gradients(
    graph: ModelGraph, module: nn.Module, inputs: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """The graph's loss and its gradients with the module's weights in ``dtype``."""

    def cast(t: Tensor) -> Tensor:
        return t.detach().to(dtype if t.is_floating_point() else t.dtype).clone()

    graph = graph.with_float_dtype(str(dtype).removeprefix("torch."))
    named = dict(module.named_parameters(remove_duplicate=False))
    parameters = {
        n: cast(named[n]).requires_grad_(v.differentiable) for n, v in graph.parameters.items()
    }
    buffers = {n: cast(b) for n, b in module.named_buffers(remove_duplicate=False)}
    values = run(graph, parameters, buffers, {k: cast(v) for k, v in inputs.items()}, dtype)
    loss = values[graph.loss]
    wanted = {n: p for n, p in parameters.items() if p.requires_grad}
    found = torch.autograd.grad(loss, list(wanted.values()))
    return loss.detach(), dict(zip(wanted, found, strict=True))
