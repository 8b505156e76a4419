"""Operators whose arguments change with the local shapes, and our own that are plain torch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.local.calls import generic_call, python_value
from autoshard.runtime.local.site import Local, Site, local_for
from autoshard.runtime.shards import is_cut, shard_viewer
from autoshard.sharding.layout import Cut, R, Shape
from autoshard.sharding.rules.assembly import slice_start
from autoshard.sharding.rules.dims import dims_of, integer, integers, number
from autoshard.sharding.rules.windows import AVERAGES, INTERPOLATIONS, MAXIMA


def plain(site: Site, **changed: Any) -> Local:
    """The torch operator with some attributes changed."""
    return generic_call(site.call.op, site.call.roles, site.call.attrs, **changed)


class _Zeros(torch.autograd.Function):
    """Zeros of a shape, with zeros for gradients: what an operator gives where a shard is empty."""

    @staticmethod
    def forward(ctx: Any, shape: Shape, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return (None, *(torch.zeros_like(t) if needs else None for t, needs in needed))


def zeros_if_empty(site: Site) -> Local | None:
    """What to run where this device has no item of an operand or of the result; None elsewhere.

    Several kernels refuse empty tensors. The result is empty too, or a sum over nothing.
    """
    shape = site.result_shape
    if all(prod(s) for s in (*site.operand_shapes, shape)):
        return None
    return lambda *tensors: _Zeros.apply(shape, *tensors)  # type: ignore[no-untyped-call]


@local_for("autoshard.identity", "aten.alias")
def identity(site: Site) -> Local:
    """The tensor itself."""
    return lambda x: x


@local_for(
    "aten.reshape",
    "aten.view",
    "aten._unsafe_view",
    "aten.flatten",
    "aten.unflatten",
    "aten.squeeze",
    "aten.unsqueeze",
)
def reshape(site: Site) -> Local:
    """A reshape to the local shape of the result."""
    shape = site.result_shape
    return lambda x: x.reshape(shape)


@local_for("aten.expand", "aten.broadcast_to")
def expand(site: Site) -> Local:
    """An expansion to the local shape of the result."""
    shape = site.result_shape
    return lambda x: x.expand(shape)


@local_for("aten.view_as_complex")
def view_as_complex(site: Site) -> Local:
    """Of a copy where a shard is not contiguous."""
    view = plain(site)
    return lambda x: view(x.contiguous())


@local_for("aten.repeat")
def repeat(site: Site) -> Local:
    """As often as the local shapes tell."""
    result = site.result_shape
    source = (1,) * (len(result) - len(site.operand_shapes[0])) + site.operand_shapes[0]
    times = [new // old if old else 1 for new, old in zip(result, source, strict=True)]
    return lambda x: x.repeat(times)


@local_for("autoshard.repeat_kv", "aten.repeat_interleave")
def repeat_each(site: Site) -> Local:
    """Each item of a dim as often as the local shapes tell."""
    kv = site.call.family == "autoshard.repeat_kv"
    if not kv and (len(site.call.shapes) > 1 or site.attr("dim") is None):
        return plain(site)
    shape, source = site.result_shape, site.operand_shapes[0]
    dim = 1 if kv else integer(site.call, "dim", 0) % len(shape)
    times = shape[dim] // source[dim] if source[dim] else 1
    wide = (*source[: dim + 1], times, *source[dim + 1 :])
    return lambda x: x.unsqueeze(dim + 1).expand(wide).reshape(shape)


@local_for("aten.slice")
def slice_(site: Site) -> Local:
    """The same block of the local dim."""
    dim, start, step = slice_start(site.call)
    length = site.call.result[dim]
    if not is_cut(site.operands[0], dim):
        stop = start + max(length - 1, 0) * step + bool(length)
        return plain(site, start=start, end=stop)
    local = site.result_shape[dim]
    begin = start // length * local
    return lambda x: x.narrow(dim, begin, local)


@local_for("aten.mean")
def mean(site: Site) -> Local:
    """Over a cut dim the local sum divided by the global count."""
    shape = site.call.shapes[0]
    dims = dims_of(site.call, "dim", len(shape))
    if not site.axes_cutting(0, dims):
        return plain(site)
    count = prod(shape[d] for d in dims)
    keepdim = bool(site.attr("keepdim"))
    dtype = python_value("dtype", site.attr("dtype"))
    return lambda x: x.sum(dims, keepdim, dtype=dtype) / count


@local_for(
    "aten.conv1d",
    "aten.conv2d",
    "aten.conv3d",
    "aten.convolution",
    "aten.conv_transpose1d",
    "aten.conv_transpose2d",
    "aten.conv_transpose3d",
)
def convolution(site: Site) -> Local:
    """With the groups that this device has."""
    if (zeros := zeros_if_empty(site)) is not None:
        return zeros
    window = site.operand_shapes[1]
    channel = len(site.result_shape) - (len(window) - 2) - 1
    transposed = bool(site.attr("transposed")) or "transpose" in site.call.family
    side = site.result_shape if transposed else site.operand_shapes[0]
    return plain(site, groups=side[channel] // window[1])


@local_for(
    *(*MAXIMA, *AVERAGES, *INTERPOLATIONS),
    *("aten.pad", "aten.instance_norm", "aten.pixel_shuffle", "aten.std", "aten.var"),
)
def nonempty(site: Site) -> Local:
    """The operator itself, whose kernels refuse empty shards, or warn of them."""
    return zeros_if_empty(site) or plain(site)


@local_for("aten.group_norm")
def group_norm(site: Site) -> Local:
    """With the groups that this device has."""
    size = site.call.shapes[0][1] // integer(site.call, "num_groups", 1)
    return zeros_if_empty(site) or plain(site, num_groups=site.operand_shapes[0][1] // size)


class _Drop(torch.autograd.Function):
    """``x`` where ``kept``, times ``scale``: what is kept for backward is a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return (x * kept).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return gradients[0] * kept * ctx.scale, None, None


def drop(x: Tensor, shape: Shape, p: float, take: Callable[[Tensor], Tensor]) -> Tensor:
    """``x`` with a share ``p`` of its items zero, the rest times ``1 / (1 - p)``.

    Args:
        x: this device's part.
        shape: of the whole mask, which every device draws, as torch does on CPU.
        p: below 1.
        take: this device's part of the mask.
    """
    drawn = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
    kept = take(drawn).to(torch.bool)
    del drawn
    return _Drop.apply(x, kept, 1 / (1 - p))  # type: ignore[no-untyped-call, no-any-return]


@local_for("autoshard.dropout")
def dropout(site: Site) -> Local:
    """Times a mask that is drawn for the global shape on every device, as torch does on CPU."""
    p = number(site.call, "p", 0.5)
    shared = set(integers(site.call, "shared") or ())
    if p == 0:
        return lambda x: x
    if p == 1:
        return lambda x: x * 0.0
    shape = tuple(1 if d in shared else size for d, size in enumerate(site.call.result))
    layout = tuple(R if isinstance(s, Cut) and s.dim in shared else s for s in site.result)
    take = shard_viewer(shape, layout, site.mesh, site.coordinate)
    return lambda x: drop(x, shape, p, take)
