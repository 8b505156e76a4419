"""Batch norm in training, with the statistics of the whole batch where the batch is cut.

Over m items of a channel, with cotangent g and xhat = (x - mean) / sqrt(var + eps)::

    dx = weight / sqrt(var + eps) * (g - sum(g) / m - xhat * sum(g * xhat) / m)

(Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167). The variance is taken of centred values,
after a first message, since a difference of large sums loses digits in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard.runtime.local.adapt import zeros_if_empty
from autoshard.runtime.local.site import Local, Reducer, Site, local_for
from autoshard.sharding.rules.dims import number


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The whole batch that the statistics are of, and how to reach its other shards."""

    count: int
    momentum: float
    eps: float
    dims: tuple[int, ...]
    channels: tuple[int, ...]
    axes: tuple[int, ...]
    reducer: Reducer
    value: str


class _SyncBatchNorm(torch.autograd.Function):
    """See the module's formula."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        batch: _Batch,
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        reduce = batch.reducer.all_reduce
        sums = wide.sum(batch.dims)
        mean = reduce(sums, "sum", batch.axes, "forward", batch.value) / batch.count
        centred = wide - mean.view(batch.channels)
        squares = centred.square().sum(batch.dims)
        var = reduce(squares, "sum", batch.axes, "forward", batch.value) / batch.count
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), batch.momentum)
            if running_var is not None:
                unbiased = var * (batch.count / max(batch.count - 1, 1))
                running_var.lerp_(unbiased.to(running_var.dtype), batch.momentum)
        inverse = torch.rsqrt(var + batch.eps)
        out = centred * inverse.view(batch.channels)
        if weight is not None:
            out = out * weight.view(batch.channels)
        if bias is not None:
            out = out + bias.view(batch.channels)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.batch = batch
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        batch: _Batch = ctx.batch
        g = gradients[0].to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(batch.channels)) * inverse.view(batch.channels)
        sums = torch.stack([g.sum(batch.dims), (g * normal).sum(batch.dims)])
        whole = batch.reducer.all_reduce(sums.clone(), "sum", batch.axes, "backward", batch.value)
        dx = None
        if ctx.needs_input_grad[0]:
            shift, slope = (whole / batch.count).unbind()
            dx = g - shift.view(batch.channels) - normal * slope.view(batch.channels)
            scale = inverse if weight is None else inverse * weight
            dx = (dx * scale.view(batch.channels)).to(x.dtype)
        d_weight = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = sums[0].to(gradients[0].dtype) if ctx.needs_input_grad[2] else None
        return dx, d_weight, d_bias, None, None, None


@local_for("autoshard.batch_norm")
def batch_norm(site: Site) -> Local:
    """Torch's own where this device has the whole batch of its channels."""
    momentum, eps = number(site.call, "momentum", 0.1), number(site.call, "eps", 1e-5)
    names = ("input", "weight", "bias", "running_mean", "running_var")
    places = [site.operand(name) for name in names]
    shape = site.call.shapes[0]
    dims = tuple(d for d in range(len(shape)) if d != 1)
    axes = site.axes_cutting(0, dims)

    def five(tensors: tuple[Tensor, ...]) -> list[Tensor | None]:
        return [None if i is None else tensors[i] for i in places]

    if not axes:
        if (zeros := zeros_if_empty(site)) is not None:
            return zeros

        def whole(*tensors: Tensor) -> Tensor:
            x, weight, bias, mean, var = five(tensors)
            assert x is not None
            return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)

        return whole
    batch = _Batch(
        count=prod(shape[d] for d in dims),
        momentum=momentum,
        eps=eps,
        dims=dims,
        channels=tuple(-1 if d == 1 else 1 for d in range(len(shape))),
        axes=axes,
        reducer=site.the_reducer(),
        value=site.value,
    )

    def run(*tensors: Tensor) -> Tensor:
        out: Tensor = _SyncBatchNorm.apply(*five(tensors), batch)  # type: ignore[no-untyped-call]
        return out

    return run
