"""Calls on a pool through shared memory: what is as it was in the last call is not sent again.

A function that is called once a step is sent much the same each time: the same modules, with other
values in their tensors. So caller and ranks keep, for each function, a piece of shared memory::

    | tensors, from the caller | pieces, from rank 0 | pieces, from rank 1 | ...

and the rest of the call (function, modules without tensors, layouts) as one pickle. A call copies
all tensors into the first part, which costs less than to find out which of them changed and cannot
miss a change; the pickle goes along only where it is another than last time. Ranks leave what they
own in their parts, and say where it lies only where that is elsewhere than last time.

Every call finds objects as the pickle has them, whatever the body did to those of the last call: a
rank uses them again only where a snapshot says that they are what they were, with all values anew.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.runtime.processes import Pool, World
from autoshard.runtime.processes.payload import anonymous_file
from autoshard.runtime.spmd.ambient import Ambient
from autoshard.runtime.spmd.request import UNCHANGED, Changes, Reply, Request, carry_out
from autoshard.runtime.spmd.shipment import (
    Loose,
    Shipment,
    loosen,
    pack,
    unpack,
    unpack_with_memory,
)
from autoshard.runtime.spmd.snapshot import OpaqueError, Snapshot
from autoshard.runtime.watch.records import RankTrace

MOST_BYTES = 1 << 28
"""Calls with more than this in tensors go without shared memory, which would double what they take;
beside so many bytes the rest of a call is nothing."""

_HELD_BYTES = 1 << 25  # from here on ranks do not hold the objects of a call till the next one
_MOST_KEPT = 8  # functions whose memory a rank keeps
_ROOM_BYTES = 1 << 24  # for results, besides what the arguments take; pages are taken when used
_ALIGN_BYTES = 64

Bytes = NDArray[np.uint8]

Lie = tuple[int, int, torch.dtype, tuple[int, ...]]
"""Number of a piece, where it lies in a rank's part (-1: unchanged), dtype and local shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What goes to every rank.

    Attributes:
        key: of the memory.
        sizes: bytes of the first part, and of each rank's, where the memory is new.
        rest: the call without the bytes of its tensors; None: as last time.
        ambient: pickled; None: as last time.
        watch: whether to time, and to tell.
    """

    key: int
    sizes: tuple[int, int] | None
    rest: Loose | None
    ambient: bytes | None
    watch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What comes from a rank.

    Attributes:
        changes: packed, of rank 0; None: as last time.
        lies: where its pieces lie; None: as last time.
        pieces: those that found no room.
        trace: what was seen, if somebody watches.
    """

    changes: Shipment | None
    lies: tuple[Lie, ...] | None
    pieces: Shipment | None
    trace: RankTrace | None


def _map(descriptor: int, sizes: tuple[int, int], world_size: int) -> Bytes:
    """The shared memory, mapped; the mapping lives as long as the array."""
    num_bytes = sizes[0] + world_size * sizes[1]
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _views(part: torch.Tensor, lies: Sequence[Lie]) -> dict[int, torch.Tensor | str]:
    """The pieces in a rank's part."""
    found: dict[int, torch.Tensor | str] = {}
    for number, start, dtype, shape in lies:
        if start < 0:
            found[number] = UNCHANGED
        else:
            num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            found[number] = part[start : start + num_bytes].view(dtype).view(shape)
    return found


# ---- the caller's side ------------------------------------------------------------------------

_keys = itertools.count()


