"""Whether a cut can pay: the most that it saves against the least that it costs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from autoshard.runtime.watch.records import seconds_text
from autoshard.sharding.layout import Cut, Shape
from autoshard.sharding.mesh import DeviceMesh
from autoshard.sharding.spec import ShardingSpec

_SMALL_BYTES = 1 << 20  # above, memory is a reason of its own


class SmallCutWarning(UserWarning):
    """A tensor is so small that cutting it costs more than it saves."""


@lru_cache
def _cluster(shape: Shape) -> Any:
    from autoshard.cluster import Cluster

    cluster = Cluster.preset("local", prod(shape))
    return cluster, cluster.collective_seconds(shape)


def figures(
    spec: ShardingSpec, shape: Shape, dtype: str, itemsize: int, rows: int, *, is_parameter: bool
) -> tuple[float, float]:
    """(most seconds that the cut saves, least seconds that it costs) in one call.

    For a tensor of m elements that w devices share, ``rows`` times used, on processes of this
    machine (``Cluster.preset("local")``)::

        saves  (1 - 1/w) (k 2 m rows / rate + (k + 1) bytes / bandwidth)
        costs  latency of one collective over the axes that cut it, with one element

    with k = 3 for a parameter (forward and both halves of backward), else 1. One collective is the
    least: a cut tensor is gathered, or what is computed with it is summed or gathered.
    """
    mesh = spec.mesh
    axes = tuple(a for a, s in enumerate(spec.layout(shape)) if isinstance(s, Cut))
    ways = prod(mesh.shape[a] for a in axes)
    cluster, prices = _cluster(mesh.shape)
    elements = prod(shape)
    passes = 3 if is_parameter else 1
    seconds = passes * 2 * elements * rows / cluster.flops_per_second(dtype)
    seconds += (passes + 1) * elements * itemsize / cluster.copy_bytes_per_second
    return (1 - 1 / ways) * seconds, prices("all_reduce", axes, itemsize)


def warn_of_small_cuts(
    cuts: Sequence[tuple[str, Any, ShardingSpec, bool]], tensors: Sequence[Any], mesh: DeviceMesh
) -> None:
    """Warn of the tensors that are cut to no avail; with both figures for the largest.

    Args:
        cuts: (name, tensor, spec, whether it is a parameter) of all that is cut.
        tensors: all tensors of the call, parameters too: they tell how much is computed.
        mesh: the mesh.
    """
    parameters = sum(t.numel() for t in tensors if isinstance(t, torch.nn.Parameter))
    others = [tuple(t.shape) for t in tensors if not isinstance(t, torch.nn.Parameter)]
    rows = max((prod(t.shape) for t in tensors if not _is_parameter(t)), default=1)
    widest = max((max(shape, default=1) for shape in others), default=1)
    poor: list[tuple[int, str, float, float]] = []
    for name, tensor, spec, is_parameter in cuts:
        size = int(np.prod(tuple(tensor.shape)))
        itemsize = _itemsize(tensor)
        if size == 0 or size * itemsize > _SMALL_BYTES:
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        # Each element of an argument may meet every parameter, or the widest other operand.
        uses = rows if is_parameter else max(3 * parameters, widest)
        saves, costs = figures(
            spec, tuple(tensor.shape), dtype, itemsize, uses, is_parameter=is_parameter
        )
        if saves < costs:
            shape = ", ".join(map(str, tensor.shape))
            poor.append((size, f"{name} {dtype}[{shape}]", saves, costs))
    if not poor:
        return
    _, text, saves, costs = max(poor)
    also = f" (and {len(poor) - 1} smaller ones)" if len(poor) > 1 else ""
    warnings.warn(
        f"{text}{also} is cut, which saves at most {seconds_text(saves)} a call and costs at least "
        f"{seconds_text(costs)} on {mesh.size} processes of this machine; leave it whole: "
        "PartitionSpec()",
        SmallCutWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """``stacklevel`` with which a warning of the calling function names the user's line."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and (frame.f_globals.get("__name__") or "").startswith("autoshard."):
        level, frame = level + 1, frame.f_back
    return level - 1


def _is_parameter(tensor: Any) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _itemsize(tensor: Any) -> int:
    return int(tensor.element_size() if isinstance(tensor, torch.Tensor) else tensor.itemsize)
