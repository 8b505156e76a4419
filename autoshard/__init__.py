"""Find how to shard a PyTorch model over a device mesh, and run the result.

Names are imported when they are first used: ``import autoshard`` alone loads neither torch nor
anything else that is slow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.client import Client
    from autoshard.cluster import Cluster
    from autoshard.errors import (
        AutoshardError,
        CaptureError,
        ExportUnsupported,
        InfeasibleError,
        InputError,
        MeshError,
        RankError,
        RequestError,
        RuleError,
        ServiceError,
        SpecError,
        UnknownNameError,
        ValidationError,
    )
    from autoshard.graph import ModelGraph
    from autoshard.planner import (
        Plan,
        analyze,
        estimate,
        from_export,
        front,
        optimize,
        smallest,
        validate,
        what_if,
    )
    from autoshard.sharding.mesh import DeviceMesh
    from autoshard.sharding.registry import sharding_rule
    from autoshard.sharding.spec import P, PartitionSpec, ShardingSpec
    from autoshard.sweeps import sweep

__version__ = "0.1.0"

_HOME = {
    "AutoshardError": "autoshard.errors",
    "CaptureError": "autoshard.errors",
    "Client": "autoshard.client",
    "Cluster": "autoshard.cluster",
    "DeviceMesh": "autoshard.sharding.mesh",
    "ExportUnsupported": "autoshard.errors",
    "InfeasibleError": "autoshard.errors",
    "InputError": "autoshard.errors",
    "MeshError": "autoshard.errors",
    "ModelGraph": "autoshard.graph",
    "P": "autoshard.sharding.spec",
    "PartitionSpec": "autoshard.sharding.spec",
    "Plan": "autoshard.planner",
    "RankError": "autoshard.errors",
    "RequestError": "autoshard.errors",
    "RuleError": "autoshard.errors",
    "ServiceError": "autoshard.errors",
    "ShardingSpec": "autoshard.sharding.spec",
    "SpecError": "autoshard.errors",
    "UnknownNameError": "autoshard.errors",
    "ValidationError": "autoshard.errors",
    "analyze": "autoshard.planner",
    "estimate": "autoshard.planner",
    "from_export": "autoshard.planner",
    "no_sync": "autoshard.runtime.eager",
    "optimize": "autoshard.planner",
    "profiler": "autoshard.runtime.watch",
    "sharding_rule": "autoshard.sharding.registry",
    "front": "autoshard.planner",
    "smallest": "autoshard.planner",
    "spmd": "autoshard.runtime.spmd",
    "sweep": "autoshard.sweeps",
    "validate": "autoshard.planner",
    "what_if": "autoshard.planner",
}
"""Module that each public name comes from."""

__all__ = [
    "AutoshardError",
    "CaptureError",
    "Client",
    "Cluster",
    "DeviceMesh",
    "ExportUnsupported",
    "InfeasibleError",
    "InputError",
    "MeshError",
    "ModelGraph",
    "P",
    "PartitionSpec",
    "Plan",
    "RankError",
    "RequestError",
    "RuleError",
    "ServiceError",
    "ShardingSpec",
    "SpecError",
    "UnknownNameError",
    "ValidationError",
    "__version__",
    "analyze",
    "estimate",
    "from_export",
    "front",
    "no_sync",
    "optimize",
    "profiler",
    "sharding_rule",
    "smallest",
    "spmd",
    "sweep",
    "validate",
    "what_if",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    found: Any = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