class Courier:
    """Carries the calls of one function; what ranks keep of them is known here.

    Hold ``lock`` from a call until its replies are read: they lie in the shared memory.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return Courier, ()  # memory stays where it is

    def _forget(self) -> None:
        self._memory: Bytes | None = None
        self._key, self._sizes = -1, (0, 0)
        self._of: tuple[object, int] | None = None  # pool and process
        self._rest: Loose | None = None
        self._ambient: Ambient | None = None
        self._lies: list[tuple[Lie, ...]] = []
        self._pieces: list[dict[int, torch.Tensor | str]] = []
        self._changes: Shipment | None = None

    def call(self, request: Request, rest: Loose, pool: Pool) -> list[Reply]:
        """Run a request on the ranks of a pool.

        Args:
            request: the call.
            rest: what :func:`loose` made of it.
            pool: of ranks.
        """
        descriptor: int | None = None
        if self._of != (pool, os.getpid()) or rest.num_bytes > self._sizes[0]:
            descriptor = self._renew(pool, rest.num_bytes)
        assert request.ambient is not None
        ambient = request.ambient
        try:
            answers = self._send(request, rest, ambient, pool, descriptor)
            if any(answer is None for answer in answers):  # ranks that do not know of it
                if descriptor is not None:
                    os.close(descriptor)
                    descriptor = None
                descriptor = self._renew(pool, rest.num_bytes)
                answers = self._send(request, rest, ambient, pool, descriptor)
        except BaseException:
            self._forget()
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._rest, self._ambient = rest, ambient
        return self._replies([answer for answer in answers if answer is not None])

    def _renew(self, pool: Pool, num_bytes: int) -> int:
        self._forget()
        first = _aligned(num_bytes + num_bytes // 4 + 1)
        sizes = first, _aligned(2 * num_bytes + _ROOM_BYTES)
        descriptor = anonymous_file("autoshard")
        try:
            os.ftruncate(descriptor, sizes[0] + pool.world_size * sizes[1])
            self._memory = _map(descriptor, sizes, pool.world_size)
        except BaseException:
            os.close(descriptor)
            raise
        self._key, self._sizes, self._of = next(_keys), sizes, (pool, os.getpid())
        parts = pool.world_size
        self._lies, self._pieces = [()] * parts, [{} for _ in range(parts)]
        return descriptor

    def _send(
        self, request: Request, rest: Loose, ambient: Ambient, pool: Pool, descriptor: int | None
    ) -> list[Answer | None]:
        assert self._memory is not None
        rest.copy_to(self._memory)
        order = Order(
            key=self._key,
            sizes=None if descriptor is None else self._sizes,
            rest=None if rest == self._rest else rest.without_memory(),
            ambient=None if ambient.equals(self._ambient) else cloudpickle.dumps(ambient),
            watch=request.watch,
        )
        return pool.call(
            execute_order, (order,), descriptors=() if descriptor is None else (descriptor,)
        )

    def _replies(self, answers: Sequence[Answer]) -> list[Reply]:
        replies: list[Reply] = []
        memory = torch.from_numpy(self._memory)
        for rank, answer in enumerate(answers):
            if answer.lies is not None:
                start = self._sizes[0] + rank * self._sizes[1]
                self._lies[rank] = answer.lies
                self._pieces[rank] = _views(memory[start : start + self._sizes[1]], answer.lies)
            pieces = self._pieces[rank]
            if answer.pieces is not None:
                pieces = {**pieces, **unpack(answer.pieces)}
            if answer.changes is not None:
                self._changes = answer.changes
            changes: Changes | None = None
            if rank == 0:
                assert self._changes is not None
                changes = unpack(self._changes)
            replies.append(Reply(changes=changes, pieces=pieces, trace=answer.trace))
        return replies


def loose(request: Request) -> Loose:
    """A request without what differs from call to call; raises whatever pickling raises."""
    return loosen(replace(request, ambient=None, watch=False))


# ---- a rank's side ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Kept:
    memory: Bytes
    part: torch.Tensor
    rest: Loose | None = None
    request: Request | None = None
    snapshot: Snapshot | None = None
    values: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    ambient: Ambient | None = None
    lies: tuple[Lie, ...] = ()
    views: list[torch.Tensor] = field(default_factory=list)
    changes: Shipment | None = None


_kept: dict[int, _Kept] = {}


def execute_order(world: World, order: Order) -> Answer | None:
    """Do what the order says; None where what it refers to is not known here."""
    kept = _kept.pop(order.key, None)
    if order.sizes is not None:
        memory = _map(world.descriptors[0], order.sizes, world.size)
        start = order.sizes[0] + world.rank * order.sizes[1]
        kept = _Kept(memory, torch.from_numpy(memory)[start : start + order.sizes[1]])
    if kept is None:
        return None
    _kept[order.key] = kept
    while len(_kept) > _MOST_KEPT:
        del _kept[next(iter(_kept))]
    if order.rest is not None:
        kept.rest = order.rest
    if order.ambient is not None:
        kept.ambient = cloudpickle.loads(order.ambient)
    assert kept.rest is not None
    request = _refilled(kept) if order.rest is None else None
    if request is None:
        request = _unpacked(kept, kept.rest)
    request = replace(request, ambient=kept.ambient, watch=order.watch)
    changes, pieces, trace = carry_out(world, request)
    return Answer(
        changes=_told(kept, changes) if world.rank == 0 else None,
        **_put(kept, pieces),
        trace=trace,
    )


def _refilled(kept: _Kept) -> Request | None:
    """The objects of the last call with the values of this one, if nothing happened to them."""
    if kept.request is None or kept.snapshot is None or not kept.snapshot.holds():
        return None
    own, sent = kept.values
    if own:
        with torch.no_grad():
            torch._foreach_copy_(own, sent)
    return kept.request


def _unpacked(kept: _Kept, rest: Loose) -> Request:
    kept.request, kept.snapshot, kept.values = None, None, ([], [])
    value, pieces = unpack_with_memory(rest.with_memory(kept.memory))
    request: Request = value
    if rest.num_bytes > _HELD_BYTES or request.gradients:
        return request
    try:
        kept.snapshot = Snapshot([request.function, request.bundle, request.tensors])
    except OpaqueError:
        return request
    memory = torch.from_numpy(kept.memory)
    sent = [memory[start : start + size] for start, size in rest.places if size]
    kept.request, kept.values = request, ([p for p in pieces if p.numel()], sent)
    return request


def _told(kept: _Kept, changes: Changes) -> Shipment | None:
    packed = pack(changes)
    plain = not packed.places and not packed.tensors
    before, kept.changes = kept.changes, packed if plain else None
    return None if plain and before is not None and before.data == packed.data else packed


def _put(kept: _Kept, pieces: dict[int, torch.Tensor | str]) -> dict[str, Any]:
    """Leave the pieces in this rank's part."""
    lies: list[Lie] = []
    values: list[torch.Tensor] = []
    rest: dict[int, torch.Tensor | str] = {}
    end = 0
    room = kept.part.numel()
    for number, piece in pieces.items():
        if isinstance(piece, str):
            lies.append((number, -1, torch.uint8, ()))
            continue
        start = _aligned(end)
        if start + piece.nbytes > room or piece.layout is not torch.strided or piece.is_quantized:
            rest[number] = piece
            continue
        end = start + piece.nbytes
        lies.append((number, start, piece.dtype, tuple(piece.shape)))
        values.append(piece.cpu() if piece.device.type != "cpu" else piece)
    found = tuple(lies)
    is_new = found != kept.lies or not kept.views
    if is_new:
        kept.lies = found
        kept.views = [v for v in _views(kept.part, found).values() if not isinstance(v, str)]
    if values:
        with torch.no_grad():
            torch._foreach_copy_(kept.views, values)
    return {"lies": found if is_new else None, "pieces": pack(rest) if rest else None}


__all__ = ["MOST_BYTES", "Courier", "Order", "execute_order", "loose"]
