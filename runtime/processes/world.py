"""Where a function runs: one rank of a world, whether the pool or torchrun started it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist

from autoshard.errors import MeshError
from autoshard.runtime.processes.channel import Progress

DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process as one rank; the default process group of ``torch.distributed`` is up.

    Attributes:
        rank: from 0.
        size: how many ranks there are.
        device: where this rank computes.
        timeout_s: limit of every collective.
        report: takes progress messages, or None.
        descriptors: of files that came with the call.
        number: of the call, counted since this rank was forked.
        later: takes what a call leaves to be done once its result is sent, or is None.
        is_local: whether all ranks are known to be processes of this machine.
    """

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    report: Callable[[Progress], None] | None = None
    descriptors: tuple[int, ...] = ()
    number: int = 0
    later: Callable[[Callable[[], None]], None] | None = None
    is_local: bool = False

    def progress(self, text: str = "", fraction: float | None = None) -> None:
        """Tell the caller how far this rank is; without a caller, nothing happens."""
        if self.report is not None:
            self.report(Progress(text, fraction))

    def check_mesh(self, shape: Sequence[int]) -> None:
        """Refuse a mesh that does not have one device for each rank.

        Raises:
            MeshError: naming both sizes.
        """
        if prod(shape) != self.size:
            sizes = " x ".join(map(str, shape)) or "1"
            raise MeshError(
                f"a mesh of {sizes} has {prod(shape)} devices, and {self.size} processes run; "
                f"start {prod(shape)} processes, or choose axis sizes whose product is {self.size}"
            )


_current: World | None = None
_is_ours = False  # whether the default group was made here


def enter(world: World) -> None:
    """Make ``world`` the one that :func:`current_world` returns (the pool's ranks call this)."""
    global _current
    _current = world


def under_launcher() -> bool:
    """Whether torchrun, or what sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def in_world() -> bool:
    """Whether this process is one of several already: a pool's rank, or started by torchrun."""
    return _current is not None or under_launcher()


def current_world(timeout_s: float = DEFAULT_TIMEOUT_S) -> World | None:
    """The world this process is a rank of, or None in a plain program.

    In a rank of the pool: its world. Where the default process group is up already: that group.
    Under torchrun the group is made at the first call, with the backend that torch names for the
    accelerator of this machine, and destroyed at exit.

    Args:
        timeout_s: limit of every collective, where the group is made here.
    """
    if _current is not None:
        return _current
    if dist.is_initialized():
        # Not remembered: who made the group may replace it.
        return World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            device=_device(),
            timeout_s=timeout_s,
        )
    if not under_launcher():
        return None
    device = _device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    dist.init_process_group(
        backend_of(device.type),
        timeout=timedelta(seconds=timeout_s),
    )
    global _is_ours
    _is_ours = True
    enter(
        World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            device=device,
            timeout_s=timeout_s,
        )
    )
    return _current


def backend_of(device_type: str) -> str:
    """Backend of the default group: torch's choice for the device, and gloo for CPU tensors."""
    backend = dist.get_default_backend_for_device(device_type)
    return backend if device_type == "cpu" else f"cpu:gloo,{device_type}:{backend}"


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device(accelerator.type, local_rank % torch.accelerator.device_count())


@atexit.register
def _leave() -> None:
    """Destroy the group; registered on import, so that whoever holds it has let go of it before."""
    global _current
    if not _is_ours:
        return
    _current = None
    if dist.is_initialized():
        dist.destroy_process_group()
