"""Collectives over the axes of a mesh: the one file that calls ``torch.distributed``'s.

A :class:`Communicator` holds one process group for each set of axes. It runs on real groups, and
on torch's ``fake`` backend, where one process plays one rank of a world of any size
(:func:`dry_run`). Buffers are contiguous and of equal size on all ranks of a group; padding is
the business of :mod:`autoshard.runtime.moves`.

Every wait has a limit: the time limit of the group, after which the collective raises.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, product
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist

from autoshard.errors import MeshError, RequestError
from autoshard.runtime.pairs import MOST_BYTES, Pair, connect
from autoshard.runtime.processes.world import DEFAULT_TIMEOUT_S, current_world
from autoshard.sharding.collective import Collective, CollectiveOp, Phase
from autoshard.sharding.layout import Shape, coordinate_of

Reduction = Literal["sum", "max", "min"]

# Names since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# What every backend moves; all else moves as bytes.
_MOVED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Record:
    """One collective that was issued, and when.

    Attributes:
        collective: what was issued.
        start_s: when, by ``time.perf_counter``.
        duration_s: until it was waited for (of an asynchronous one: not until it was done).
    """

    collective: Collective
    start_s: float
    duration_s: float


class Recorder:
    """Keeps what a communicator issues, in the order of issue."""

    def __init__(self) -> None:
        self._started: list[tuple[Collective, float]] = []
        self._seconds: dict[int, float] = {}

    def start(self, collective: Collective, result: torch.Tensor) -> int:
        """Note a collective as issued now, into ``result``; the number is for :meth:`finish`."""
        self._started.append((collective, time.perf_counter()))
        return len(self._started) - 1

    def finish(self, number: int) -> None:
        """Note that a collective was waited for."""
        if number not in self._seconds and number < len(self._started):
            self._seconds[number] = time.perf_counter() - self._started[number][1]

    @property
    def records(self) -> list[Record]:
        """What was issued so far; the duration of what nobody waited for yet is 0."""
        return [
            Record(collective, start, self._seconds.get(number, 0.0))
            for number, (collective, start) in enumerate(self._started)
        ]

    @property
    def collectives(self) -> list[Collective]:
        """What was issued so far, without times."""
        return [collective for collective, _ in self._started]

    def clear(self) -> None:
        """Forget everything; nothing may be under way."""
        self._started.clear()
        self._seconds.clear()


class Pending:
    """A collective under way."""

    __slots__ = ("_number", "_recorder", "_result", "_work")

    def __init__(
        self, result: torch.Tensor, work: Any, recorder: Recorder | None, number: int
    ) -> None:
        self._result, self._work = result, work
        self._recorder, self._number = recorder, number

    def wait(self) -> torch.Tensor:
        """The result, once it is there; raises after the group's time limit."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._recorder is not None:
            self._recorder.finish(self._number)
        return self._result


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
_pairs: dict[tuple[int, ...], Pair | None] = {}  # of those groups that are two local processes
_groups_of: object = None  # the default group they belong to
_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _release_groups() -> None:
    """Let go of every group before the interpreter goes.

    A gloo thread drops the tensors of its last message after that message is waited for, and takes
    the interpreter's lock to do so. A group that nobody holds joins its threads when torch destroys
    it; one that somebody holds leaves them running, and a thread that asks for the lock of an
    interpreter that is being finalised aborts the process.
    """
    global _groups_of
    for communicator in _communicators:
        communicator._by_axes.clear()
    _groups.clear()
    _close_pairs()
    _groups_of = None


def _close_pairs() -> None:
    for pair in _pairs.values():
        if pair is not None:
            pair.close()
    _pairs.clear()


