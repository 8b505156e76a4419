"""What a function will issue, without data and without other processes: the same chooser, replayed.

    predict(numpy.dot, [Input((8, 6), "float64", a), Input((6, 4), "float64", b)], mesh=mesh)

The forward pass only: what backward issues are the backward halves of the same edges, and the
buckets of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from autoshard.runtime.comm import Communicator
from autoshard.runtime.eager.arguments import map_tensors
from autoshard.runtime.eager.arrays import Array
from autoshard.runtime.eager.bound import Bound, Host
from autoshard.runtime.eager.choose import Chooser
from autoshard.runtime.eager.engine import Engine
from autoshard.runtime.eager.known import is_count, remember, whole_of
from autoshard.runtime.eager.planning import Move, Out, Run, Schedule, Store
from autoshard.runtime.eager.record import rule_of_call
from autoshard.runtime.eager.tags import Meta, set_meta
from autoshard.runtime.moves import Mover
from autoshard.sharding.collective import Collective, CollectiveSeconds, Phase
from autoshard.sharding.layout import Layout, Shape, forward_half
from autoshard.sharding.mesh import DeviceMesh
from autoshard.sharding.reshard import Step, step_bytes
from autoshard.sharding.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Input:
    """An argument: global shape, dtype, how it is cut, and what the function gets."""

    shape: Shape
    dtype: str
    layout: Layout
    kind: str = "tensor"
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Coordinate 0 of a mesh, which holds the largest shards; nothing is sent."""

    mesh: Shape
    coordinate: tuple[int, ...]
    device: torch.device


class _Dry(Engine):
    """Takes down messages instead of sending them; tensors are global and without data."""

    def __init__(self, mesh: DeviceMesh, seconds: CollectiveSeconds | None) -> None:
        place = _Place(mesh.shape, (0,) * len(mesh.shape), torch.device("meta"))
        super().__init__(cast("Communicator", place), Chooser(mesh.shape, seconds))
        self.names = mesh.axis_names
        self.issued: list[Collective] = []

    def steps(self, steps: Sequence[Step], shape: Shape, itemsize: int, value: str) -> None:
        """Note the messages of some steps."""
        mesh = self.comm.mesh
        for step in steps:
            size = 1
            for axis in step.axes:
                size *= mesh[axis]
            if step.is_message and size > 1:
                num_bytes = step_bytes(step, shape, itemsize, mesh, self.comm.coordinate)
                axes = tuple(self.names[a] for a in step.axes)
                self.issued.append(Collective(step.kind, axes, num_bytes, "forward", value))  # type: ignore[arg-type]

    def inside(self, run: Run, name: str) -> None:
        """Note the messages that an operator issues inside itself."""
        rule = rule_of_call(run.call)
        for message in rule.internal if rule is not None else ():
            axes = tuple(a for a, c in enumerate(run.strategy.choices) if c.factor in message.when)
            if axes and message.phase == "forward":
                self.issued.append(
                    Collective(
                        message.op,
                        tuple(self.names[a] for a in axes),
                        _elements(run.strategy, rule, message.elements, self.comm.mesh)
                        * message.count
                        * message.itemsize,
                        cast("Phase", message.phase),
                        name,
                    )
                )

    def apply(self, mover: Mover, tensor: Tensor, grad: bool) -> Tensor:
        self.steps(mover.forward, mover.shape, tensor.element_size(), mover.value)
        return tensor.view_as(tensor)

    def bind(self, schedule: Schedule, name: str) -> Bound:
        return cast("Bound", _DryBound(schedule, name))


def _elements(strategy: Strategy, rule: Any, factors: Sequence[str], mesh: Shape) -> int:
    total = 1
    for factor in factors:
        size = rule.sizes[factor]
        for axis, choice in enumerate(strategy.choices):
            if choice.factor == factor:
                size = size // choice.n * -(-choice.n // mesh[axis])
        total *= size
    return total


class _DryBound:
    """A schedule of which only the messages are taken down."""

    def __init__(self, schedule: Schedule, name: str) -> None:
        self.schedule, self.name = schedule, name
        self.written = tuple(s.operand for s in schedule.steps if isinstance(s, Store))
        self.aliases = False

    def __call__(self, tensors: Sequence[Tensor], host: Host) -> Any:
        engine = cast("_Dry", host)
        for index, meta in self.schedule.decided.items():
            engine.decided(tensors[index], meta)
        inputs = len(tensors)
        steps = self.schedule.steps
        for at, step in enumerate(steps):
            if at and is_count(steps, at - 1):
                run = cast("Run", steps[at - 1])
                if run.operands[0] < inputs and whole_of(tensors[run.operands[0]]) is not None:
                    continue
            if isinstance(step, Move):
                if step.source < inputs:
                    mover = engine.mover(
                        step.shape, step.itemsize, step.produced, step.target, step.differentiable
                    )
                    engine.converted(tensors[step.source], step.target, mover, step.differentiable)
                else:
                    engine.steps(step.reshard.forward, step.shape, step.itemsize, self.name)
            elif isinstance(step, Run):
                engine.inside(step, self.name)
        return _outputs(self.schedule.result, tensors)


def _outputs(out: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(out, Out):
        if out.operand is not None or out.meta is None:
            return tensors[out.slot]
        made = torch.empty(out.meta.shape, dtype=getattr(torch, out.dtype), device="meta")
        set_meta(made, out.meta)
        return made
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*(_outputs(v, tensors) for v in out))
    if type(out).__module__ == "torch.return_types":
        return type(out)([_outputs(v, tensors) for v in out])
    if isinstance(out, (list, tuple)):
        return type(out)(_outputs(v, tensors) for v in out)
    return out


_engine = lru_cache(maxsize=8)(_Dry)


def predict(
    function: Callable[..., Any],
    inputs: Sequence[Input],
    *,
    mesh: DeviceMesh,
    out_layout: Layout | None = None,
    seconds: CollectiveSeconds | None = None,
) -> list[Collective]:
    """The collectives that one device issues in the forward pass of ``function``, in order.

    As the device at coordinate 0 of every axis issues them.

    Args:
        function: of tensors or arrays; it must not read their data.
        inputs: its arguments.
        mesh: the mesh.
        out_layout: how every tensor of the result leaves; None: as it is.
        seconds: prices; None: those of processes on this machine.
    """
    engine = _engine(mesh, seconds)
    engine.issued = []
    engine.gradients.reset()
    args = []
    for given in inputs:
        tensor = torch.empty(given.shape, dtype=getattr(torch, given.dtype), device="meta")
        tensor.requires_grad_(given.requires_grad)
        set_meta(tensor, Meta(given.layout, tuple(given.shape)))
        remember(tensor, tensor)
        args.append(Array(tensor) if given.kind == "array" else tensor)
    with engine.mode:
        out = function(*args)

    def leave(value: Any) -> Any:
        tensor = value.tensor if isinstance(value, Array) else value
        if out_layout is not None and isinstance(tensor, Tensor):
            engine.moved(tensor, forward_half(out_layout))
        return value

    with torch.no_grad():
        map_tensors(out, leave)
    engine.forget_leaves()
    return engine.issued


__all__ = ["Input", "predict"]
