"""Collectives as values: what a device issues, over which axes, with how many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
MessageOp = CollectiveOp | Literal["send_recv"]
MESSAGE_OPS: tuple[MessageOp, ...] = (*get_args(CollectiveOp), "send_recv")
"""A collective, or a message from each member of a group to the next one."""
Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One message as one device issues it.

    Attributes:
        op: torch's spelling.
        axes: mesh axes whose devices take part; several are one merged group.
        num_bytes: all_reduce: the tensor that every device holds; all_gather: the gathered result;
            reduce_scatter: the tensor that goes in; all_to_all: this device's tensor. Padding of
            uneven cuts included. Per device.
        phase: which half of the step issues it.
        value: the value of the graph whose data moves; for a fused message, the first one.
    """

    op: CollectiveOp
    axes: tuple[str, ...]
    num_bytes: int
    phase: Phase
    value: str

    @property
    def key(self) -> tuple[str, tuple[str, ...], int]:
        """What must agree between a predicted and an issued collective."""
        return self.op, self.axes, self.num_bytes

    def __str__(self) -> str:
        over = " x ".join(self.axes)
        return f"{self.op} {self.num_bytes:,} bytes over {over} ({self.phase}, {self.value})"


CollectiveSeconds = Callable[[CollectiveOp, tuple[int, ...], int], float]
"""Seconds of one collective: (op, mesh axes by index, bytes as in ``Collective.num_bytes``)."""
