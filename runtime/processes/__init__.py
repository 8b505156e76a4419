"""Processes: a pool of ranks on this machine, or the ranks that torchrun started."""

from autoshard.runtime.processes.channel import Progress
from autoshard.runtime.processes.launcher import launcher, shut_down
from autoshard.runtime.processes.pool import Pool, Prepared, get_pool
from autoshard.runtime.processes.world import (
    DEFAULT_TIMEOUT_S,
    World,
    backend_of,
    current_world,
    in_world,
    under_launcher,
)

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Pool",
    "Prepared",
    "Progress",
    "World",
    "backend_of",
    "current_world",
    "get_pool",
    "in_world",
    "launcher",
    "shut_down",
    "under_launcher",
]
