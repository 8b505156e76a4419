"""Whole values that a graph runs on: inputs, parameters, buffers and constants, drawn by seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from autoshard.graph import ModelGraph, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeValues:
    """What every device's shards are cut from.

    Attributes:
        inputs: by path.
        parameters: by dotted name.
        buffers: those that the step changes, by dotted name.
        constants: by name in the graph.
    """

    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]


@contextlib.contextmanager
def default_dtype(dtype: str) -> Iterator[None]:
    """What operators without floating operands give: ``arange(3) * 0.5`` in float64, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def draw_parameters(graph: ModelGraph, seed: int) -> dict[str, Tensor]:
    """A value for every parameter, none of them zero or one: a bias of 0 would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    return {fqn: _draw(node, generator) for fqn, node in graph.parameters.items()}


def draw_buffers(graph: ModelGraph, seed: int) -> dict[str, Tensor]:
    """A value, positive where it is floating, for every buffer that the step changes."""
    generator = torch.Generator().manual_seed(seed + 1)
    out = {}
    for node in graph.nodes:
        if node.op == "buffer":
            dtype: torch.dtype = getattr(torch, node.dtype)
            value = 0.5 + torch.rand(node.shape, generator=generator, dtype=torch.float64)
            floating = dtype.is_floating_point
            out[str(node.attrs["fqn"])] = (value if floating else torch.zeros_like(value)).to(dtype)
    return out


def _draw(node: Node, generator: torch.Generator) -> Tensor:
    dtype: torch.dtype = getattr(torch, node.dtype)
    if len(node.shape) < 2:
        value = 0.5 + torch.rand(node.shape, generator=generator, dtype=torch.float64)
        return value.to(dtype)
    value = torch.randn(node.shape, generator=generator, dtype=torch.float64)
    value /= prod(node.shape[1:]) ** 0.5
    return value.to(dtype)
