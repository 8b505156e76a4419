"""Stored layouts as DTensor placements, so that torch.distributed.checkpoint can save and reload.

A checkpoint knows a shard as one box of the whole tensor. Cuts whose shards are no boxes (fused
QKV by heads, heads of uneven count) are saved whole.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autoshard.sharding.layout import Cut, Layout, Shape
from autoshard.torch_mesh import placements_of


def box_placements(shape: Shape, layout: Layout, mesh: Shape) -> tuple[Placement, ...] | None:
    """The placements that stand for ``layout``, or None where some shard is not one box."""
    for dim, size in enumerate(shape):
        cuts = sorted(
            (s.outer, s.n, axis)
            for axis, s in enumerate(layout)
            if isinstance(s, Cut) and s.dim == dim
        )
        done = 1
        for outer, n, axis in cuts:
            by_unit = len(cuts) == 1 and n == size  # as torch.chunk cuts single items
            if outer != done or not (n == mesh[axis] or by_unit):
                return None
            done *= n
    return placements_of(layout, mesh, shape)


def whole_placements(mesh: Shape) -> tuple[Placement, ...]:
    """Replicated on every axis."""
    return (Replicate(),) * len(mesh)


def to_dtensor(
    local: Tensor, shape: Shape, placements: tuple[Placement, ...], mesh: DeviceMesh
) -> DTensor:
    """The local shard, sharing its memory, as a DTensor."""
    stride = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
