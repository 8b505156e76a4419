"""One call of an @spmd function on one rank: what goes there, what is done, what comes back."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from autoshard.runtime.comm import Communicator
from autoshard.runtime.eager.body import (
    Body,
    BodyResult,
    EagerOptions,
    Objects,
    Piece,
    objects_of,
)
from autoshard.runtime.processes import World
from autoshard.runtime.shards import take_shard
from autoshard.runtime.spmd.ambient import Ambient, Generators, changed_generators
from autoshard.runtime.spmd.shipment import Shipment, pack, unpack
from autoshard.runtime.spmd.specs import OutLayouts
from autoshard.runtime.watch.recording import (
    MemoryWatch,
    TimedCommunicator,
    TimedRecorder,
    clock_offset_s,
    named_spans,
)
from autoshard.runtime.watch.records import RankTrace
from autoshard.sharding.layout import Layout, R, Shape, forward_half
from autoshard.sharding.mesh import DeviceMesh

Tensors = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that a rank needs.

    Attributes:
        function: called with ``args`` and ``kwargs``.
        args: whole.
        kwargs: whole.
        objects: modules, optimizers and schedulers that ``function`` refers to besides.
        tensors: tensors and arrays that it refers to besides, with their names.
        gradients: tensors with the gradients that they have already.
        mesh: the mesh.
        in_layouts: see :func:`run_body`.
        out_layout: see :func:`run_body`.
        parameter_layouts: see :func:`run_body`.
        options: see :func:`run_body`.
        ambient: state of the caller; None where this process is the caller.
        watch: whether to time, and to tell.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    objects: tuple[Any, ...]
    tensors: tuple[tuple[str, Any], ...]
    gradients: Tensors
    mesh: DeviceMesh
    in_layouts: Sequence[Layout | None]
    out_layout: OutLayouts | None
    parameter_layouts: Sequence[Mapping[str, Layout]]
    options: EagerOptions
    ambient: Ambient | None
    watch: bool

    @property
    def bundle(self) -> tuple[Any, ...]:
        """The arguments of :class:`Invocation`, which :func:`objects_of` walks."""
        return self.args, dict(self.kwargs), self.objects


class Invocation:
    """A function of (args, kwargs, what else it refers to)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        with contextlib.suppress(AttributeError):
            functools.update_wrapper(self, function)

    def __call__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], objects: tuple[Any, ...]
    ) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


class Slot(NamedTuple):
    """Stands where a piece belongs in a result or a state."""

    number: int


class Same(NamedTuple):
    """Stands for a module, an optimizer or a tensor of the caller's."""

    kind: str
    number: int


def is_all_slots(output: Any) -> bool:
    """Whether a result is nothing but slots in containers, which each call makes anew."""
    if type(output) in (list, tuple):
        return all(map(is_all_slots, output))
    if type(output) is dict:
        return all(type(k) is str and is_all_slots(v) for k, v in output.items())
    return output is None or type(output) is Slot


UNCHANGED: Final = "unchanged"
"""Stands for a piece that is as it was."""

