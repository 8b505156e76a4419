"""A plan as a rank runs it: moves with their messages, operators as their local form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from autoshard.runtime.comm import Communicator
from autoshard.runtime.eager.copies import COPY
from autoshard.runtime.eager.fused import with_bias
from autoshard.runtime.eager.known import is_count, whole_of
from autoshard.runtime.eager.planning import Move, Out, Run, Schedule, Store
from autoshard.runtime.eager.record import is_alias_of
from autoshard.runtime.eager.tags import NAME, Meta, set_meta
from autoshard.runtime.local import local_call
from autoshard.runtime.moves import Mover, reshard
from autoshard.sharding.layout import Layout, R, largest_shape


class Host(Protocol):
    """What a bound plan needs of the engine."""

    comm: Communicator

    def converted(self, tensor: Tensor, target: Layout, mover: Mover, grad: bool) -> Tensor:
        """The operand moved, perhaps by an earlier call."""
        ...

    def decided(self, tensor: Tensor, meta: Meta) -> None:
        """The open axes of a parameter are decided."""
        ...

    def used(self, tensor: Tensor) -> None:
        """A matrix that may be a parameter was used."""
        ...

    def looked_up(self, weight: Tensor, indices: Tensor, most: int) -> None:
        """Rows of a parameter were looked up, at most so many on one device."""
        ...


Step = Callable[[list[Any], Host], None]


class Bound:
    """A schedule on one rank.

    Args:
        schedule: what to do.
        comm: the collectives.
        name: of the function, for the recorder.
    """

    def __init__(self, schedule: Schedule, comm: Communicator, name: str) -> None:
        self.schedule = schedule
        self._inputs = len(schedule.given)
        self.written = tuple(s.operand for s in schedule.steps if isinstance(s, Store))
        self.aliases = _has_alias(schedule.result)
        self._steps: list[Step] = []
        self._decided = tuple(schedule.decided.items())
        enabled = torch.is_grad_enabled()
        self._matrices = tuple(
            i
            for i, g in enumerate(schedule.given)
            if enabled and g.requires_grad and g.is_leaf and len(g.shape) == 2
        )
        slots = self._inputs
        steps = with_bias(schedule)
        for at, step in enumerate(steps):
            if not isinstance(step, Store):
                slots = max(slots, step.slot + 1)
            self._steps.append(self._compiled(step, comm, name))
            if is_count(steps, at - 1):
                here, sum_up = self._steps[-2:]
                self._steps[-2:] = [_count(steps[at - 1], step, here, sum_up, comm)]
        self._empty = [None] * (slots - self._inputs)
        self._single: tuple[Callable[..., Tensor], tuple[int, ...], Meta] | None = None
        out = schedule.result
        if (
            len(steps) == 1
            and isinstance(steps[0], Run)
            and isinstance(out, Out)
            and out.alias is None
            and out.operand is None
            and out.meta is not None
            and not self._decided
            and not steps[0].back
            and steps[0].grad
            and steps[0].call.family != "aten.embedding"
        ):
            run = steps[0]
            self._single = (_local(run, comm, name), run.operands, out.meta)

    def __call__(self, tensors: Sequence[Tensor], host: Host) -> Any:
        """The function's result for these local operands."""
        for i in self._matrices:
            host.used(tensors[i])
        if self._single is not None:
            call, places, meta = self._single
            out = call(*[tensors[i] for i in places])
            for t in tensors:
                if out is t:
                    out = out.view_as(out)
                    break
            out.__dict__[NAME] = meta
            return out
        for index, meta in self._decided:
            host.decided(tensors[index], meta)
        slots = [*tensors, *self._empty]
        for step in self._steps:
            step(slots, host)
        return _result(self.schedule.result, slots, tensors)

    def _compiled(self, step: Move | Run | Store, comm: Communicator, name: str) -> Step:
        if isinstance(step, Move):
            return self._move(step, comm, name)
        if isinstance(step, Store):
            return _store(step)
        return _run(step, comm, name)

    def _move(self, step: Move, comm: Communicator, name: str) -> Step:
        mover = Mover(step.reshard.forward, step.reshard.backward, step.shape, comm, value=name)
        source, slot, target = step.source, step.slot, step.target
        differentiable = step.differentiable
        if source < self._inputs:

            def outer(slots: list[Any], host: Host) -> None:
                slots[slot] = host.converted(slots[source], target, mover, differentiable)

            return outer
        if differentiable:

            def inner(slots: list[Any], host: Host) -> None:
                slots[slot] = mover(slots[source])

            return inner

        def forward(slots: list[Any], host: Host) -> None:
            slots[slot] = mover.moved(slots[source].detach())

        return forward


