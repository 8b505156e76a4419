"""`@spmd` on one rank: ordinary functions, one operator at a time, by the sharding rules."""

from autoshard.runtime.eager.body import (
    BodyResult,
    EagerOptions,
    ModuleState,
    Objects,
    OptimizerState,
    Piece,
    no_sync,
    objects_of,
    run_body,
)

__all__ = [
    "BodyResult",
    "EagerOptions",
    "ModuleState",
    "Objects",
    "OptimizerState",
    "Piece",
    "no_sync",
    "objects_of",
    "run_body",
]
