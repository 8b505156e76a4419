"""Where an operator runs: its call, the layouts of its strategy, and this device's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from autoshard.errors import RuleError
from autoshard.sharding.collective import Phase
from autoshard.sharding.layout import Cut, Layout, Shape, local_shape
from autoshard.sharding.registry import AttrValue, OpCall

Local = Callable[..., Tensor]
"""What one device runs: its shards of the operands in, its shard of the result out."""


class Reducer(Protocol):
    """Issues the collectives inside operators (``Rule.internal``)."""

    def all_reduce(
        self,
        tensor: Tensor,
        op: Literal["sum", "max"],
        axes: tuple[int, ...],
        phase: Phase,
        value: str,
    ) -> Tensor:
        """``tensor`` reduced over all devices that differ on ``axes`` (ascending indices) only.

        Several axes are one message over the merged group. ``tensor`` is contiguous, needs no
        gradient and is the callee's to overwrite. ``value`` names the operator's result.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Site:
    """One operator on one device.

    Attributes:
        call: the operator with global shapes.
        operands: layout that each operand is taken in.
        result: layout of the result.
        mesh: axis sizes.
        coordinate: the device's place on each axis.
        reducer: issues the collectives inside the operator.
        value: name of the result, for the reducer.
        device: where an operator without operands makes its result.
    """

    call: OpCall
    operands: tuple[Layout, ...]
    result: Layout
    mesh: Shape
    coordinate: tuple[int, ...]
    reducer: Reducer | None = None
    value: str = ""
    device: torch.device | None = None

    @cached_property
    def operand_shapes(self) -> tuple[Shape, ...]:
        """Local shape of each operand."""
        return tuple(
            local_shape(shape, layout, self.mesh, self.coordinate)
            for shape, layout in zip(self.call.shapes, self.operands, strict=True)
        )

    @cached_property
    def result_shape(self) -> Shape:
        """Local shape of the result."""
        return local_shape(self.call.result, self.result, self.mesh, self.coordinate)

    def axes_cutting(self, operand: int, dims: Sequence[int]) -> tuple[int, ...]:
        """Mesh axes that cut one of ``dims`` of an operand."""
        layout = self.operands[operand]
        return tuple(a for a, s in enumerate(layout) if isinstance(s, Cut) and s.dim in dims)

    def operand(self, role: str) -> int | None:
        """Index of the operand with ``role``, or None."""
        return self.call.roles.index(role) if role in self.call.roles else None

    def the_reducer(self) -> Reducer:
        """The reducer, which this operator needs here.

        Raises:
            RuleError: none was given.
        """
        if self.reducer is None:
            raise RuleError(
                f"{self.call.op} reduces over the mesh here and no reducer was given; "
                "pass local_call(..., reducer=...)"
            )
        return self.reducer

    def attr(self, name: str, default: AttrValue = None) -> AttrValue:
        """An attribute of the call, or ``default``."""
        return self.call.attrs.get(name, default)


Adaptor = Callable[[Site], Local]
ADAPTORS: dict[str, Adaptor] = {}


def local_for(*families: str) -> Callable[[Adaptor], Adaptor]:
    """Register the decorated function as what a device runs for operator families."""

    def register(function: Adaptor) -> Adaptor:
        for family in families:
            if family in ADAPTORS:
                raise RuleError(f"{family} already has a local form: {ADAPTORS[family].__name__}")
            ADAPTORS[family] = function
        return function

    return register