_COMPARED_BYTES = 1 << 14  # a smaller piece is sent sooner than compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a call did, with the number of a piece, or a :class:`Slot`, in the place of a tensor.

    Attributes:
        lies: of each piece (layout, shape, kind).
        output: the function's result.
        modules: parameters, buffers, gradients and training flags of each module.
        optimizers: groups and states of each optimizer.
        tensors: by place among the tensors of the arguments.
        tensor_gradients: by place among the tensors of the arguments.
        captured: by place among the tensors that the function refers to.
        schedulers: ``state_dict()`` of each scheduler.
        generators: states of the random generators, or None if they are as before.
    """

    lies: Sequence[tuple[Layout, Shape, str]]
    output: Any
    modules: Sequence[tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, bool]]]
    optimizers: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[int, Mapping[str, Any]]]]
    tensors: Mapping[int, int]
    tensor_gradients: Mapping[int, int]
    captured: Mapping[int, int]
    schedulers: Sequence[Mapping[str, Any]]
    generators: Generators | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one rank sends back.

    Attributes:
        changes: rank 0's; it is the same on all.
        pieces: by number, those that this rank owns: the shard, or :data:`UNCHANGED`.
        trace: what was seen, if somebody watches.
        written: rank 0's: the pieces that were written in place; None: not known.
    """

    changes: Changes | None
    pieces: dict[int, torch.Tensor | str]
    trace: RankTrace | None = None
    written: frozenset[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call did on one rank.

    Attributes:
        result: what the body left.
        captured: by place those of the request's ``tensors`` that were written into.
        trace: what was seen, if somebody watches.
    """

    result: BodyResult
    captured: Mapping[int, torch.Tensor]
    trace: RankTrace | None


@dataclass(slots=True)
class Pieces:
    """Takes the pieces out of a result, each at its number."""

    found: list[Piece] = field(default_factory=list)
    before: dict[int, Any] = field(default_factory=dict)
    lies: list[tuple[Layout, Shape, str]] = field(default_factory=list)
    layouts: dict[Layout, Layout] = field(default_factory=dict)  # one of each: less to pickle

    def take(self, piece: Piece, before: Any = None) -> int:
        """The number of a piece; ``before`` is what it was before the call."""
        number = len(self.found)
        self.found.append(piece)
        if before is not None:
            self.before[number] = before
        layout = self.layouts.setdefault(piece.layout, piece.layout)
        self.lies.append((layout, piece.shape, piece.kind))
        return number

    def replace(self, value: Any, same: Callable[[Any], Any] = lambda value: value) -> Any:
        """``value`` with slots for pieces, and what ``same`` says for other leaves."""
        if isinstance(value, Piece):
            return Slot(self.take(value))
        if isinstance(value, Mapping) and type(value) is not dict:
            rebuilt = {k: self.replace(v, same) for k, v in value.items()}
            try:
                return type(value)(rebuilt)  # type: ignore[call-arg]
            except TypeError:
                return rebuilt
        if isinstance(value, dict):
            return {k: self.replace(v, same) for k, v in value.items()}
        if isinstance(value, list | tuple):
            row = [self.replace(item, same) for item in value]
            if hasattr(value, "_fields"):
                return type(value)(*row)
            return type(value)(row) if type(value) in (list, tuple) else tuple(row)
        if is_dataclass(value) and not isinstance(value, type):
            copy = object.__new__(type(value))
            for f in fields(value):
                if hasattr(value, f.name):
                    object.__setattr__(copy, f.name, self.replace(getattr(value, f.name), same))
            return copy
        return same(value)


_is_running = False


def is_running() -> bool:
    """Whether a body runs in this process."""
    return _is_running


# With the default group, which is not to be kept: see ``_release_groups`` of ``comm``.
_communicators: dict[tuple[Shape, tuple[str, ...]], tuple[weakref.ref[Any], TimedCommunicator]] = {}


def communicator(mesh: DeviceMesh, timeout_s: float) -> TimedCommunicator:
    """The communicator of a mesh; its groups are made once in the life of the process."""
    key = mesh.shape, mesh.axis_names
    world = dist.group.WORLD
    found = _communicators.get(key)
    if found is None or found[0]() is not world:
        made = TimedCommunicator(mesh.shape, mesh.axis_names, timeout_s=timeout_s)
        found = _communicators[key] = weakref.ref(world), made
    return found[1]


def execute(world: World, shipment: Shipment) -> Shipment:
    """Run a request on a rank of the pool, and send back what this rank owns: a :class:`Reply`."""
    request = unpack(shipment)
    assert isinstance(request, Request)
    body = prepare(world, request)
    try:
        outcome = carry_out(world, request, body)
        changes, pieces = owned(request, body, outcome, compare=True)
    finally:
        body.close()
    told = changes if world.rank == 0 else None
    return pack(Reply(changes=told, pieces=pieces, trace=outcome.trace))


def prepare(world: World, request: Request) -> Body:
    """Make a rank of the pool, and what it was sent, ready for :func:`carry_out`."""
    assert request.ambient is not None
    request.ambient.enter()
    for tensor, gradient in request.gradients:
        tensor.grad = gradient
    for value in request.objects:
        optimizer = getattr(value, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            _let_scheduler_see(optimizer)
    return _entered(request, communicator(request.mesh, world.timeout_s))


def carry_out(
    world: World,
    request: Request,
    body: Body,
    *,
    wholes: Mapping[int, torch.Tensor] | None = None,
    is_same: Callable[[], bool] | None = None,
) -> Outcome:
    """Run a request on a rank of the pool.

    Args:
        world: the rank.
        request: the call.
        body: as :func:`prepare` made it; the caller closes it.
        wholes: see :meth:`Body.run`.
        is_same: see :meth:`Body.run`.
    """
    comm = communicator(request.mesh, world.timeout_s)
    comm.tell = world.progress
    with _quiet(world.rank):
        return _run(request, body, comm, wholes, is_same)


def owned(
    request: Request, body: Body, outcome: Outcome, *, compare: bool
) -> tuple[Changes, dict[int, torch.Tensor | str]]:
    """What a call did, and of the pieces those this rank owns.

    Args:
        request: the call.
        body: which it was run in.
        outcome: of the run.
        compare: whether to find out which larger pieces are as they were.
    """
    comm = body.engine.comm
    pieces, changes = collect(
        request, body.objects, outcome.result, outcome.captured, compare=compare
    )
    mine: dict[int, torch.Tensor | str] = {}
    first = [comm.coordinate[axis] == 0 for axis in range(len(comm.mesh))]
    for number, piece in enumerate(pieces.found):
        layout = pieces.lies[number][0]
        if not all(first) and any(s is R and not own for s, own in zip(layout, first, strict=True)):
            continue
        before = pieces.before.get(number)
        if (
            before is not None
            and piece.local.nbytes >= _COMPARED_BYTES
            and _is_same(piece, before, comm)
        ):
            mine[number] = UNCHANGED
        else:
            mine[number] = piece.local
    return changes, mine


def perform(request: Request, comm: Communicator) -> tuple[Objects, Outcome]:
    """Run the body here."""
    body = _entered(request, comm)
    try:
        return body.objects, _run(request, body, comm, None, None)
    finally:
        body.close()


def _entered(request: Request, comm: Communicator) -> Body:
    return Body(
        objects_of(request.bundle, {}),
        in_layouts=request.in_layouts,
        parameter_layouts=request.parameter_layouts,
        comm=comm,
        options=request.options,
    )


def _run(
    request: Request,
    body: Body,
    comm: Communicator,
    wholes: Mapping[int, torch.Tensor] | None,
    is_same: Callable[[], bool] | None,
) -> Outcome:
    global _is_running
    versions = [_version(value) for _, value in request.tensors]

    def run(recorder: Any) -> BodyResult:
        if request.out_layout is not None:
            request.out_layout.asked = 0
        return body.run(
            Invocation(request.function),
            request.bundle,
            {},
            out_layout=request.out_layout,
            recorder=recorder,
            wholes=wholes,
            is_same=is_same,
        )

    _is_running = True
    try:
        if request.watch:
            result, trace = _watched(run, comm)
        else:
            result, trace = run(None), None
    finally:
        _is_running = False
    captured = {
        number: torch.as_tensor(value)
        for number, (_, value) in enumerate(request.tensors)
        if _version(value) != versions[number]
    }
    return Outcome(result=result, captured=captured, trace=trace)


def collect(
    request: Request,
    objects: Objects,
    result: BodyResult,
    captured: Mapping[int, torch.Tensor],
    *,
    compare: bool,
) -> tuple[Pieces, Changes]:
    """The pieces of a result, and the rest with slots in their places."""
    pieces = Pieces()
    known: dict[int, Same] = {}
    for kind in ("modules", "optimizers", "tensors"):
        for number, value in enumerate(getattr(objects, kind)):
            known[id(value)] = Same(kind, number)

    def same(value: Any) -> Any:
        return known.get(id(value), value)

    output = pieces.replace(result.output, same)
    modules = []
    for module, state in zip(objects.modules, result.modules, strict=True):
        values = (*state.parameters.values(), *state.buffers.values())
        large = compare and any(piece.local.nbytes >= _COMPARED_BYTES for piece in values)
        parameters = dict(module.named_parameters()) if large else {}
        buffers = dict(module.named_buffers()) if large else {}
        modules.append(
            (
                {n: pieces.take(p, parameters.get(n)) for n, p in state.parameters.items()},
                {n: pieces.take(p, buffers.get(n)) for n, p in state.buffers.items()},
                {n: pieces.take(p) for n, p in state.gradients.items()},
                dict(state.training),
            )
        )
    optimizers = [
        (pieces.replace(list(state.groups)), pieces.replace(dict(state.state)))
        for state in result.optimizers
    ]
    tensors = {n: pieces.take(p) for n, p in result.tensors.items()}
    tensor_gradients = {n: pieces.take(p) for n, p in result.gradients.items()}
    written = {
        n: pieces.take(
            Piece(
                local=value.detach(),
                layout=(R,) * len(request.mesh.shape),
                shape=tuple(value.shape),
            )
        )
        for n, value in captured.items()
    }
    changes = Changes(
        lies=pieces.lies,
        output=output,
        modules=modules,
        optimizers=optimizers,
        tensors=tensors,
        tensor_gradients=tensor_gradients,
        captured=written,
        schedulers=[v.state_dict() for v in schedulers_of(request.objects)],
        generators=(
            None if request.ambient is None else changed_generators(request.ambient.generators)
        ),
    )
    return pieces, changes


def schedulers_of(objects: Sequence[Any]) -> list[Any]:
    """Schedulers among what a function refers to, or was given."""
    return [v for v in objects if not isinstance(v, nn.Module | Optimizer)]


def _is_same(piece: Piece, before: torch.Tensor, comm: Communicator) -> bool:
    """Whether a shard is that of the whole value before the call."""
    if tuple(before.shape) != tuple(piece.shape) or before.dtype != piece.local.dtype:
        return False
    with torch.no_grad():
        layout = forward_half(piece.layout)
        if any(s is not R for s in layout):
            before = take_shard(before.detach(), layout, comm.mesh, comm.coordinate)
        return torch.equal(before, piece.local)


def _version(value: Any) -> object:
    """Something that changes when a tensor, or an array, is written into."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    import zlib

    return zlib.crc32(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data)


def _let_scheduler_see(optimizer: Optimizer) -> None:
    """Have ``step()`` leave the mark that torch's schedulers look for; pickling drops it."""
    step = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):
        return

    @functools.wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked  # type: ignore[method-assign]


