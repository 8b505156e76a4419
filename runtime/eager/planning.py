"""From a recorded function and the layouts of its operands to a plan: which moves, which operators.

Arithmetic on shapes and layouts only: the same code says what will be issued (:mod:`predict`) and
what a rank runs (:mod:`mode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.errors import RequestError
from autoshard.runtime.eager.choose import Chooser, Operand
from autoshard.runtime.eager.normal import Value
from autoshard.runtime.eager.record import (
    Made,
    Recording,
    Write,
    dtype_name,
    itemsize,
    op_call,
    rule_or_none,
)
from autoshard.runtime.eager.tags import Meta
from autoshard.sharding.layout import RP, Layout, R, Shape, forward_half
from autoshard.sharding.registry import OpCall
from autoshard.sharding.reshard import Reshard
from autoshard.sharding.strategy import Strategy

WITHOUT_GRADIENT = frozenset(
    {
        *("aten.detach", "autoshard.count_valid", "aten.argmax", "aten.argmin", "aten.bernoulli"),
        *("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.rand_like"),
        *("aten.randn_like", "aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.one_hot"),
    }
)


@dataclass(frozen=True, slots=True)
class Given:
    """An operand of a call, as it comes.

    ``meta`` is None where the tensor is whole on every device.
    """

    shape: Shape
    dtype: Any
    requires_grad: bool
    is_leaf: bool
    meta: Meta | None
    strides: Shape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Bring the value in slot ``source`` into the layout ``target``, as slot ``slot``."""

    slot: int
    source: int
    shape: Shape
    itemsize: int
    produced: Layout
    target: Layout
    reshard: Reshard
    differentiable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run an operator under a strategy."""

    slot: int
    call: OpCall
    operands: tuple[int, ...]
    strategy: Strategy
    differentiable: bool
    grad: bool
    back: tuple[tuple[int, int, Reshard], ...] = ()
    """Operands that it writes to and that were moved: (slot moved to, slot it came from, the way
    back)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Overwrite operand ``operand`` with slot ``slot``."""

    operand: int
    slot: int
    grad: bool = True


@dataclass(frozen=True, slots=True)
class Out:
    """In the place of a tensor in the result.

    ``operand``: that operand itself is returned. ``alias``: the result shows that operand's memory
    where torch's does.
    """

    slot: int
    meta: Meta | None
    dtype: str
    operand: int | None = None
    alias: int | None = None


@dataclass(slots=True, kw_only=True)
class Schedule:
    """What a call does.

    Attributes:
        given: the operands.
        steps: moves, operators and stores, in order.
        result: the function's result with an :class:`Out` for every tensor.
        decided: for operands that had open axes: what they are from now on.
    """

    given: tuple[Given, ...]
    steps: list[Move | Run | Store] = field(default_factory=list)
    result: Any = None
    decided: dict[int, Meta] = field(default_factory=dict)


@dataclass(slots=True)
class _Slot:
    value: Value
    layout: Layout
    differentiable: bool
    open: tuple[int, ...] = ()


def plan(recording: Recording, given: Sequence[Given], chooser: Chooser) -> Schedule:
    """Choose a strategy for every operator of ``recording``, one after another."""
    return _Planner(recording, given, chooser).schedule


class _Planner:
    def __init__(self, recording: Recording, given: Sequence[Given], chooser: Chooser) -> None:
        self.chooser = chooser
        self.whole: Layout = (R,) * len(chooser.mesh)
        self.schedule = Schedule(given=tuple(given))
        self.slots: list[_Slot] = []
        self.of: dict[int, int] = {}
        self._moved: dict[tuple[int, Layout], int] = {}
        grad_on = recording.grad
        for value, g in zip(recording.inputs, given, strict=True):
            layout = g.meta.layout if g.meta is not None else self.whole
            open_axes = g.meta.open if g.meta is not None and g.requires_grad else ()
            if not g.requires_grad:
                layout = tuple(R if s is RP else s for s in layout)
            self.of[id(value)] = self._slot(_Slot(value, layout, g.requires_grad, open_axes))
        for step in recording.steps:
            if isinstance(step, Write):
                self._write(step)
            else:
                self._run(step, grad_on.get(id(step), True))
        self.schedule.result = self._result(recording.result)

    def _slot(self, slot: _Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def _decide(self, index: int, taken: Layout) -> None:
        """Fix the open axes of an operand as it is taken now."""
        slot = self.slots[index]
        if not slot.open:
            return
        slot.layout = tuple(
            RP if axis in slot.open and taken[axis] is not R else state
            for axis, state in enumerate(slot.layout)
        )
        slot.open = ()
        self.schedule.decided[index] = Meta(slot.layout, slot.value.shape)

    def move(self, index: int, target: Layout, differentiable: bool) -> int:
        """The slot that has the value of slot ``index`` in layout ``target``."""
        slot = self.slots[index]
        if not differentiable:
            target = forward_half(target)
        elif slot.open:
            self._decide(index, target)
        produced = slot.layout if differentiable else forward_half(slot.layout)
        if produced == target:
            return index
        key = (index, target if differentiable else ("forward", *target))
        found = self._moved.get(key)  # type: ignore[arg-type]
        if found is not None:
            return found
        size = itemsize(slot.value.dtype)
        reshard = self.chooser.resharder.edge(
            slot.value.shape, size, produced, target, differentiable
        )
        new = self._slot(_Slot(slot.value, target, differentiable))
        self.schedule.steps.append(
            Move(
                slot=new,
                source=index,
                shape=slot.value.shape,
                itemsize=size,
                produced=produced,
                target=target,
                reshard=reshard,
                differentiable=differentiable,
            )
        )
        self._moved[key] = new  # type: ignore[index]
        return new

    def _run(self, value: Value, grad: bool) -> None:
        call = op_call(value)
        rule = rule_or_none(value)
        indices = [self.of[id(v)] for v in value.operands]
        slots = [self.slots[i] for i in indices]
        differentiable = (
            grad
            and value.is_float
            and any(s.differentiable for s in slots)
            and call.family not in WITHOUT_GRADIENT
        )
        operands = [
            Operand(
                s.layout if s.differentiable and differentiable else forward_half(s.layout),
                s.differentiable and differentiable,
                s.open if differentiable else (),
            )
            for s in slots
        ]
        strategy = self.chooser.choose(
            call, rule, operands, dtype=value.dtype, differentiable=differentiable
        )
        taken = [
            self.move(i, layout, o.differentiable)
            for i, layout, o in zip(indices, strategy.operands, operands, strict=True)
        ]
        back = []
        for k in rule.mutates if rule is not None else ():
            if taken[k] != indices[k]:
                size = call.operand_itemsizes[k]
                reshard = self.chooser.resharder.edge(
                    call.shapes[k],
                    size,
                    forward_half(strategy.operands[k]),
                    forward_half(slots[k].layout),
                    False,
                )
                back.append((taken[k], indices[k], reshard))
                self._moved = {key: v for key, v in self._moved.items() if v != taken[k]}
        slot = self._slot(_Slot(value, strategy.result, differentiable))
        self.of[id(value)] = slot
        self.schedule.steps.append(
            Run(
                slot=slot,
                call=call,
                operands=tuple(taken),
                strategy=strategy,
                differentiable=differentiable,
                grad=grad,
                back=tuple(back),
            )
        )

    def _write(self, write: Write) -> None:
        target = self.slots[write.operand]
        source = self.of[id(write.value)]
        self._decide(write.operand, target.layout)
        new = self.slots[source]
        differentiable = new.differentiable and write.grad
        layout = target.layout if differentiable else forward_half(target.layout)
        slot = self.move(source, layout, differentiable)
        self.schedule.steps.append(Store(operand=write.operand, slot=slot, grad=write.grad))
        target.differentiable = target.differentiable or differentiable
        self._moved = {k: v for k, v in self._moved.items() if k[0] != write.operand}

    def _result(self, result: Any) -> Any:
        if isinstance(result, Made):
            if result.value is None:
                assert result.operand is not None
                dtype = self.slots[result.operand].value.dtype
                return Out(result.operand, None, dtype, operand=result.operand)
            index = self.of.get(id(result.value))
            if index is None:
                raise RequestError("a result that no operator made")
            slot = self.slots[index]
            layout = slot.layout if slot.differentiable else forward_half(slot.layout)
            self._decide(index, slot.layout)
            meta = Meta(layout, slot.value.shape, (), result.strides)
            return Out(index, meta, slot.value.dtype, alias=result.alias)
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*(self._result(v) for v in result))
        if type(result).__module__ == "torch.return_types":
            return type(result)([self._result(v) for v in result])
        if isinstance(result, (list, tuple)):
            return type(result)(self._result(v) for v in result)
        return result


__all__ = ["Given", "Move", "Out", "Run", "Schedule", "Store", "dtype_name", "plan"]
