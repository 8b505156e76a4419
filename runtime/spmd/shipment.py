"""A call, or what came of it, as one pickle and a few blocks of memory.

The pool's parcels carry any value. A call has hundreds of small tensors, of which each costs a
parcel some 50 us; here plain tensors leave the pickle as numbers, and small ones share one block.
Tensors that share memory still do so afterwards.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from autoshard.runtime.processes.payload import _Pickler as _WithFileNames

_ALIGN_BYTES = 64
_LARGE_BYTES = 1 << 16  # from here on a piece of memory is not copied into the block
_IN_BAND_BYTES = 1024
_PLAIN = (torch.Tensor, nn.Parameter)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shipment:
    """A packed value.

    Attributes:
        data: the pickle.
        block: memory of all small pieces.
        places: of each piece its start in the block and its size; of a large one -1 and its number.
        large: memory of large pieces.
        tensors: of each tensor (piece, dtype, offset, shape, stride, class, requires_grad).
    """

    data: bytes
    block: Bytes
    places: tuple[tuple[int, int], ...]
    large: tuple[Bytes, ...]
    tensors: tuple[tuple[Any, ...], ...]

    def modules(self) -> list[str]:
        """Modules that the pickle names, those of torch and of the program itself left out."""
        return _modules(self.data)


def _modules(data: bytes) -> list[str]:
    names: dict[str, None] = {}
    for opcode, argument, _ in pickletools.genops(data[4 + int.from_bytes(data[:4], "little") :]):
        if "UNICODE" in opcode.name and isinstance(argument, str) and argument in sys.modules:
            names[argument] = None
    return [n for n in names if n not in ("__main__", "builtins") and n[:6] != "torch."]


@lru_cache(maxsize=1)
def _dispatch_table(_size: int) -> dict[type, Any]:
    """The table of parcels in one piece; it is asked for every object."""
    return dict(_WithFileNames.dispatch_table)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        self.dispatch_table = _dispatch_table(len(copyreg.dispatch_table))
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=self._take_buffer)
        self.pieces: list[tuple[Bytes, object]] = []  # and what keeps the memory
        self.tensors: list[tuple[Any, ...]] = []
        self.found: list[torch.Tensor] = []
        self._by_address: dict[int, int] = {}
        self._buffers: list[int] = []

    def reducer_override(self, value: Any) -> Any:
        if type(value) in _PLAIN and is_plain(value):
            number = len(self.tensors)
            self.found.append(value)
            self.tensors.append(
                (
                    self._storage(value),
                    value.dtype,
                    value.storage_offset(),
                    tuple(value.shape),
                    value.stride(),
                    _PLAIN.index(type(value)),
                    value.requires_grad,
                )
            )
            attributes = value.__dict__
            if attributes:
                return _tensor, (number,), dict(attributes), None, None, _set_attributes
            return _tensor, (number,)
        return super().reducer_override(value)

    def _storage(self, value: torch.Tensor) -> int:
        storage = value.untyped_storage()
        address = storage.data_ptr()
        if address == 0:
            return -1
        found = self._by_address.get(address)
        if found is None:
            found = self._by_address[address] = len(self.pieces)
            with torch.no_grad():
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.pieces.append((flat.numpy(), storage))
        return found

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND_BYTES:
            return True
        self._buffers.append(len(self.pieces))
        self.pieces.append((np.frombuffer(raw, np.uint8), buffer))
        return False


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is all said by its memory, shape and dtype."""
    return (
        value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_inference()
        and not value._backward_hooks
        and (value.is_leaf or not value.requires_grad)
    )


def _set_attributes(value: torch.Tensor, attributes: dict[str, Any]) -> None:
    value.__dict__.update(attributes)


_unpacked: list[Sequence[torch.Tensor]] = []


def _tensor(number: int) -> torch.Tensor:
    return _unpacked[-1][number]