def _local(step: Run, comm: Communicator, name: str) -> Callable[..., Tensor]:
    return local_call(
        step.call,
        step.strategy.operands,
        step.strategy.result,
        comm.mesh,
        comm.coordinate,
        reducer=comm,
        value=name,
        device=comm.device,
    )


def _run(step: Run, comm: Communicator, name: str) -> Step:
    call = _local(step, comm, name)
    places, slot, back, grad = step.operands, step.slot, step.back, step.grad
    is_lookup = step.call.family == "aten.embedding"
    shapes = [step.call.shapes[k] for k in range(len(places))]
    most = 0
    if is_lookup:
        most = prod(largest_shape(shapes[1], step.strategy.operands[1], comm.mesh))
    mutated = {moved for moved, _, _ in back}

    def run(slots: list[Any], host: Host) -> None:
        given = [slots[i] for i in places]
        if back:
            given = [t.clone() if i in mutated else t for i, t in zip(places, given, strict=True)]
        if grad:
            out = call(*given)
        else:
            with torch.no_grad():
                out = call(*given)
        if is_lookup:
            host.looked_up(given[0], given[1], most)
        for moved, source, way in back:
            written = given[places.index(moved)]
            whole = reshard(written, way.forward, shapes[places.index(moved)], host.comm)
            with torch.no_grad():
                slots[source].copy_(whole)
        slots[slot] = out

    return run


def _count(run: Any, move: Any, here: Step, sum_up: Step, comm: Communicator) -> Step:
    """Count on the whole where it is known, else here and then over all devices."""
    whole_layout = (R,) * len(comm.mesh)
    call = local_call(run.call, (whole_layout,), whole_layout, comm.mesh, comm.coordinate)
    source, slot = run.operands[0], move.slot

    def count(slots: list[Any], host: Host) -> None:
        whole = whole_of(slots[source])
        if whole is None:
            here(slots, host)
            sum_up(slots, host)
        else:
            slots[slot] = call(whole)

    return count


def _store(step: Store) -> Step:
    operand, slot = step.operand, step.slot

    def store(slots: list[Any], host: Host) -> None:
        slots[operand].copy_(slots[slot])

    def without_grad(slots: list[Any], host: Host) -> None:
        with torch.no_grad():
            slots[operand].copy_(slots[slot])

    return store if step.grad else without_grad


def _has_alias(out: Any) -> bool:
    if isinstance(out, Out):
        return out.alias is not None
    return isinstance(out, (list, tuple)) and any(_has_alias(v) for v in out)


def _result(out: Any, slots: list[Any], tensors: Sequence[Tensor]) -> Any:
    if isinstance(out, Out):
        if out.operand is not None:
            return tensors[out.operand]
        found = slots[out.slot]
        if any(found is t for t in slots[: len(tensors)]):
            found = found.view_as(found)
        elif found.__dict__.get(NAME) is not None:
            found = found.view_as(found)  # the same value twice in one result, or a kept one
        set_meta(found, out.meta)
        if out.alias is not None:
            shown = tensors[out.alias]
            if not is_alias_of(found, shown):
                found.__dict__[COPY] = shown
        return found
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*(_result(v, slots, tensors) for v in out))
    if type(out).__module__ == "torch.return_types":
        return type(out)([_result(v, slots, tensors) for v in out])
    if isinstance(out, (list, tuple)):
        return type(out)(_result(v, slots, tensors) for v in out)
    return out
