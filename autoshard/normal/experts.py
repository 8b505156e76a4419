"""A layer of experts as one operator, and products of groups of rows.

Each token goes to ``k`` of ``E`` experts. Such an expert is a gated product: ``act(x g) * (x u)``
times a second matrix; what the experts of a token give is summed with the router's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autoshard.graph import Attr

ALIGNMENT = 16
"""Bytes that strides must be a multiple of, as the error of torch's grouped product says."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "aten.silu.default": torch.nn.functional.silu,
    "aten.gelu.default": torch.nn.functional.gelu,
    "aten.relu.default": torch.nn.functional.relu,
}
"""What an expert may apply between its products."""


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product takes these: not float64, strides aligned, nothing empty."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    sizes = (*x.shape[1:], *weight.shape[1:])
    return bool(x.numel() and weight.numel()) and not any(
        s * x.element_size() % ALIGNMENT for s in sizes
    )


def experts(x: Mapping[str, Tensor], attrs: Mapping[str, Attr]) -> Tensor:
    """``autoshard.experts``: the operands by role, all experts here."""
    count = x["down"].shape[0]
    own = torch.arange(count, device=x["input"].device)
    return some_experts(
        x["input"], x["index"], x["weight"], x["gate_up"], x["down"], own, attrs, every=True
    )


def some_experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    place: Tensor,
    attrs: Mapping[str, object],
    *,
    every: bool,
) -> Tensor:
    """What the experts at hand give of each token's sum.

    Args:
        x: tokens, T x I.
        index: experts of each token, T x k.
        weight: the router's weights, T x k.
        gate_up: first matrices of the n experts at hand, n x 2 F x I.
        down: second matrices, n x O x F.
        place: for each of all experts its number among those at hand, or n where it is not.
        attrs: of the operator: ``act`` and the result's ``dtype``.
        every: whether all experts are at hand.
    """
    act = ACTIVATIONS[str(attrs["act"])]
    here, (tokens, each) = len(down), index.shape
    expert, order = torch.sort(place[index.reshape(-1)], stable=True)
    ends = torch.searchsorted(expert, torch.arange(here, device=x.device), right=True)
    ends = ends.to(torch.int32)
    mine = (expert < here).unsqueeze(-1)

    def own(rows: Tensor) -> Tensor:
        # Rows of experts elsewhere: kernels leave anything there, forward and backward.
        return rows if every else torch.where(mine, rows, rows.new_zeros(()))

    rows = own(x[order // each])
    gate, up = own(_grouped(rows, gate_up.transpose(-2, -1), ends)).chunk(2, -1)
    out = own(_grouped(act(gate) * up, down.transpose(-2, -1), ends))
    out = out * weight.reshape(-1)[order].unsqueeze(-1)
    out = out[torch.argsort(order)].reshape(tokens, each, down.shape[1]).sum(1)
    dtype: Any = getattr(torch, str(attrs["dtype"]))
    return out.to(dtype)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each entry of ``ends`` times their matrix; anything behind the last one."""
    if has_kernel(x, weight):
        return torch.ops.aten._grouped_mm.default(x, weight, ends)  # type: ignore[no-any-return]
    row = torch.arange(len(x), device=x.device)
    group = torch.searchsorted(ends, row, right=True)
    out = 0 * (x.sum() + weight.sum()) + x.new_zeros(len(x), weight.shape[-1])
    for number, matrix in enumerate(weight):
        out = out + torch.where((group == number).unsqueeze(-1), x @ matrix, out.new_zeros(()))
    return out
