"""Shards of whole tensors: take one device's, or join all of them. Torch tensors and NumPy arrays.

A cut dim is viewed as digits (``layout.radix``) and the digits that axes cut are sliced, so nested,
strided and uneven cuts need no case of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from autoshard.sharding.layout import (
    Cut,
    Layout,
    P,
    Shape,
    chunk,
    coordinates,
    forward_half,
    local_shape,
    radix,
)

Array = TypeVar("Array", Tensor, npt.NDArray[np.generic])


def _digits(
    shape: Shape, layout: Layout, mesh: Shape, coordinate: Sequence[int]
) -> tuple[Shape, tuple[slice, ...]]:
    """Shape of a whole tensor with cut dims as digits, and the slices that one device has."""
    cut = {s.dim for s in layout if isinstance(s, Cut)}
    sizes: list[int] = []
    slices: list[slice] = []
    for dim, size in enumerate(shape):
        if dim not in cut:
            sizes.append(size)
            slices.append(slice(None))
            continue
        digits = radix(size, dim, layout)
        for digit, axis in zip(digits.sizes, digits.axes, strict=True):
            sizes.append(digit)
            slices.append(
                slice(None) if axis is None else slice(*chunk(digit, mesh[axis], coordinate[axis]))
            )
    return tuple(sizes), tuple(slices)


def shard_taker(
    shape: Shape, layout: Layout, mesh: Shape, coordinate: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """:func:`take_shard` with its shapes worked out beforehand."""
    if not any(isinstance(s, Cut) for s in layout):
        return _same
    sizes, slices = _digits(shape, layout, mesh, coordinate)
    local = local_shape(shape, layout, mesh, coordinate)

    def take(tensor: Tensor) -> Tensor:
        return tensor.reshape(sizes)[slices].reshape(local)

    return take


def _same(tensor: Tensor) -> Tensor:
    return tensor


def take_shard(tensor: Array, layout: Layout, mesh: Shape, coordinate: Sequence[int]) -> Array:
    """The shard of a whole ``tensor`` that the device at ``coordinate`` holds under ``layout``.

    A view where strides allow, and differentiable. States that do not cut leave the tensor whole.
    """
    shape = tuple(tensor.shape)
    sizes, slices = _digits(shape, layout, mesh, coordinate)
    if len(sizes) == len(shape):
        return tensor
    local = local_shape(shape, layout, mesh, coordinate)
    return tensor.reshape(sizes)[slices].reshape(local)


def join_shards(
    shards: Mapping[tuple[int, ...], Array], layout: Layout, shape: Shape, mesh: Shape
) -> Array:
    """The whole tensor from the shards of every coordinate: cuts joined, summands added.

    On an axis of state R (or RP) the shards of its coordinate 0 are taken.

    Args:
        shards: by coordinate; those that repeat others may be missing.
        layout: of one half of the value: R, P and cuts.
        shape: global shape.
        mesh: axis sizes.
    """
    layout = forward_half(layout)
    adds = P in layout
    first = next(iter(shards.values()))
    out: Any
    out = first.new_zeros(shape) if isinstance(first, Tensor) else np.zeros(shape, first.dtype)
    sizes, _ = _digits(shape, layout, mesh, (0,) * len(mesh))
    view = out.reshape(sizes)
    for at in coordinates(mesh):
        if any(
            i and not isinstance(s, Cut) and s is not P for i, s in zip(at, layout, strict=True)
        ):
            continue
        _, slices = _digits(shape, layout, mesh, at)
        place = view[slices]
        shard = shards[at].reshape(place.shape)
        view[slices] = place + shard if adds else shard
    return cast("Array", out)


def positions(
    size: int, dim: int, layout: Layout, mesh: Shape, coordinate: Sequence[int]
) -> list[int]:
    """Global indices, in order, of the items of ``dim`` that the device at ``coordinate`` has."""
    moved = tuple(
        Cut(0, s.outer, s.n) if isinstance(s, Cut) and s.dim == dim else P for s in layout
    )
    taken = take_shard(np.arange(size), moved, mesh, coordinate)
    return [int(i) for i in taken]


def is_cut(layout: Layout, dim: int) -> bool:
    """Whether any axis cuts ``dim``."""
    return any(isinstance(s, Cut) and s.dim == dim for s in layout)


def numel(shape: Shape) -> int:
    """Number of items."""
    return prod(shape)
