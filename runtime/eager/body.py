"""Run one function of whole arguments on one rank of a mesh: the contract with who calls it.

    result = run_body(step, (model, data, labels), {}, mesh=mesh, in_layouts=[batch, labels],
                      out_layout=None, parameter_layouts=[layouts], comm=comm)

Both sides walk the arguments with :func:`objects_of`, so the n-th module, optimizer or tensor of
one is that of the other. Every rank calls it with equal arguments and gets its own pieces back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoshard.errors import RequestError, SpecError
from autoshard.runtime.comm import Communicator, Recorder
from autoshard.runtime.eager import autograd as _autograd  # noqa: F401  (its handlers)
from autoshard.runtime.eager.arguments import Objects, map_tensors, objects_of
from autoshard.runtime.eager.arrays import Array
from autoshard.runtime.eager.choose import Chooser
from autoshard.runtime.eager.customs import Customs
from autoshard.runtime.eager.engine import Mode, engine_of, forget_moved
from autoshard.runtime.eager.known import remember
from autoshard.runtime.eager.leaving import (
    OutLayout,
    fit,
    gradient_of,
    module_state,
    optimizer_state,
    output_of,
    piece_of,
)
from autoshard.runtime.eager.optimizers import Stepping
from autoshard.runtime.eager.patches import current_engine, patched
from autoshard.runtime.eager.pieces import BodyResult, ModuleState, OptimizerState, Piece
from autoshard.runtime.eager.tags import Meta, meta_of, set_meta
from autoshard.runtime.shards import take_shard
from autoshard.sharding.collective import CollectiveSeconds
from autoshard.sharding.layout import Layout, R
from autoshard.sharding.mesh import DeviceMesh

__all__ = [
    "Body",
    "BodyResult",
    "EagerOptions",
    "ModuleState",
    "Objects",
    "OptimizerState",
    "Piece",
    "no_sync",
    "objects_of",
    "run_body",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerOptions:
    """What may be chosen.

    Attributes:
        seconds: price of a collective; None: those of processes on this machine.
        bucket_bytes: size at which a bucket of gradients is sent; None: from the prices.
        overlap: whether gradients are sent while backward runs.
        sparse: whether gradients of look-ups may be sent as rows and values.
        customs: the caller's operators and rules; they go along where this is sent.
    """

    seconds: CollectiveSeconds | None = None
    bucket_bytes: int | None = None
    overlap: bool = True
    sparse: bool = True
    customs: Customs = field(default_factory=Customs, repr=False)


def run_body(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mesh: DeviceMesh,
    in_layouts: Sequence[Layout | None],
    out_layout: OutLayout,
    parameter_layouts: Sequence[Mapping[str, Layout]],
    comm: Communicator,
    recorder: Recorder | None = None,
    options: EagerOptions | None = None,
) -> BodyResult:
    """Run ``function(*args, **kwargs)`` on this rank, one operator at a time, by sharding rules.

    Inside, shapes read as global. Modules, optimizers and tensors are cut while it runs and are
    whole and unchanged again afterwards; what became of them is in the result.

    Args:
        function: an ordinary function of tensors, NumPy arrays, modules, optimizers and containers.
        args: whole arguments, equal on all ranks.
        kwargs: whole arguments, equal on all ranks.
        mesh: the mesh; its ranks are those of ``comm``.
        in_layouts: for each of ``objects_of(args, kwargs).tensors`` how it is cut; missing entries
            and None: whole.
        out_layout: how results leave: one layout (a tuple) for every tensor of the result, a list
            with one for each in order, a function from the global shape, or None: as they are.
        parameter_layouts: for each of ``objects_of(args, kwargs).modules`` the layout of
            parameters and buffers by name; those not named are whole.
        comm: the collectives over ``mesh``.
        recorder: takes the collectives that are issued.
        options: what may be chosen.

    Raises:
        RequestError: the function does what cannot be followed; the message says what to do.
    """
    body = Body(
        objects_of(args, kwargs),
        in_layouts=in_layouts,
        parameter_layouts=parameter_layouts,
        comm=comm,
        options=options or EagerOptions(),
    )
    try:
        return body.run(function, args, kwargs, out_layout=out_layout, recorder=recorder)
    finally:
        body.close()


def _check(
    objects: Objects,
    in_layouts: Sequence[Layout | None],
    parameter_layouts: Sequence[Mapping[str, Layout]],
) -> None:
    for what, given, there in (
        ("in_layouts", len(in_layouts), len(objects.tensors)),
        ("parameter_layouts", len(parameter_layouts), len(objects.modules)),
    ):
        if given > there:
            raise RequestError(f"{what} has {given} entries, the arguments have {there}")
    for index, module in enumerate(objects.modules):
        layouts = parameter_layouts[index] if index < len(parameter_layouts) else {}
        named: set[str] = set()
        if layouts:
            named = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
        for name in layouts:
            if name not in named:
                raise SpecError(f"parameter_layouts names {name!r}, which the module lacks")
        for name, inner in module.named_modules():
            if inner._backward_hooks or inner._backward_pre_hooks:
                raise RequestError(
                    f"module {name or '(root)'} has a full backward hook, which would see local "
                    "gradients; use Tensor.register_hook on a value in forward"
                )
            if isinstance(inner, torch.jit.ScriptModule):
                raise RequestError(
                    f"module {name or '(root)'} is TorchScript, which would compute on local "
                    "shards; pass the module that it was made from"
                )


@dataclass(frozen=True, slots=True)
class Entered:
    """A tensor that came whole, and what this rank holds of it.

    Attributes:
        given: the tensor itself, as it was found.
        shard: of its values, for the time of the call.
        layout: how it is cut.
    """

    given: Any
    shard: Tensor
    layout: Layout


class Body:
    """One call on one rank: it is entered when this is made, and left by :meth:`close`.

    Between that and :meth:`run` other values may be written into the shards.

    Args:
        objects: what stands in the arguments.
        in_layouts: see :func:`run_body`.
        parameter_layouts: see :func:`run_body`.
        comm: see :func:`run_body`.
        options: see :func:`run_body`.

    Attributes:
        entered: everything that was cut, or copied.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        in_layouts: Sequence[Layout | None],
        parameter_layouts: Sequence[Mapping[str, Layout]],
        comm: Communicator,
        options: EagerOptions,
    ) -> None:
        _check(objects, in_layouts, parameter_layouts)
        if current_engine() is not None:
            raise RequestError(
                "a sharded function was called inside another; call the plain function there"
            )
        self.objects, self.entered = objects, list[Entered]()
        self._states: Sequence[ModuleState] | None = None
        self._is_as_entered = False
        self._undo: list[Callable[[], None]] = []
        self.engine = engine = engine_of(
            comm, lambda: Chooser(comm.mesh, options.seconds), options.seconds
        )
        gradients = engine.gradients
        gradients.reset()
        gradients.bucket_bytes, gradients.overlap = options.bucket_bytes, options.overlap
        gradients.sparse = options.sparse
        engine.raw = 0
        engine.mode = Mode(engine)
        data = self._cut_axes(in_layouts)
        cut = self._cut_axes([v for table in parameter_layouts for v in table.values()])
        self._axes = sorted({*data, *cut}), data
        engine.begin(*self._axes)
        try:
            for index, module in enumerate(objects.modules):
                layouts = parameter_layouts[index] if index < len(parameter_layouts) else {}
                self._enter_module(module, layouts)
            for optimizer in objects.optimizers:
                self._enter_optimizer(optimizer)
            self._shards = [
                self._shard_of(value, in_layouts[index] if index < len(in_layouts) else None)
                for index, value in enumerate(objects.tensors)
            ]
            self._forms = [
                (tuple(s.shape), s.stride(), s.dtype, s.device, s.requires_grad, meta_of(s))
                for s in self._shards
            ]
        except BaseException:
            self.close()
            raise

    def decisions(self) -> dict[int, Meta]:
        """What first uses decided about parameters, by their ``id``."""
        return {
            id(entered.given): meta
            for entered in self.entered
            if isinstance(entered.given, nn.Parameter)
            and (meta := meta_of(entered.given)) is not None
            and not meta.open
        }

    def decide(self, decisions: Mapping[int, Meta]) -> None:
        """Decide as in an earlier call of the same objects, before the first uses do."""
        for entered in self.entered:
            meta, own = decisions.get(id(entered.given)), meta_of(entered.given)
            if meta is not None and own is not None and own.open and own.shape == meta.shape:
                self.engine.decided(entered.given, meta)
        self.engine.gradients.settle()

    def rewind(self, is_same: Callable[[], bool]) -> bool:
        """Be as if entered again, for another run; False where only :meth:`close` can help.

        Shards have no values then: they are to be written.

        Args:
            is_same: see :meth:`run`.
        """
        engine = self.engine
        if not (self._is_as_entered or self._is_left_so(is_same)) or not engine.gradients.rewind():
            return False
        self._is_as_entered = False
        engine.forget_leaves()
        engine.raw = 0
        engine.mode = Mode(engine)
        engine.begin(*self._axes)
        start = len(self.entered) - len(self._shards)
        for place, (shape, stride, dtype, device, grad, meta) in enumerate(self._forms):
            # A new one: somebody may still have the last.
            shard = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            shard.requires_grad_(grad)
            set_meta(shard, meta)
            self._shards[place] = shard
            self.entered[start + place] = replace(self.entered[start + place], shard=shard)
        return True

    def _is_left_so(self, is_same: Callable[[], bool]) -> bool:
        """Whether the objects are, but for values, what they were when entered."""
        for entered in self.entered:
            if isinstance(entered.given, Tensor):
                forget_moved(entered.given)
        return not self.objects.optimizers and is_same()

    def _module_states(self, is_same: Callable[[], bool] | None) -> Sequence[ModuleState]:
        self._is_as_entered = is_same is not None and self._is_left_so(is_same)
        if self._is_as_entered and self._states is not None:
            return self._states
        states = [module_state(self.engine, m) for m in self.objects.modules]
        # A piece of what is not contiguous is a copy.
        in_place = self._is_as_entered and all(e.shard.is_contiguous() for e in self.entered)
        self._states = states if in_place else None
        return states

    def keeps(self, states: Sequence[ModuleState]) -> bool:
        """Whether these will be the states of modules after each run that leaves them so."""
        return states is self._states

    def close(self) -> None:
        """Everything as it was before the call."""
        while self._undo:
            self._undo.pop()()
        self.engine.gradients.close()
        self.engine.forget_leaves()
        self.engine.raw = 0

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        out_layout: OutLayout,
        recorder: Recorder | None = None,
        wholes: Mapping[int, Tensor] | None = None,
        is_same: Callable[[], bool] | None = None,
    ) -> BodyResult:
        """Run the function, and take down what is left.

        Args:
            function: see :func:`run_body`.
            args: see :func:`run_body`.
            kwargs: see :func:`run_body`.
            out_layout: see :func:`run_body`.
            recorder: see :func:`run_body`.
            wholes: by ``id`` of a tensor of the arguments where its values are, if elsewhere.
            is_same: tells whether the objects are, but for values, what they were when entered,
                once all is gone that the engine left on them. If they are, the states of modules
                are those of an earlier run, the same objects, whose pieces have the new values.
        """
        comm = self.engine.comm
        before, comm.recorder = comm.recorder, recorder if recorder is not None else comm.recorder
        try:
            return self._run(function, args, kwargs, out_layout, wholes or {}, is_same)
        finally:
            comm.recorder = before

    def _run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out_layout: OutLayout,
        wholes: Mapping[int, Tensor],
        is_same: Callable[[], bool] | None,
    ) -> BodyResult:
        swapped: dict[int, Any] = {}
        for value, shard in zip(self.objects.tensors, self._shards, strict=True):
            swapped[id(value)] = Array(shard) if isinstance(value, np.ndarray) else shard
            whole = wholes.get(id(value), value)
            if isinstance(whole, Tensor) and whole.device == shard.device:
                remember(shard, whole)
        versions = [t._version for t in self._shards]

        def swap(value: Any) -> Any:
            return swapped.get(id(value), value)

        given = map_tensors(tuple(args), swap)
        named = map_tensors(dict(kwargs), swap)
        engine = self.engine
        with patched(engine), Stepping(engine), engine.mode:
            out = function(*given, **named)
        with torch.no_grad():
            output = output_of(engine, out, out_layout)
        modules = self._module_states(is_same)
        optimizers = [optimizer_state(engine, o) for o in self.objects.optimizers]
        tensors: dict[int, Piece] = {}
        gradients: dict[int, Piece] = {}
        for index, (value, shard) in enumerate(
            zip(self.objects.tensors, self._shards, strict=True)
        ):
            kind = "array" if isinstance(value, np.ndarray) else "tensor"
            if shard._version != versions[index]:
                tensors[index] = piece_of(engine, shard, kind)
            if shard.is_leaf and shard.grad is not None:
                gradients[index] = gradient_of(engine, shard)
        return BodyResult(
            output=output,
            modules=modules,
            optimizers=optimizers,
            tensors=tensors,
            gradients=gradients,
        )

    def _cut_axes(self, layouts: Sequence[Layout | None]) -> list[int]:
        return [
            axis
            for axis in range(len(self.engine.comm.mesh))
            if any(layout is not None and layout[axis] is not R for layout in layouts)
        ]

    # ---- entering ---------------------------------------------------------------------------

    def _take(self, whole: Tensor, layout: Layout) -> Tensor:
        comm = self.engine.comm
        if layout == self.engine.whole_layout:
            shard = whole.detach().clone(memory_format=torch.contiguous_format)
        else:
            shard = take_shard(whole.detach(), layout, comm.mesh, comm.coordinate)
        return shard if shard.device == comm.device else shard.to(comm.device)

    def _shard_of(self, value: Any, layout: Layout | None) -> Tensor:
        if isinstance(value, np.ndarray) and value.dtype.name in ("uint16", "uint32", "uint64"):
            raise RequestError(
                f"an array of dtype {value.dtype.name} and shape {value.shape}: torch does not "
                "compute with it; pass it as another, for instance a.astype(numpy.int64)"
            )
        whole = (
            torch.from_numpy(np.ascontiguousarray(value))
            if isinstance(value, np.ndarray)
            else value
        )
        layout = layout or self.engine.whole_layout
        fit(layout, tuple(value.shape))
        shard = self._take(whole, layout).requires_grad_(whole.requires_grad)
        set_meta(shard, Meta(layout, tuple(value.shape)))
        self.entered.append(Entered(value, shard, layout))
        return shard

    def _enter_module(self, module: nn.Module, layouts: Mapping[str, Layout]) -> None:
        for name, parameter in module.named_parameters():
            self._enter(parameter, layouts.get(name), name, parameter=True)
        for name, buffer in module.named_buffers():
            self._enter(buffer, layouts.get(name), name, parameter=False)
        for inner in module.modules():
            self._undo.append(_restorer(inner))

    def _enter(self, tensor: Tensor, layout: Layout | None, name: str, *, parameter: bool) -> None:
        if meta_of(tensor) is not None:
            return  # of a module that stands in another
        layout = layout or self.engine.whole_layout
        shape, whole, grad = tuple(tensor.shape), tensor.data, tensor.grad
        fit(layout, shape, name)
        requires_grad = tensor.requires_grad

        def undo() -> None:
            clear_tags(tensor)
            tensor.grad = None
            tensor.data = whole
            tensor.grad = grad
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)

        self._undo.append(undo)
        tensor.grad = None
        shard = self._take(whole, layout)
        self.entered.append(Entered(tensor, shard, layout))
        tensor.data = shard
        if parameter:
            self.engine.adopt(tensor, layout, shape)
        else:
            set_meta(tensor, Meta(layout, shape))
        if grad is not None:
            tensor.grad = self._take(grad, layout)

    def _enter_optimizer(self, optimizer: Optimizer) -> None:
        groups = [dict(g) for g in optimizer.param_groups]
        state = {k: dict(v) if isinstance(v, dict) else v for k, v in optimizer.state.items()}

        def undo() -> None:
            for group, old in zip(optimizer.param_groups, groups, strict=False):
                group.clear()
                group.update(old)
            del optimizer.param_groups[len(groups) :]
            optimizer.state.clear()
            optimizer.state.update(state)

        self._undo.append(undo)
        with torch.no_grad():
            for entries in optimizer.state.values():
                if isinstance(entries, dict):
                    for name, value in entries.items():
                        if isinstance(value, Tensor):
                            entries[name] = copy = value.clone()
                            self.entered.append(Entered(value, copy, self.engine.whole_layout))


def _restorer(module: nn.Module) -> Callable[[], None]:
    """Puts a module's own attributes back: tensors, submodules, mode."""
    kept = dict(module.__dict__)
    tables = {
        name: dict(value)
        for name, value in module.__dict__.items()
        if name in ("_parameters", "_buffers", "_modules")
    }

    def undo() -> None:
        module.__dict__.clear()
        module.__dict__.update(kept)
        for name, table in tables.items():
            module.__dict__[name].clear()
            module.__dict__[name].update(table)

    return undo


def clear_tags(tensor: Tensor) -> None:
    """Take everything away that the engine keeps on a tensor."""
    for name in [n for n in tensor.__dict__ if n.startswith("_autoshard")]:
        del tensor.__dict__[name]


@contextmanager
def no_sync() -> Iterator[None]:
    """Within it, backward leaves gradients as parts on each device; the next one sums them all.

    For gradient accumulation without communication in between. Outside of a sharded function it
    does nothing.
    """
    engine = current_engine()
    if engine is None:
        yield
        return
    with engine.gradients.deferred():
        yield