_null: Any = None


def _nowhere() -> Any:
    """A stream that keeps nothing; the same for all calls, unless one closed it."""
    global _null
    if _null is None or _null.closed:
        _null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return _null


@contextmanager
def _quiet(rank: int) -> Iterator[None]:
    """A program prints once, and warns once: on rank 0."""
    if rank == 0:
        yield
        return
    with warnings.catch_warnings(), contextlib.redirect_stdout(_nowhere()):
        # What is to be an error stays one, on every rank.
        warnings.filters[:] = [  # type: ignore[index]
            f if f[0] == "error" else ("ignore", *f[1:]) for f in warnings.filters
        ]
        yield


# ---- watching ---------------------------------------------------------------------------------


def _watched(run: Callable[[Any], BodyResult], comm: Communicator) -> tuple[BodyResult, RankTrace]:
    recorder = TimedRecorder()
    memory = MemoryWatch(comm.device)
    start = time.perf_counter()
    with named_spans(recorder):
        result = run(recorder)
    end = time.perf_counter()
    categories = _memory(result, recorder.gradient_bytes)
    peak = memory.peak_bytes()
    if peak is not None:
        categories["peak"] = peak
    comm.recorder = None
    trace = recorder.trace(
        rank=comm.rank,
        coordinate=comm.coordinate,
        start_s=start,
        end_s=end,
        offset_s=clock_offset_s(),
        memory_bytes=categories,
    )
    return result, trace


def _memory(result: BodyResult, gradient_bytes: int) -> dict[str, int]:
    """Bytes of this rank's shards by category; a category without any is left out."""

    def held(pieces: Mapping[str, Any]) -> int:
        return sum(p.local.nbytes for p in pieces.values() if isinstance(p, Piece))

    sums = {
        "parameters": sum(held(m.parameters) + held(m.buffers) for m in result.modules),
        "gradients": max(gradient_bytes, sum(held(m.gradients) for m in result.modules)),
        "optimizer state": sum(held(s) for o in result.optimizers for s in o.state.values()),
    }
    return {kind: num_bytes for kind, num_bytes in sums.items() if num_bytes}


__all__ = [
    "UNCHANGED",
    "Changes",
    "Objects",
    "Outcome",
    "Pieces",
    "Reply",
    "Request",
    "Same",
    "Slot",
    "carry_out",
    "collect",
    "communicator",
    "execute",
    "is_all_slots",
    "is_running",
    "owned",
    "perform",
    "prepare",
    "schedulers_of",
]
