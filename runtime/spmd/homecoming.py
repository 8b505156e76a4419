"""Bringing home what a call did that left, but for values, what the last one left.

Where the values lie and which of the caller's tensors they belong to was found out once. What a
body wrote in place is written here, whatever it is; what it did not, as far as tensors tell, is
written only where it is another, so that nobody's graph is spoilt by a call that wrote nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.runtime.eager.body import Objects
from autoshard.runtime.shards import view_shard
from autoshard.runtime.spmd.home import from_replies, output_of
from autoshard.runtime.spmd.request import Changes, Reply, is_all_slots
from autoshard.sharding.layout import P, Shape, coordinates

_Pair = tuple[int, torch.Tensor, torch.Tensor]
"""Number of a piece, the part of the caller's tensor that it is, and the piece."""


class Homecoming:
    """Brings values home.

    Args:
        replies: of the last call; those of the next ones are the same objects.
        pairs: where they belong.
        mesh: axis sizes.
    """

    def __init__(self, replies: Sequence[Reply], pairs: Sequence[_Pair], mesh: Shape) -> None:
        changes = replies[0].changes
        assert changes is not None
        written = replies[0].written or frozenset()
        self.replies, self._changes = replies, changes
        self._wholes = from_replies(replies, mesh)
        self._to = [target for number, target, _ in pairs if number in written]
        self._of = [piece for number, _, piece in pairs if number in written]
        self._compared = [(t, piece) for number, t, piece in pairs if number not in written]

    @classmethod
    def of(cls, replies: Sequence[Reply], objects: Objects, mesh: Shape) -> Homecoming | None:
        """What brings home calls like that one; None if it did more than write into modules."""
        changes = replies[0].changes
        assert changes is not None
        if (
            changes.optimizers
            or changes.tensors
            or changes.tensor_gradients
            or changes.captured
            or changes.schedulers
            or changes.generators is not None
            or not is_all_slots(changes.output)
        ):
            return None
        try:
            return cls(replies, list(_pairs(replies, changes, objects, mesh)), mesh)
        except _ElsewhereError:
            return None

    def bring(self, objects: Objects) -> Any:
        """Write what a call did into the caller's modules; the function's result, whole."""
        output = output_of(self._changes.output, self._wholes, objects, self._changes.lies)
        with torch.no_grad():
            for target, piece in self._compared:
                if not torch.equal(target, piece):
                    target.copy_(piece)
            if self._to:
                torch._foreach_copy_(self._to, self._of)
        return output


class _ElsewhereError(Exception):
    """Some value does not belong in memory that is there."""


def _pairs(
    replies: Sequence[Reply], changes: Changes, objects: Objects, mesh: Shape
) -> Iterator[_Pair]:
    for module, state in zip(objects.modules, changes.modules, strict=True):
        parameters, buffers, gradients, training = state
        if gradients or {n: m.training for n, m in module.named_modules()} != training:
            raise _ElsewhereError
        yield from _of_tensors(dict(module.named_parameters()), parameters, replies, changes, mesh)
        yield from _of_tensors(dict(module.named_buffers()), buffers, replies, changes, mesh)


def _of_tensors(
    own: dict[str, torch.Tensor] | dict[str, nn.Parameter],
    numbers: dict[str, int],
    replies: Sequence[Reply],
    changes: Changes,
    mesh: Shape,
) -> Iterator[_Pair]:
    for name, number in numbers.items():
        tensor = own.get(name)
        layout, shape, _ = changes.lies[number]
        if tensor is None or tuple(tensor.shape) != tuple(shape) or P in layout:
            raise _ElsewhereError
        address = tensor.untyped_storage().data_ptr()
        for place, reply in zip(coordinates(mesh), replies, strict=True):
            piece = reply.pieces.get(number)
            if piece is None:
                continue
            target = view_shard(tensor.detach(), layout, mesh, place)
            if (
                isinstance(piece, str)
                or target.untyped_storage().data_ptr() != address
                or (target.shape, target.dtype) != (piece.shape, piece.dtype)
            ):
                raise _ElsewhereError
            yield number, target, piece


__all__ = ["Homecoming"]
