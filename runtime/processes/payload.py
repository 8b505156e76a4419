"""Python values with their tensors, as one pickle and one block of memory.

Functions and classes of ``__main__`` travel by value (cloudpickle). The memory of CPU tensors and
NumPy arrays leaves the pickle for an anonymous file (``memfd``: it has no name, so nothing can be
left behind) whose descriptor goes over a socket. A receiver maps the file *privately*: all
ranks read the same pages, and a rank that writes gets its own copy of the page, so no rank sees
what another does to an argument. Sharing inside one value survives: two views of one storage, or
one parameter used twice, arrive as that.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import tempfile
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
import torch

_ALIGN_BYTES = 64
_INLINE_BYTES = 32 * 1024  # below: in the message itself
_IN_BAND_BYTES = 1024  # arrays below stay in the pickle
_MAPPED_BYTES = 16 * 1024**2  # a mapping holds a descriptor for its life: small files are read


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One packed value.

    Attributes:
        num_bytes: size of the block.
        pickle_at: where in the block the pickle stands.
        buffers: (start, size) of the arrays' memory, in pickle order.
        inline: the block itself, or None if it is in a file.
    """

    num_bytes: int
    pickle_at: int
    buffers: tuple[tuple[int, int], ...]
    inline: bytes | None


class _Block:
    """Places pieces one after another, aligned."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, memoryview]] = []
        self.num_bytes = 0

    def add(self, piece: memoryview) -> int:
        start = -(-self.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.pieces.append((start, piece))
        self.num_bytes = start + piece.nbytes
        return start


def _named(filename: str, *parts: Any) -> CodeType:
    return CodeType(*parts).replace(co_filename=filename)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """As cloudpickle, which drops the file's name: tracebacks then quote the source."""
    _, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _named, (code.co_filename, *parts)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )

    def __init__(self, file: io.BytesIO, block: _Block) -> None:
        self.block = block
        self.buffers: list[tuple[int, int]] = []
        # Keyed by address; the storage is kept so that the address is not used again meanwhile.
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=self._array)

    def _array(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND_BYTES:
            return True
        self.buffers.append((self.block.add(raw), raw.nbytes))
        return False

    def persistent_id(self, value: object) -> object:
        if isinstance(value, torch.storage.TypedStorage):
            untyped, dtype = value._untyped_storage, value.dtype
        elif isinstance(value, torch.UntypedStorage):
            untyped, dtype = value, None
        else:
            return None
        if untyped.device.type != "cpu":
            return None
        num_bytes = untyped.nbytes()
        if num_bytes == 0:
            return 0, 0, dtype
        found = self.storages.get(untyped.data_ptr())
        if found is None:
            start = self.block.add(_memory(untyped))
            found = self.storages[untyped.data_ptr()] = start, untyped
        return found[0], num_bytes, dtype


def _memory(storage: torch.UntypedStorage) -> memoryview:
    with torch.no_grad():
        return _bytes(torch.empty(0, dtype=torch.uint8).set_(storage))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]


class _Unpickler(pickle.Unpickler):
    def __init__(self, block: memoryview, parcel: Parcel) -> None:
        self.block = block
        self.storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(
            io.BytesIO(block[parcel.pickle_at :]),
            buffers=[block[start : start + size] for start, size in parcel.buffers],
        )

    def persistent_load(self, pid: Any) -> object:
        start, num_bytes, dtype = pid
        if num_bytes == 0:
            storage = torch.empty(0, dtype=torch.uint8).untyped_storage()
        elif start in self.storages:
            storage = self.storages[start]
        else:
            tensor = torch.frombuffer(self.block, dtype=torch.uint8, offset=start, count=num_bytes)
            storage = self.storages[start] = tensor.untyped_storage()
        if dtype is None:
            return storage
        # As torch.load does: the public constructor would warn that the class is deprecated.
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=storage, dtype=dtype, _internal=True
        )


def anonymous_file(name: str) -> int:
    """Descriptor of a new file without a path."""
    if sys.platform == "linux":
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def pack(value: object) -> tuple[Parcel, int | None]:
    """The value as a parcel, and the descriptor of its block (the caller closes it) or None.

    Raises whatever pickling raises.
    """
    block, file = _Block(), io.BytesIO()
    pickler = _Pickler(file, block)
    pickler.dump(value)
    pickle_at = block.add(file.getbuffer())
    buffers = tuple(pickler.buffers)
    if block.num_bytes <= _INLINE_BYTES:
        inline = bytearray(block.num_bytes)
        for start, piece in block.pieces:
            inline[start : start + piece.nbytes] = piece
        return (
            Parcel(
                num_bytes=block.num_bytes,
                pickle_at=pickle_at,
                buffers=buffers,
                inline=bytes(inline),
            ),
            None,
        )
    fd = anonymous_file("autoshard")
    try:
        _write(fd, block.pieces)
    except BaseException:
        os.close(fd)
        raise
    return (
        Parcel(num_bytes=block.num_bytes, pickle_at=pickle_at, buffers=buffers, inline=None),
        fd,
    )


def _write(fd: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
    for start, piece in pieces:
        done = 0
        while done < piece.nbytes:  # the kernel writes at most 2 GiB at once
            done += os.pwrite(fd, piece[done:], start + done)


def unpack(parcel: Parcel, fd: int | None) -> Any:
    """The value of a parcel. Its tensors and arrays are writable and belong to this process.

    Closes nothing: ``fd`` stays the caller's.
    """
    if parcel.inline is not None:
        block = memoryview(bytearray(parcel.inline))
    elif fd is None:
        raise ValueError("the parcel's block is in a file, and no descriptor came")
    elif parcel.num_bytes >= _MAPPED_BYTES:
        block = memoryview(
            mmap.mmap(
                fd,
                parcel.num_bytes,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        )
    else:
        block = _bytes(torch.empty(parcel.num_bytes, dtype=torch.uint8))
        done = 0
        while done < parcel.num_bytes:
            got = os.preadv(fd, [block[done:]], done)
            if not got:
                raise EOFError(f"block of {parcel.num_bytes} bytes ends at {done}")
            done += got
    return _Unpickler(block, parcel).load()