def _group(ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    """The group of these ranks, made by its members only, once in the life of the default group."""
    global _groups_of
    if _groups_of is not dist.group.WORLD:
        _groups.clear()
        _close_pairs()
        _groups_of = dist.group.WORLD
    found = _groups.get(ranks)
    if found is None:
        if len(ranks) == dist.get_world_size():
            assert dist.group.WORLD is not None
            found = dist.group.WORLD
        else:
            found = dist.new_group(
                list(ranks), timeout=timeout, use_local_synchronization=not _is_fake()
            )
        _groups[ranks] = found
    return found


def _is_fake() -> bool:
    return str(dist.get_backend()) == "fake"


class Communicator:
    """Collectives over the axes of one mesh, as this rank takes part in them.

    Ranks lie on the mesh row-major. Build it on every rank, in the same order as other meshes:
    groups are made here (on the fake backend: at first use).

    Args:
        mesh: axis sizes; their product is the world's size.
        axis_names: one name an axis.
        recorder: takes what is issued; None costs nothing.
        device: where this rank computes; None: as the world says, and CPU in a dry run.
        timeout_s: limit of each collective; None: the world's.

    Attributes:
        mesh: axis sizes.
        axis_names: one name an axis.
        device: where this rank computes.
        rank: this rank.
        coordinate: this rank's place on each axis.
        recorder: may be set and reset at any time.

    Raises:
        MeshError: the mesh does not have one device for each rank.
    """

    def __init__(
        self,
        mesh: Shape,
        axis_names: Sequence[str],
        recorder: Recorder | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RequestError(
                "a communicator needs a process group: run in a rank of a pool, under torchrun, "
                "or in dry_run()"
            )
        self.mesh, self.axis_names, self.recorder = tuple(mesh), tuple(axis_names), recorder
        if len(self.axis_names) != len(self.mesh):
            raise MeshError(f"{len(self.mesh)} axes, and names for {len(self.axis_names)}")
        size = dist.get_world_size()
        if prod(self.mesh) != size:
            raise MeshError(
                f"a mesh of {' x '.join(map(str, self.mesh))} has {prod(self.mesh)} devices, "
                f"and {size} processes run"
            )
        world = None if _is_fake() else current_world()
        if device is None:
            device = "cpu" if world is None else world.device
        if timeout_s is None:
            timeout_s = DEFAULT_TIMEOUT_S if world is None else world.timeout_s
        self.device = torch.device(device)
        self.rank = dist.get_rank()
        self.coordinate = coordinate_of(self.rank, self.mesh)
        self._timeout = timedelta(seconds=timeout_s)
        self._by_axes: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        _communicators.add(self)
        self._pairs: dict[tuple[int, ...], Pair | None] = {}
        self._names: dict[tuple[int, ...], tuple[str, ...]] = {}
        if not _is_fake():
            axes = range(len(self.mesh))
            for count in range(1, len(self.mesh) + 1):
                for subset in combinations(axes, count):
                    self.group(subset)
                    if world is not None and world.is_local and self.size(subset) == 2:
                        self._pairs[subset] = self._pair(subset)

    def group(self, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
        """This rank's group over ``axes`` (ascending), row-major in them; None for one rank."""
        try:
            return self._by_axes[axes]
        except KeyError:
            pass
        if list(axes) != sorted(set(axes)) or not all(0 <= a < len(self.mesh) for a in axes):
            raise MeshError(f"axes {axes} are not ascending indices of {self.axis_names}")
        ranks = self.ranks(axes)
        found = self._by_axes[axes] = _group(ranks, self._timeout) if len(ranks) > 1 else None
        return found

    def _pair(self, axes: tuple[int, ...]) -> Pair | None:
        """What joins the two ranks of a group over ``axes``, made once as the group is."""
        ranks = self.ranks(axes)
        if ranks not in _pairs:
            (other,) = (rank for rank in ranks if rank != self.rank)

            def share(data: bytes) -> bytes:
                box = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                dist.broadcast(box, group=self.group(axes), group_src=0)
                return box.numpy().tobytes()

            _pairs[ranks] = connect(self.rank, other, self._timeout.total_seconds(), share)
        return _pairs[ranks]

    def ranks(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The ranks that differ from this one on ``axes`` only, row-major, this one included."""
        strides = [prod(self.mesh[axis + 1 :]) for axis in range(len(self.mesh))]
        base = sum(
            self.coordinate[axis] * strides[axis]
            for axis in range(len(self.mesh))
            if axis not in axes
        )
        return tuple(
            base + sum(i * strides[axis] for i, axis in zip(place, axes, strict=True))
            for place in product(*(range(self.mesh[axis]) for axis in axes))
        )

    def size(self, axes: Sequence[int]) -> int:
        """How many ranks a group over ``axes`` has."""
        return prod([self.mesh[axis] for axis in axes])  # a list: torch.compile takes it whole

    # ---- collectives ----

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Reduction,
        axes: tuple[int, ...],
        phase: Phase = "forward",
        value: str = "",
    ) -> torch.Tensor:
        """Reduce ``tensor`` over ``axes`` in place, and return it."""
        return self.start("all_reduce", tensor, axes, reduction=op, phase=phase, value=value).wait()

    def all_gather(
        self,
        buffer: torch.Tensor,
        axes: tuple[int, ...],
        phase: Phase = "forward",
        value: str = "",
    ) -> torch.Tensor:
        """The buffers of all ranks of the group: ``[group, *buffer.shape]``."""
        return self.start("all_gather", buffer, axes, phase=phase, value=value).wait()

    def reduce_scatter(
        self,
        buffer: torch.Tensor,
        axes: tuple[int, ...],
        phase: Phase = "forward",
        value: str = "",
    ) -> torch.Tensor:
        """Of ``buffer``, ``[group, ...]``, the own row summed: ``[...]``."""
        return self.start("reduce_scatter", buffer, axes, phase=phase, value=value).wait()

    def all_to_all(
        self,
        buffer: torch.Tensor,
        axes: tuple[int, ...],
        phase: Phase = "forward",
        value: str = "",
    ) -> torch.Tensor:
        """Send row ``i`` of ``buffer``, ``[group, ...]``, to rank ``i``; rows by their sender."""
        return self.start("all_to_all", buffer, axes, phase=phase, value=value).wait()

    def shift(self, buffer: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """Send ``buffer`` to the next member of the group, and what the one before it sent."""
        group, ranks = self.group(axes), self.ranks(axes)
        if group is None:
            return buffer
        place, result = ranks.index(self.rank), torch.empty_like(buffer)
        following, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        pending = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, buffer, following, group),
                dist.P2POp(dist.irecv, result, before, group),
            ]
        )
        for work in pending:
            work.wait()
        return result

    def gathered(self, value: object) -> list[Any]:
        """What each rank of the world gave, in the order of ranks, on every rank."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def start(
        self,
        op: CollectiveOp,
        buffer: torch.Tensor,
        axes: tuple[int, ...],
        *,
        reduction: Reduction = "sum",
        phase: Phase = "forward",
        value: str = "",
        async_op: bool = False,
    ) -> Pending:
        """Issue a collective; shapes as for the method of its name.

        Args:
            op: which one.
            buffer: contiguous; ``all_reduce`` writes into it, the others do not.
            axes: ascending indices of the mesh axes whose ranks take part.
            reduction: how an all_reduce or a reduce_scatter combines.
            phase: for the recorder.
            value: for the recorder.
            async_op: whether to return before it is done; ``buffer`` must be left alone till then.
        """
        group = self.group(axes)
        size = 1 if group is None else self.size(axes)
        if op == "all_gather":
            result = buffer.new_empty((size, *buffer.shape))
        elif op == "reduce_scatter":
            result = buffer.new_empty(buffer.shape[1:])
        elif op == "all_to_all":
            result = torch.empty_like(buffer)
        else:
            result = buffer
        if group is None:  # one rank: nothing is sent, nothing is recorded
            if op != "all_reduce":
                result.copy_(buffer.view(result.shape))
            return Pending(result, None, None, 0)
        number = 0
        if self.recorder is not None:
            collective = self._collective(op, buffer, result, axes, phase, value)
            number = self.recorder.start(collective, result)
        work: Any = None
        pair = self._pairs.get(axes)
        if pair is not None and _suits_a_pair(buffer, async_op):
            work = _exchange(pair, op, buffer, result, int(self.rank > pair.other), reduction)
        elif buffer.numel():  # all ranks of a group agree on the size
            work = _issue(op, buffer, result, group, size, reduction, async_op)
        pending = Pending(result, work, self.recorder, number)
        if not async_op:
            pending.wait()
        return pending

    def _collective(
        self,
        op: CollectiveOp,
        buffer: torch.Tensor,
        result: torch.Tensor,
        axes: tuple[int, ...],
        phase: Phase,
        value: str,
    ) -> Collective:
        names = self._names.get(axes)
        if names is None:
            names = self._names[axes] = tuple(self.axis_names[axis] for axis in axes)
        counted = result if op == "all_gather" else buffer
        return Collective(op, names, counted.numel() * counted.element_size(), phase, value)


def _suits_a_pair(buffer: torch.Tensor, async_op: bool) -> bool:
    """Large ones beside computing are for gloo's threads; what torch.func wraps has no memory."""
    return (
        buffer.nbytes > 0
        and (buffer.nbytes <= MOST_BYTES or not async_op)
        and buffer.device.type == "cpu"
        and (buffer.dtype in _MOVED or buffer.dtype.is_complex)
        and not torch._C._functorch.is_functorch_wrapped_tensor(buffer)
    )


def _exchange(
    pair: Pair,
    op: CollectiveOp,
    buffer: torch.Tensor,
    result: torch.Tensor,
    place: int,
    reduction: Reduction,
) -> Any:
    """Issue a collective of two local ranks, of which this one is number ``place``."""
    buffer = buffer.detach()
    if op == "all_reduce":
        return pair.start(_flat(buffer), _flat(buffer), reduction)
    other = 1 - place
    if op == "all_gather":
        result[place] = buffer
        return pair.start(_flat(buffer), _flat(result[other]), "copy")
    if op == "reduce_scatter":
        result.copy_(buffer[place])
        return pair.start(_flat(buffer[other]), _flat(result), reduction)
    result[place] = buffer[place]
    return pair.start(_flat(buffer[other]), _flat(result[other]), "copy")


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    if not buffer.is_contiguous():
        raise ValueError(f"a collective needs a contiguous buffer; strides {buffer.stride()}")
    return (torch.view_as_real(buffer) if buffer.dtype.is_complex else buffer).view(-1)


def _issue(
    op: CollectiveOp,
    buffer: torch.Tensor,
    result: torch.Tensor,
    group: dist.ProcessGroup,
    size: int,
    reduction: Reduction,
    async_op: bool,
) -> Any:
    """Issue on flat buffers; the work, or None if it is done."""
    reduces = op in ("all_reduce", "reduce_scatter")
    given, out = _flat(buffer), _flat(result)
    if not reduces and given.dtype not in _MOVED:
        given, out = given.view(torch.uint8), out.view(torch.uint8)
    if op == "all_reduce":
        return dist.all_reduce(given, _REDUCE[reduction], group, async_op)
    if op == "all_gather":
        return _all_gather(out, given, group, async_op)
    if op == "reduce_scatter":
        return _reduce_scatter(out, given, _REDUCE[reduction], group, async_op)
    return dist.all_to_all_single(out, given, group=group, async_op=async_op)


@contextmanager
def dry_run(world_size: int, rank: int = 0) -> Iterator[None]:
    """Play rank ``rank`` of a world of any size in this process: collectives move nothing.

    Results have the right shapes and no meaning. Not where a process group is up already.
    """
    # Importing it registers the backend; torch offers no public way.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RequestError("a dry run needs a process of its own: a process group is up here")
    dist.init_process_group(
        "fake",
        rank=rank,
        world_size=world_size,
        store=FakeStore(),
    )
    try:
        yield
    finally:
        _groups.clear()
        dist.destroy_process_group()
