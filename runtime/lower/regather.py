"""Gathered values that are dropped after use and gathered again in backward (ZeRO-3).

Autograd keeps the gathered weight of a product for backward. Here the operator's operands are kept
by a hook, and the hook keeps the shard instead of what was gathered from it. One operator gathers
once, however often it keeps a value, and all that it keeps in the order the program lists them, so
every device gathers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]
Run = Callable[..., Any]


class _Dropped:
    """What one call of an operator does not keep: the shards, and how to gather them."""

    __slots__ = ("gathers", "left", "packed", "shards", "used", "wholes")

    def __init__(self, gathers: Sequence[Gather], shards: Sequence[Tensor]) -> None:
        self.gathers, self.shards = gathers, shards
        self.used: set[int] = set()
        self.packed = self.left = 0
        self.wholes: dict[int, Tensor] = {}

    def drop(self, index: int) -> None:
        self.used.add(index)
        self.packed += 1
        self.left = self.packed

    def whole(self, index: int) -> Tensor:
        if not self.wholes:
            with torch.no_grad():
                self.wholes = {i: self.gathers[i](self.shards[i]) for i in sorted(self.used)}
        found = self.wholes[index]
        self.left -= 1
        if not self.left:
            self.wholes, self.left = {}, self.packed
        return found


def regathering(run: Run, operands: int, places: Sequence[int], gathers: Sequence[Gather]) -> Run:
    """``run`` so that autograd keeps shards of some operands, not what was gathered from them.

    Args:
        run: the operator, on ``operands`` tensors.
        operands: number of its operands.
        places: which operands (or views of them) were gathered, in the program's order.
        gathers: how each is gathered from its shard; the same call gives the same memory layout.

    Returns:
        a function of the operands followed by the shards of those at ``places``.
    """

    def call(*tensors: Tensor) -> Any:
        values, shards = tensors[:operands], tensors[operands:]
        dropped = _Dropped(gathers, [s.detach() for s in shards])
        # The operands live as long as the call, so no other storage can have their address.
        storages = {values[p].untyped_storage()._cdata: i for i, p in enumerate(places)}

        def pack(tensor: Tensor) -> Any:
            index = storages.get(tensor.untyped_storage()._cdata)
            if index is None:
                return tensor
            dropped.drop(index)
            return index, tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            index, size, stride, offset = packed
            return dropped.whole(index).as_strided(size, stride, offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run(*values)

    call.__name__ = f"regather_{getattr(run, '__name__', 'operator')}"
    return call
