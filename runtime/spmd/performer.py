"""Orders on a rank of the pool; see :mod:`courier`.

What is needed only by the next call is done once the answer is sent, while the caller reads it and
prepares that call: putting the objects back, finding out whether they are what they were, and
cutting them again. If the next order is one like the last, all that is left is to write the values
of its tensors into the shards, straight from the shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import torch

from autoshard.runtime.eager.body import Body
from autoshard.runtime.processes import World
from autoshard.runtime.shards import view_shard
from autoshard.runtime.spmd.ambient import Ambient
from autoshard.runtime.spmd.habit import Habit
from autoshard.runtime.spmd.orders import (
    UNKNOWN,
    Answer,
    Bytes,
    Lie,
    Order,
    Plain,
    aligned,
    mapped,
    views_of,
)
from autoshard.runtime.spmd.request import Changes, Request, carry_out, owned, prepare
from autoshard.runtime.spmd.shipment import Loose, Shipment, pack, unpack_with_memory
from autoshard.runtime.spmd.snapshot import OpaqueError, Snapshot
from autoshard.sharding.layout import P

_HELD_BYTES = 1 << 25  # from here on ranks do not hold the objects of a call till the next one
_MOST_KEPT = 8  # functions whose memory a rank keeps
_MOST_MISSES = 3  # from then on objects are put back after each call


@dataclass(slots=True)
class _Held:
    """The objects of a call, as long as they are what they were.

    Attributes:
        request: the call.
        snapshot: of its objects.
        own: the memory of its tensors.
        sent: where the same lies in the shared memory.
        tensors: by ``id`` of a tensor where its values lie in the shared memory.
        keep: the tensors, so that no number is used again.
        is_all_tensors: whether no other memory, of arrays, was sent.
        entry: how the objects were last entered for a call to come.
        misses: how often something else was found there afterwards.
    """

    request: Request
    snapshot: Snapshot
    own: list[torch.Tensor]
    sent: list[torch.Tensor]
    tensors: dict[int, torch.Tensor]
    keep: list[torch.Tensor]
    is_all_tensors: bool
    entry: _Entry | None = None
    misses: int = 0

    def taken(self) -> Snapshot | None:
        """A snapshot of the objects as they are now."""
        try:
            return Snapshot([self.request.function, self.request.bundle, self.request.tensors])
        except OpaqueError:
            return None

    def refill(self) -> None:
        """Write the values that were sent into the objects."""
        if self.own:
            with torch.no_grad():
                torch._foreach_copy_(self.own, self.sent)


@dataclass(slots=True)
class _Kept:
    """What is kept for one function.

    Attributes:
        memory: shared with the caller.
        part: this rank's part of it.
    """

    memory: Bytes
    part: torch.Tensor
    rest: Loose | None = None
    held: _Held | None = None
    ambient: Ambient | None = None
    lies: tuple[Lie, ...] = ()
    views: list[torch.Tensor] = field(default_factory=list)
    plain: Plain | None = None
    changes: Shipment | None = None
    habit: Habit | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """Objects that are entered before a call.

    Attributes:
        body: which they are entered for.
        sent: of each shard where its values lie in the shared memory.
        snapshot: of the objects as they are then; None where none can be taken.
    """

    body: Body
    sent: list[torch.Tensor]
    snapshot: Snapshot | None

    def fill(self) -> None:
        """Write the values that were sent into the shards."""
        if self.sent:
            with torch.no_grad():
                torch._foreach_copy_([e.shard for e in self.body.entered], self.sent)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A call that is entered before it is ordered, as call ``number`` of the pool."""

    number: int
    kept: _Kept
    entry: _Entry


_kept: dict[int, _Kept] = {}
_ready: _Ready | None = None


def execute_order(world: World, order: Order) -> Answer | str | None:
    """Do what the order says.

    None is the answer where a call left what the last one did, but for values, which are in their
    places; :data:`UNKNOWN` where what the order refers to is not known here.
    """
    global _ready
    kept = _kept.pop(order.key, None)
    if order.sizes is not None:
        memory = mapped(world.descriptors[0], order.sizes, world.size)
        start = order.sizes[0] + world.rank * order.sizes[1]
        kept = _Kept(memory, torch.from_numpy(memory)[start : start + order.sizes[1]])
    ready, _ready = _ready, None
    fits = order.rest is None and ready is not None and ready.kept is kept
    if ready is not None and not (fits and ready.number == world.number):
        ready.entry.body.close()
        ready = None
    if kept is None:
        return UNKNOWN
    _kept[order.key] = kept
    while len(_kept) > _MOST_KEPT:
        del _kept[next(iter(_kept))]
    if order.ambient is not None:
        kept.ambient = cloudpickle.loads(order.ambient)
    assert kept.ambient is not None
    wholes: Mapping[int, torch.Tensor] | None = None
    is_same: Callable[[], bool] | None = None
    habit, kept.habit = kept.habit, None
    if ready is not None and kept.held is not None:
        if order.ambient is not None:
            kept.ambient.enter()
        ready.entry.fill()
        request, body, wholes = kept.held.request, ready.entry.body, kept.held.tensors
        if ready.entry.snapshot is not None:
            is_same = ready.entry.snapshot.holds
    else:
        request = _request(kept, order.rest)
        request = replace(request, ambient=kept.ambient)
        body = prepare(world, request)
        habit = None
    request = replace(request, ambient=kept.ambient, watch=order.watch)
    if habit is not None:
        habit.begin()
    outcome = carry_out(world, request, body, wholes=wholes, is_same=is_same)
    assert world.later is not None
    if habit is not None and habit.body is body and habit.is_kept(outcome, kept.ambient):
        kept.habit = habit
        world.later(lambda: _get_ready(world, kept, body))
        return Answer(written=habit.written) if habit.leave(outcome) else None
    changes, pieces = owned(request, body, outcome, compare=kept.held is None)
    told = _told(kept, changes) if world.rank == 0 else {}
    answer = Answer(**told, **_put(kept, pieces), trace=outcome.trace)

    def later() -> None:
        _get_ready(world, kept, body)
        if _ready is not None and _ready.entry.body is body and answer.pieces is None:
            views = views_of(kept.part, kept.lies)
            kept.habit = Habit.of(body, outcome, changes, views, is_teller=world.rank == 0)

    world.later(later)
    return answer


