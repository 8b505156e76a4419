"""A call like the one before it: nothing but the bytes of tensors differs, so nothing is packed.

What a step is called with is, from step to step, the same modules and new batches of the same
shape. Where a snapshot says that all else is as it was, what was worked out for the last call
(checks, layouts, the pickle) holds for this one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from autoshard.runtime.eager.body import Objects
from autoshard.runtime.spmd.homecoming import Homecoming
from autoshard.runtime.spmd.request import Request, schedulers_of
from autoshard.runtime.spmd.shipment import Bytes, Loose, is_plain, memory_of
from autoshard.runtime.spmd.snapshot import OpaqueError, Snapshot

_PLAIN = (bool, int, str, bytes, type(None))
_MOST_CONTAINERS = 64
_SMALL_BYTES = 1 << 15  # torch copies larger ones with several threads, which ranks need


class Standing:
    """A call that may be made again.

    Args:
        function: what is called.
        args: of the call.
        kwargs: of the call.
        objects: of the call.
        request: what was sent.
        rest: its pickle.

    Attributes:
        rest: its pickle, without memory.
        homecoming: what brings home calls that leave what the last one left; None: not known.

    Raises:
        OpaqueError: there is no telling whether a later call is alike.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        objects: Objects,
        request: Request,
        rest: Loose,
    ) -> None:
        if request.gradients or request.tensors or schedulers_of(request.objects):
            raise OpaqueError
        found = _Found()
        self._sketch = found.sketch((args, kwargs))
        tensors = found.tensors
        owned = {id(t) for m in objects.modules for t in (*m.parameters(), *m.buffers())}
        places = {id(t): i for i, t in enumerate(objects.tensors)}
        if len(tensors) != len(places) or any(id(t) in owned for t in tensors):
            raise OpaqueError  # one of them twice, or one that an optimizer or a module has too
        self._places = [places[id(t)] for t in tensors]
        pieces = rest.pieces_of(tensors)
        self._pieces = [piece for piece in pieces if piece is not None]
        if len(set(self._pieces)) != len(tensors):
            raise OpaqueError
        self._addresses = set(rest.addresses) - {t.untyped_storage().data_ptr() for t in tensors}
        self._memory = [
            (number, memory)
            for number, memory in enumerate(rest.memory)
            if memory.nbytes and number not in self._pieces
        ]
        self._snapshot = Snapshot([function, *objects.modules, *objects.optimizers])
        if self._snapshot.reaches(found.containers):
            raise OpaqueError
        self._modules = [weakref.ref(m) for m in objects.modules]
        self._optimizers = [weakref.ref(o) for o in objects.optimizers]
        self._by_value = cloudpickle.list_registry_pickle_by_value()
        self.rest = rest.without_memory()
        self.homecoming: Homecoming | None = None
        self._loading: _Loading | None = None

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Objects | None:
        """The objects of a call with these arguments; None if it is another."""
        found = _Found()
        try:
            if found.sketch((args, kwargs)) != self._sketch or not self._snapshot.holds():
                return None
        except OpaqueError:
            return None
        if found.containers and self._snapshot.reaches(found.containers):
            return None
        tensors = found.tensors
        if cloudpickle.list_registry_pickle_by_value() != self._by_value:
            return None
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if len(addresses) != len(tensors) or not addresses.isdisjoint(self._addresses):
            return None  # two of them share memory
        given: list[torch.Tensor] = list(tensors)
        for tensor, place in zip(tensors, self._places, strict=True):
            given[place] = tensor
        modules = [m() for m in self._modules]
        optimizers = [o() for o in self._optimizers]
        return Objects(
            modules=[m for m in modules if m is not None],
            optimizers=[o for o in optimizers if o is not None],
            tensors=given,
        )

    def load(self, objects: Objects, block: Bytes) -> None:
        """Copy the memory of a call to its places."""
        if self._loading is None or self._loading.block is not block:
            self._loading = _Loading(block, self._memory, self.rest.places)
        self._loading.run()
        for piece, place in zip(self._pieces, self._places, strict=True):
            start, size = self.rest.places[piece]
            np.copyto(block[start : start + size], memory_of(objects.tensors[place]))


class _Loading:
    """Copies memory that is where it was to places in a block.

    Args:
        block: the block.
        memory: numbers and memory of pieces.
        places: of all pieces their start in the block and their size.
    """

    def __init__(
        self,
        block: Bytes,
        memory: Sequence[tuple[int, Bytes]],
        places: Sequence[tuple[int, int]],
    ) -> None:
        self.block = block
        pairs = [
            (block[start : start + size], piece)
            for number, piece in memory
            for start, size in (places[number],)
        ]
        self._large = [pair for pair in pairs if pair[1].nbytes > _SMALL_BYTES]
        small = [pair for pair in pairs if pair[1].nbytes <= _SMALL_BYTES]
        self._to = [torch.from_numpy(place) for place, _ in small]
        self._of = [_as_tensor(piece) for _, piece in small]

    def run(self) -> None:
        """Copy."""
        if self._to:
            torch._foreach_copy_(self._to, self._of)
        for place, piece in self._large:
            np.copyto(place, piece)


def _as_tensor(memory: Bytes) -> torch.Tensor:
    if memory.flags.writeable:
        return torch.from_numpy(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Found:
    """Takes the tensors and containers out of arguments."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.containers: list[object] = []

    def sketch(self, value: Any) -> Any:
        """What an argument is but for the values of its tensors.

        Raises:
            OpaqueError: that cannot be told.
        """
        cls = type(value)
        if cls in _PLAIN:
            return cls, value
        if cls is float:
            return cls, value.hex()
        if cls is tuple:
            return cls, [self.sketch(item) for item in value]
        if cls is list or cls is dict:
            if any(value is other for other in self.containers):
                raise OpaqueError
            if len(self.containers) > _MOST_CONTAINERS:
                raise OpaqueError
            self.containers.append(value)
            items = value if cls is list else value.items()
            return cls, [self.sketch(item) for item in items]
        if cls is torch.Tensor:
            if (
                not is_plain(value)
                or not value.is_contiguous()
                or value.__dict__
                or value.grad is not None
                or not value.numel()
            ):
                raise OpaqueError
            self.tensors.append(value)
            return value.dtype, value.shape, value.stride(), value.requires_grad
        if isinstance(value, nn.Module | Optimizer):
            return cls, id(value)
        raise OpaqueError


__all__ = ["OpaqueError", "Standing"]
