"""Between autoshard's words and torch's: device meshes, and DTensor placements.

torch applies placements in the order of the mesh's axes, each to what the earlier ones left:
``Shard(dim)`` cuts the local dim as ``torch.chunk``, ``_StridedShard(dim, split_factor=k)`` first
views it as ``k`` equal pieces and cuts each. A :class:`~autoshard.sharding.layout.Cut` speaks of
the global dim instead, so only its ``outer`` has to be translated.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autoshard.errors import MeshError, SpecError
from autoshard.sharding.layout import (
    Cut,
    Layout,
    P,
    R,
    Shape,
    State,
    Uncut,
    radix,
)
from autoshard.sharding.mesh import DeviceMesh
from autoshard.sharding.spec import ShardingSpec

# ---- meshes -----------------------------------------------------------------------------------


def to_torch_mesh(mesh: DeviceMesh, device_type: str = "cpu") -> TorchMesh:
    """Torch's mesh of the same ranks and axis names; a process group must exist."""
    ranks = torch.tensor(mesh.devices, dtype=torch.int)
    return TorchMesh(device_type, ranks, mesh_dim_names=mesh.axis_names)


def from_torch_mesh(mesh: TorchMesh) -> DeviceMesh:
    """The mesh of the same ranks; axes that torch has no names for are called dim_0, dim_1, ...

    Raises:
        MeshError: the mesh has no axis.
    """
    ranks = mesh.mesh
    if ranks.ndim == 0:
        raise MeshError("torch's mesh has no axis; flatten it into one")
    names = mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(ranks.ndim))
    return DeviceMesh(ranks.tolist(), names)


# ---- placements -------------------------------------------------------------------------------


def to_placements(spec: ShardingSpec, shape: Sequence[int]) -> tuple[Placement, ...]:
    """DTensor placements of a tensor of global ``shape``, one an axis of the mesh.

    Raises:
        SpecError: the spec does not fit, or a cut that DTensor cannot express.
    """
    return placements_of(spec.layout(shape), spec.mesh.shape, shape)


def from_placements(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> ShardingSpec:
    """The spec of a tensor of global ``shape`` with DTensor ``placements`` on ``mesh``.

    Raises:
        SpecError: a placement that autoshard does not have.
    """
    return ShardingSpec.from_layout(mesh, layout_of(placements, mesh.shape, shape), shape)


def spec_of(tensor: DTensor) -> ShardingSpec:
    """The sharding spec of a DTensor.

    Raises:
        SpecError: a placement that autoshard does not have.
    """
    return from_placements(
        from_torch_mesh(tensor.device_mesh), tensor.placements, tuple(tensor.shape)
    )


def placements_of(layout: Layout, mesh: Shape, shape: Sequence[int]) -> tuple[Placement, ...]:
    """Placements of a layout on axes of sizes ``mesh``; ``R`` and ``RP`` both replicate.

    Raises:
        SpecError: a cut that DTensor cannot express.
    """
    shape = tuple(shape)
    out: list[Placement] = []
    for axis, state in enumerate(layout):
        if isinstance(state, Uncut):
            out.append(Partial() if state is P else Replicate())
            continue
        factor, inner = _local(state, shape[state.dim], layout[:axis], mesh)
        if state.n % mesh[axis] and inner > 1:
            raise SpecError(
                f"dim {state.dim} (size {shape[state.dim]}) is cut in {state.outer} x {state.n} "
                f"units of {inner} elements, unevenly over an axis of size {mesh[axis]}; DTensor "
                f"cuts single elements only: choose an axis size that divides {state.n}"
            )
        out.append(
            Shard(state.dim) if factor == 1 else _StridedShard(state.dim, split_factor=factor)
        )
    return tuple(out)


def layout_of(placements: Sequence[Placement], mesh: Shape, shape: Sequence[int]) -> Layout:
    """The layout of DTensor ``placements`` on axes of sizes ``mesh``, in canonical form.

    Raises:
        SpecError: a placement that autoshard does not have.
    """
    shape = tuple(shape)
    if len(placements) != len(mesh):
        raise SpecError(
            f"{len(placements)} placements for a mesh of {len(mesh)} axes; give one an axis"
        )
    layout: list[State] = []
    for axis, placement in enumerate(placements):
        layout.append(_state(placement, axis, tuple(layout), mesh, shape))
    return tuple(layout)


def _state(placement: Placement, axis: int, before: Layout, mesh: Shape, shape: Shape) -> State:
    if isinstance(placement, Replicate):
        return R
    if type(placement) is Partial:
        if placement.reduce_op != "sum":
            raise SpecError(
                f"{placement!r} on axis {axis}; autoshard's partial values are sums: "
                "redistribute it first"
            )
        return P
    if isinstance(placement, Shard | _StridedShard):
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        dim = int(placement.dim) % len(shape) if shape else int(placement.dim)
        if mesh[axis] == 1:
            return R
        return _global_cut(dim, factor, axis, before, mesh, shape)
    raise SpecError(
        f"{placement!r} on axis {axis}; autoshard has Shard, Replicate and Partial: "
        "redistribute it first"
    )


def _local(cut: Cut, size: int, before: Layout, mesh: Shape) -> tuple[int, int]:
    """(outer, inner) of ``cut`` in terms of what the axes before it have left of the dim.

    ``inner`` is that of the device that holds most.
    """
    digits = radix(size, cut.dim, (*before, cut))
    place = digits.axes.index(len(before))
    outer = inner = 1
    for position, (digit, axis) in enumerate(zip(digits.sizes, digits.axes, strict=True)):
        parts = 1 if axis is None else mesh[axis]
        if position < place:
            if digit % parts:
                raise SpecError(
                    f"dim {cut.dim} (size {size}) is cut unevenly over an axis of size {parts} and "
                    "once more inside each piece; DTensor would give the devices different "
                    f"strides: choose a size that divides by {parts}"
                )
            outer *= digit // parts
        elif position > place:
            inner *= -(-digit // parts)
    return outer, inner


def _global_cut(dim: int, factor: int, axis: int, before: Layout, mesh: Shape, shape: Shape) -> Cut:
    """The cut that ``Shard`` (factor 1) or ``_StridedShard`` makes of what is left of ``dim``."""
    size, parts = shape[dim], mesh[axis]
    digits = radix(size, dim, before)
    sizes = [1 if a is None else mesh[a] for a in digits.axes]
    held = [-(-digit // p) for digit, p in zip(digits.sizes, sizes, strict=True)]
    outer, rest = 1, factor
    for position, (digit, a, have) in enumerate(zip(digits.sizes, digits.axes, held, strict=True)):
        last = position == len(held) - 1
        if not last and rest % have == 0 and (rest > 1 or have == 1):
            if digit % sizes[position]:
                break  # the devices hold different numbers of pieces
            outer, rest = outer * digit, rest // have
            continue
        if a is not None or have % rest:
            break
        left = have // rest
        if left % parts == 0:
            return Cut(dim, outer * rest, parts)
        if prod(held[position + 1 :]) == 1:
            return Cut(dim, outer * rest, left)
        break
    strided = f" in {factor} pieces" if factor > 1 else ""
    raise SpecError(
        f"axis {axis} (size {parts}) cuts dim {dim} (size {size}){strided} inside what the axes "
        "before it have left, which autoshard does not have; choose sizes so that only the last "
        "axis of a dim cuts it unevenly"
    )
