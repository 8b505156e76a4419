"""From what a person asked for to what can be planned: cluster, batch, mesh, strategy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from typing import Any

from autoshard.candidates import EXPERTS
from autoshard.cluster import Cluster
from autoshard.errors import MeshError, RequestError, UnknownNameError
from autoshard.graph import ModelGraph
from autoshard.plan import MeshDocument

AXES = ("data", "model")
"""Axes that this version plans over, outermost first."""

SHORT_AXES = {"dp": "data", "tp": "model", "pp": "pipeline", "cp": "context", "ep": "expert"}
CONTEXT = "context"
"""Axis that cuts the tokens of each sample; priced where a mesh names it, not searched."""

EXPERT = "expert"
"""Axis that cuts samples and, of layers of experts, the experts; priced where a mesh names it."""

NAMED = (AXES[0], EXPERT, CONTEXT, *AXES[1:])
"""Axes that a mesh may name, outermost first."""

ALL_AXES = ("pipeline", "data", "model", "context", "expert")
STRATEGIES = ("auto", "data", "fsdp", "tensor", "hybrid")
BOTH = ("data+tensor", "fsdp+tensor")
"""Strategies that say what both axes are for; priced where asked for, not searched."""

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
}


def resolve_cluster(
    cluster: Cluster | str | Mapping[str, Any] | None, devices: int | None
) -> tuple[Cluster, str | None]:
    """The cluster, and what was assumed where none was named.

    Raises:
        UnknownNameError: no such preset or file.
        RequestError: a document that is no cluster, or a number of devices that cannot be.
    """
    if devices is not None and (not isinstance(devices, int) or devices < 1):
        raise RequestError(f"devices must be a positive whole number, found {devices!r}")
    if isinstance(cluster, Cluster):
        if devices is not None and devices != cluster.devices:
            return cluster.with_devices(devices), None
        return cluster, None
    if isinstance(cluster, Mapping):
        found = Cluster.from_json(dict(cluster))
        return (found if devices is None else found.with_devices(devices)), None
    if cluster is None:
        count = devices or max(2, os.cpu_count() or 2)
        return (
            Cluster.preset("local", devices=count),
            f"cluster: none named, so {count} processes of this machine (preset 'local')",
        )
    if cluster.endswith((".toml", ".json")) or os.sep in cluster:
        found = Cluster.load(cluster)
        return (found if devices is None else found.with_devices(devices)), None
    return Cluster.preset(cluster, devices=devices), None


def resolve_mesh(mesh: str | Mapping[str, int] | None, devices: int) -> MeshDocument | None:
    """The mesh that was forced, as named axes, or None.

    Accepts ``"data=4,model=8"``, ``{"dp": 4, "tp": 8}``; an axis that is not named has size 1.

    Raises:
        MeshError: unreadable, unknown or unsupported axes, or a product other than ``devices``.
    """
    if mesh is None:
        return None
    sizes = read_mesh(mesh) if isinstance(mesh, str) else {str(k): v for k, v in mesh.items()}
    named: dict[str, int] = {}
    for name, size in sizes.items():
        axis = SHORT_AXES.get(name, name)
        if axis not in ALL_AXES:
            raise MeshError(
                str(UnknownNameError("mesh axis", name, (*ALL_AXES, *SHORT_AXES)))
                + f" (in mesh {mesh!r})"
            )
        if not isinstance(size, int) or size < 1:
            raise MeshError(f"mesh {mesh!r}: axis {name!r} has size {size!r}; sizes are 1, 2, ...")
        if axis in named:
            raise MeshError(f"mesh {mesh!r} names axis {axis!r} twice")
        if axis not in NAMED and size > 1:
            raise MeshError(
                f"mesh {mesh!r}: axis {axis!r} (size {size}) is not planned yet; "
                f"this version plans over {' and '.join(AXES)}"
            )
        named[axis] = size
    axes = tuple(axis for axis in NAMED if axis in AXES or named.get(axis, 1) > 1)
    out = tuple(named.get(axis, 1) for axis in axes)
    if prod(out) != devices:
        raise MeshError(
            f"mesh {mesh!r} has {' x '.join(map(str, out))} = {prod(out)} devices, the cluster "
            f"has {devices}; data x model may be "
            + ", ".join(f"{d}x{devices // d}" for d in _divisors(devices))
        )
    return MeshDocument(axis_names=axes, sizes=out)


def check_experts(graph: ModelGraph, size: int) -> None:
    """Refuse an axis ``expert`` that does not divide the experts of every layer that has some.

    Raises:
        MeshError: says how many experts there are.
    """
    counts = {int(str(n.attrs["experts"])) for n in graph.nodes if n.family == EXPERTS}
    if size > 1 and (not counts or any(count % size for count in counts)):
        have = f"layers of {', '.join(map(str, sorted(counts)))}" if counts else "none"
        raise MeshError(
            f"expert={size} does not divide the experts of {graph.name}, which has {have}; give "
            "these devices to data"
        )


def read_mesh(text: str) -> dict[str, int]:
    """Sizes by name of ``data=4,model=8``, as they stand there.

    Raises:
        MeshError: unreadable, or an axis named twice.
    """
    out: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, size = part.partition("=")
        if not equals or not size.strip().isdigit():
            raise MeshError(f"mesh {text!r}: cannot read {part!r}; write it as data=4,model=8")
        if name.strip() in out:
            raise MeshError(f"mesh {text!r} names axis {name.strip()!r} twice")
        out[name.strip()] = int(size)
    if not out:
        raise MeshError(f"mesh {text!r} names no axis; write it as data=4,model=8")
    return out


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def check_strategy(strategy: str) -> str:
    """The strategy, checked.

    Raises:
        UnknownNameError: not one of ``STRATEGIES``, nor of ``BOTH``.
    """
    if strategy not in (*STRATEGIES, *BOTH):
        raise UnknownNameError("strategy", strategy, STRATEGIES)
    return strategy


def resolve_dtype(dtype: str | None) -> str | None:
    """The dtype's full name, or None.

    Raises:
        UnknownNameError: not a floating dtype that can be planned for.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, DTYPES)
    return DTYPES[name]


def check_sizes(**sizes: int | None) -> None:
    """Refuse batch and sequence sizes that cannot be.

    Raises:
        RequestError: not a positive whole number; names which.
    """
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise RequestError(
                f"{name.replace('_', ' ')} must be a positive whole number, found {size!r}"
            )