def _request(kept: _Kept, rest: Loose | None) -> Request:
    """The objects of the last call with the values of this one, if nothing happened to them."""
    if rest is not None:
        kept.rest = rest
    elif kept.held is not None and kept.held.snapshot.holds():
        kept.held.refill()
        return kept.held.request
    assert kept.rest is not None
    return _unpacked(kept, kept.rest)


def _unpacked(kept: _Kept, rest: Loose) -> Request:
    kept.held = None
    value, pieces, tensors = unpack_with_memory(rest.with_memory(kept.memory))
    request: Request = value
    if rest.num_bytes > _HELD_BYTES or request.gradients:
        return request
    try:
        snapshot = Snapshot([request.function, request.bundle, request.tensors])
    except OpaqueError:
        return request
    memory = torch.from_numpy(kept.memory)
    kept.held = _Held(
        request,
        snapshot,
        [piece for piece in pieces if piece.numel()],
        [memory[start : start + size] for start, size in rest.places if size],
        {id(t): sent for t, sent in zip(tensors, rest.tensors_in(kept.memory), strict=True)},
        tensors,
        {piece for piece, *_ in rest.tensors} >= set(range(len(rest.places))),
    )
    return request


def _get_ready(world: World, kept: _Kept, body: Body) -> None:
    """Put the objects of a call back, and enter them again for one like it.

    Where all that a call did to them was to write values, they can stay as they are.
    """
    global _ready
    held = kept.held
    entry = None if held is None else held.entry
    if held is not None and entry is not None and entry.body is body and entry.snapshot is not None:
        if body.rewind(entry.snapshot.holds):
            assert kept.ambient is not None
            kept.ambient.enter()
            _ready = _Ready(world.number + 1, kept, entry)
            return
        held.misses += 1
    decisions = body.decisions()
    body.close()
    if held is None or not held.is_all_tensors or not held.snapshot.holds():
        return
    held.entry = None
    body = prepare(world, replace(held.request, ambient=kept.ambient))
    sent = _sent_shards(held, body)
    if sent is None:
        body.close()
    else:
        body.decide(decisions)
        held.entry = _Entry(body, sent, held.taken() if held.misses < _MOST_MISSES else None)
        _ready = _Ready(world.number + 1, kept, held.entry)


def _sent_shards(held: _Held, body: Body) -> list[torch.Tensor] | None:
    """Of each shard where its values lie in the shared memory; None if that leaves some out."""
    if {id(entered.given) for entered in body.entered} != held.tensors.keys():
        return None
    comm = body.engine.comm
    found: list[torch.Tensor] = []
    for entered in body.entered:
        whole = held.tensors[id(entered.given)]
        shard = view_shard(whole, entered.layout, comm.mesh, comm.coordinate)
        is_view = shard.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        if not is_view or P in entered.layout:
            return None
        found.append(shard)
    return found


def _told(kept: _Kept, changes: Changes) -> dict[str, Any]:
    """What of the changes is another than last time."""
    plain = Plain.of(changes)
    nothing: dict[int, int] = {}
    packed = pack(
        replace(
            changes,
            lies=(),
            modules=(),
            tensors=nothing,
            tensor_gradients=nothing,
            captured=nothing,
        )
    )
    known = kept.changes is not None and packed.data == kept.changes.data
    kept.changes = None if packed.places or packed.tensors else packed
    same, kept.plain = plain == kept.plain, plain
    return {
        "plain": None if same else plain,
        "changes": None if known and kept.changes is not None else packed,
    }


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
        start = aligned(end)
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
        kept.views = [v for v in views_of(kept.part, found).values() if not isinstance(v, str)]
    if values:
        with torch.no_grad():
            torch._foreach_copy_(kept.views, values)
    return {"lies": found if is_new else None, "pieces": pack(rest) if rest else None}


__all__ = ["execute_order"]