@dataclass(frozen=True, slots=True)
class Loose:
    """A packed value whose memory is still where it was.

    Two are equal if they differ in the bytes of tensors and arrays alone.

    Attributes:
        data: the pickle.
        places: of each piece of memory its start in a block, and its size.
        tensors: see :class:`Shipment`.
        num_bytes: of the block.
        memory: the pieces.
        addresses: where they are, with their numbers.
    """

    data: bytes
    places: tuple[tuple[int, int], ...]
    tensors: tuple[tuple[Any, ...], ...]
    num_bytes: int
    memory: tuple[Bytes, ...] = field(compare=False, repr=False)
    addresses: Mapping[int, int] = field(default_factory=dict, compare=False, repr=False)

    def copy_to(self, block: Bytes) -> None:
        """Copy the pieces to their places."""
        for memory, (start, size) in zip(self.memory, self.places, strict=True):
            np.copyto(block[start : start + size], memory)

    def without_memory(self) -> Loose:
        """The same, to be sent."""
        return replace(self, memory=(), addresses={})

    def pieces_of(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        """Of each tensor the number of its piece, if no other tensor of the value lies in it."""
        users = Counter(piece for piece, *_ in self.tensors)
        found = [self.addresses.get(t.untyped_storage().data_ptr()) for t in tensors]
        return [piece if users[piece] == 1 else None for piece in found]

    def with_memory(self, block: Bytes) -> Shipment:
        """With pieces that lie in ``block``."""
        return Shipment(self.data, block, self.places, (), self.tensors)

    def tensors_in(self, block: Bytes) -> list[torch.Tensor]:
        """Its tensors as they lie in ``block``: they share its memory."""
        storage = torch.from_numpy(block).untyped_storage()
        found: list[torch.Tensor] = []
        for piece, dtype, offset, shape, stride, _, _ in self.tensors:
            start = self.places[piece][0] // dtype.itemsize + offset if piece >= 0 else 0
            found.append(torch.empty(0, dtype=dtype).set_(storage, start, shape, stride))
        return found

    def modules(self) -> list[str]:
        """See :meth:`Shipment.modules`."""
        return _modules(self.data)


def _pickled(value: object) -> tuple[_Pickler, bytes]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    # Buffers of the pickle are named by what they are: pieces after, or between, those of tensors.
    header = pickle.dumps(tuple(pickler._buffers))
    return pickler, len(header).to_bytes(4, "little") + header + file.getvalue()


def loosen(value: object) -> Loose:
    """Pack a value, but for its memory; raises whatever pickling raises."""
    pickler, data = _pickled(value)
    pieces = [memory for memory, _ in pickler.pieces]
    tensors = pickler.tensors
    users = Counter(piece for piece, *_ in tensors)
    for number, (of, found) in enumerate(zip(tensors, pickler.found, strict=True)):
        piece, dtype, _, *others = of
        # A batch cut from a long tensor does not take all of it along.
        if users[piece] == 1 and piece >= 0 and found.is_contiguous():
            pieces[piece] = memory_of(found)
            tensors[number] = (piece, dtype, 0, *others)
    places: list[tuple[int, int]] = []
    end = 0
    for memory in pieces:
        start = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        places.append((start, memory.nbytes))
        end = start + memory.nbytes
    return Loose(data, tuple(places), tuple(tensors), end, tuple(pieces), dict(pickler._by_address))


def memory_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor."""
    out: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return out


def pack(value: object) -> Shipment:
    """Pack a value; raises whatever pickling raises."""
    pickler, data = _pickled(value)
    places: list[tuple[int, int]] = []
    large: list[Bytes] = []
    end = 0
    for memory, _ in pickler.pieces:
        if memory.nbytes >= _LARGE_BYTES:
            places.append((-1, len(large)))
            large.append(memory if memory.flags.writeable else memory.copy())
        else:
            start = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
            places.append((start, memory.nbytes))
            end = start + memory.nbytes
    block = np.empty(end, np.uint8)
    for (memory, _), (start, size) in zip(pickler.pieces, places, strict=True):
        if start >= 0:
            block[start : start + size] = memory
    return Shipment(data, block, tuple(places), tuple(large), tuple(pickler.tensors))


def unpack(shipment: Shipment) -> Any:
    """The value. Its tensors and arrays are writable; small ones have memory of their own."""
    return unpack_with_memory(shipment)[0]


def unpack_with_memory(
    shipment: Shipment,
) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """The value, the bytes of each piece of its memory, and its tensors."""
    block = torch.from_numpy(shipment.block)
    storages: list[torch.Tensor] = [
        torch.from_numpy(shipment.large[size])
        if start < 0
        else block.narrow(0, start, size).clone()
        for start, size in shipment.places
    ]
    tensors: list[torch.Tensor] = []
    with torch.no_grad():
        for piece, dtype, offset, shape, stride, kind, requires_grad in shipment.tensors:
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            if piece >= 0:
                tensor.set_(storages[piece].untyped_storage(), offset, shape, stride)
            else:
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
            if kind:
                tensor = _PLAIN[kind](tensor)
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            tensors.append(tensor)
    length = int.from_bytes(shipment.data[:4], "little")
    buffers = [storages[piece].numpy() for piece in pickle.loads(shipment.data[4 : 4 + length])]
    _unpacked.append(tensors)
    try:
        value = pickle.loads(memoryview(shipment.data)[4 + length :], buffers=buffers)
        return value, storages, tensors
    finally:
        _unpacked.pop()
