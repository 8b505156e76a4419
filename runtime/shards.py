"""Cutting a whole value into the shard of one device, and putting shards together again.

In one process and without communication. Torch tensors and NumPy arrays. A cut dim is viewed as
digits (``layout.radix``) and the digits that axes cut are sliced, so nested, strided and uneven
cuts need no case of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeVar

import numpy as np
import torch

from autoshard.sharding.layout import (
    Cut,
    Layout,
    P,
    R,
    Shape,
    chunk,
    coordinates,
    forward_half,
    local_shape,
    radix,
)

Array = TypeVar("Array", torch.Tensor, "np.ndarray[tuple[int, ...], np.dtype[np.generic]]")


def _place(
    shape: Shape, layout: Layout, mesh: Shape, coordinate: Sequence[int]
) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """The whole with cut dims as digits, and where the shard lies among them."""
    sizes: list[int] = []
    slices: list[slice] = []
    for dim, size in enumerate(shape):
        if not is_cut(layout, dim):
            sizes.append(size)
            slices.append(slice(None))
            continue
        digits = radix(size, dim, layout)
        sizes += digits.sizes
        slices += [
            slice(None) if axis is None else slice(*chunk(n, mesh[axis], coordinate[axis]))
            for n, axis in zip(digits.sizes, digits.axes, strict=True)
        ]
    return tuple(sizes), tuple(slices)


def is_cut(layout: Layout, dim: int) -> bool:
    """Whether any axis cuts ``dim``."""
    return any(isinstance(s, Cut) and s.dim == dim for s in layout)


def shard_viewer(
    shape: Shape, layout: Layout, mesh: Shape, coordinate: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """:func:`view_shard` with its shapes worked out beforehand."""
    if not any(isinstance(s, Cut) for s in layout):
        return _same
    sizes, slices = _place(shape, layout, mesh, coordinate)
    local = local_shape(shape, layout, mesh, coordinate)

    def view(whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(sizes)[slices].reshape(local)

    return view


def _same(whole: torch.Tensor) -> torch.Tensor:
    return whole


def view_shard(whole: Array, layout: Layout, mesh: Shape, coordinate: Sequence[int]) -> Array:
    """What the device at ``coordinate`` holds of ``whole``: a view where strides allow.

    Differentiable. States that do not cut, ``P`` among them, leave the value whole.
    """
    shape = tuple(whole.shape)
    sizes, slices = _place(shape, layout, mesh, coordinate)
    if len(sizes) == len(shape):
        return whole
    return whole.reshape(sizes)[slices].reshape(local_shape(shape, layout, mesh, coordinate))


def take_shard(whole: Array, layout: Layout, mesh: Shape, coordinate: Sequence[int]) -> Array:
    """What the device at ``coordinate`` holds of ``whole``; a copy, contiguous.

    Of a partial value, coordinate 0 holds all and the others zeros.

    Args:
        whole: the value, of its global shape.
        layout: one state an axis; ``RP`` counts as ``R``.
        mesh: axis sizes.
        coordinate: the device's place on each axis.
    """
    view = view_shard(whole, layout, mesh, coordinate)
    if isinstance(view, torch.Tensor):
        shard = view.clone(memory_format=torch.contiguous_format)
    else:
        shard = view.copy()
    if any(s is P and coordinate[axis] for axis, s in enumerate(layout)):
        shard[...] = 0
    return shard


def join_shards(
    shards: Mapping[tuple[int, ...], Array], layout: Layout, shape: Shape, mesh: Shape
) -> Array:
    """The whole value: shards side by side, summands added, of replicas the first.

    Args:
        shards: by coordinate; those with coordinate 0 on every replicated axis are enough.
        layout: one state an axis; ``RP`` counts as ``R``.
        shape: the global shape.
        mesh: axis sizes.
    """
    layout = forward_half(layout)
    first = shards[(0,) * len(mesh)]
    if isinstance(first, torch.Tensor):
        whole = first.new_zeros(shape)
    else:
        whole = np.zeros(shape, first.dtype)
    adds = P in layout
    for coordinate in coordinates(mesh):
        if any(s is R and coordinate[axis] for axis, s in enumerate(layout)):
            continue
        shard = shards[coordinate]
        expected = local_shape(shape, layout, mesh, coordinate)
        if tuple(shard.shape) != expected:
            raise ValueError(f"shard at {coordinate} has {tuple(shard.shape)}, not {expected}")
        if prod(expected) == 0:
            continue
        digits, slices = _place(shape, layout, mesh, coordinate)
        target = whole.reshape(digits)[slices]  # a view of the whole
        piece = shard.reshape(target.shape)
        target[...] = target + piece if adds else piece
    return whole


def positions(
    size: int, dim: int, layout: Layout, mesh: Shape, coordinate: Sequence[int]
) -> list[int]:
    """Global indices, in order, of the items of ``dim`` that the device at ``coordinate`` has."""
    moved = tuple(
        Cut(0, s.outer, s.n) if isinstance(s, Cut) and s.dim == dim else R for s in layout
    )
    return [int(i) for i in view_shard(np.arange(size), moved, mesh, coordinate)]
