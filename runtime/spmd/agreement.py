"""Under torchrun every process runs the whole script: have they called with equal arguments?"""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import InputError
from autoshard.runtime.processes import World
from autoshard.runtime.spmd.ambient import generators, set_generators

_SLOTS = 64  # one message of fixed size, whatever the arguments are

_agreed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_agreement(
    world: World,
    what: str,
    tensors: Sequence[tuple[str, Any]],
    modules: Sequence[tuple[str, nn.Module]],
) -> None:
    """Raise on every rank if the ranks were called with different things; one small message.

    Modules are compared at the first call that they are part of. Random generators that differ
    are set to those of rank 0.

    Args:
        world: the processes.
        what: the function and all that is no tensor, as text.
        tensors: with their names, in one order.
        modules: with their names.

    Raises:
        InputError: naming the argument and the ranks that differ.
    """
    new = [(name, module) for name, module in modules if module not in _agreed]
    states = generators()
    names: list[list[str]] = [[] for _ in range(_SLOTS)]
    sums = [0] * _SLOTS
    sums[0] = _digest(what.encode())
    sums[1] = (
        _digest(states[0])
        ^ _digest(repr(states[1][1:]).encode())
        ^ _digest(repr(states[2]).encode())
    )
    for number, (name, tensor) in enumerate([*tensors, *_states(new)]):
        slot = 2 + number % (_SLOTS - 2)
        sums[slot] = _digest(f"{sums[slot]} {_sum(tensor)}".encode())
        names[slot].append(name)
    mine = torch.tensor(sums, dtype=torch.int64, device=world.device)
    every = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(every, mine)
    table = torch.stack(every).cpu()
    differs = (table != table[0]).any(0)
    if differs[0]:
        raise InputError(
            f"the ranks called {what.splitlines()[0]} in different ways: "
            f"{_ranks(table, 0)}; under torchrun every process has to make the same calls, with "
            "arguments of the same kinds, shapes and values, in one order"
        )
    wrong = [slot for slot in range(2, _SLOTS) if differs[slot]]
    if wrong:
        which = ", ".join(name for slot in wrong for name in names[slot])
        raise InputError(
            f"{which}: {_ranks(table, wrong[0])}; every rank has to hand in the same whole value, "
            "of which it then takes its shard: make it from one seed (torch.manual_seed), read the "
            "same file, or torch.distributed.broadcast it from rank 0"
        )
    if differs[1]:
        box: list[Any] = [states]
        dist.broadcast_object_list(box, src=0, device=world.device)
        set_generators(box[0])
    _agreed.update(module for _, module in new)


def _ranks(table: torch.Tensor, slot: int) -> str:
    others = [rank for rank in range(len(table)) if table[rank, slot] != table[0, slot]]
    listed = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    if len(others) == 1:
        return f"rank {listed} differs from rank 0"
    return f"ranks {listed} differ from rank 0"


def _states(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{name}.{key}", value.detach())
        for name, module in modules
        for key, value in (*module.named_parameters(), *module.named_buffers())
    ]


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _sum(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.device.type != "cpu":  # without a copy to the host
            value = value.contiguous().view(torch.uint8) if value.element_size() == 1 else value
            bits = value.contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
            weights = torch.arange(1, bits.numel() + 1, device=bits.device)
            return int((bits * weights).sum())
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return zlib.crc32(raw.data)
