"""What was measured: an operator, an update, a message, and the seconds that it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, TypeVar

from autoshard.search.roofline import Phase
from autoshard.search.work import Pass
from autoshard.sharding.collective import MessageOp
from autoshard.sharding.layout import Shape

SMALL_BYTES = 16 << 10
"""An operator that moves less than this costs its launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorReading:
    """One pass of one operator.

    Attributes:
        name: for people.
        family: as the cost model counts it (``aten.tanh``, ``autoshard.bias``, ...).
        phase: forward or backward.
        work: what its kernels do.
        dtype: that it computes in.
        itemsize: bytes of an element.
        seconds: of one call.
    """

    name: str
    family: str
    phase: Phase
    work: Pass
    dtype: str
    itemsize: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """Something that a step does beside its operators.

    Attributes:
        kind: ``copy``: a long copy; ``update``: an optimizer's update; ``gradients``: fused ones
            copied into their message and back; ``step``: a step of next to nothing.
        num_bytes: that it reads and writes at least.
        tensors: how many it works on.
        launches: kernels that are known.
        seconds: that it took.
    """

    kind: Literal["copy", "update", "gradients", "step"]
    num_bytes: int
    tensors: int
    launches: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapReading:
    """Computing and a message, each by itself and both at once.

    Attributes:
        computing_s: alone.
        message_s: alone.
        seconds: together.
    """

    computing_s: float
    message_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReading:
    """How much longer a small message takes after long computing than after short.

    Attributes:
        computing_s: by which the long one is longer.
        seconds: by which the message is.
    """

    computing_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReading:
    """One collective between two pieces of computing.

    Attributes:
        op: which one.
        mesh: sizes of the mesh.
        axes: that it goes over.
        num_bytes: as ``Collective`` counts them.
        alone: whether the first group alone sent, all others being idle.
        seconds: that it took.
    """

    op: MessageOp
    mesh: Shape
    axes: tuple[int, ...]
    num_bytes: int
    alone: bool = False
    seconds: float


R = TypeVar("R", OperatorReading, StepReading, OverlapReading, WaitReading, MessageReading)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """All of one process, or the means over all processes."""

    operators: tuple[OperatorReading, ...]
    steps: tuple[StepReading, ...]
    messages: tuple[MessageReading, ...] = ()
    overlaps: tuple[OverlapReading, ...] = ()
    waits: tuple[WaitReading, ...] = ()


def joined(each: Sequence[Readings]) -> Readings:
    """The mean over processes; all of them measured the same things in the same order."""
    return Readings(
        operators=_means([r.operators for r in each]),
        steps=_means([r.steps for r in each]),
        messages=_means([r.messages for r in each]),
        overlaps=_means([r.overlaps for r in each]),
        waits=_means([r.waits for r in each]),
    )


def _means(rows: Sequence[tuple[R, ...]]) -> tuple[R, ...]:
    return tuple(
        replace(same[0], seconds=fmean(r.seconds for r in same)) for same in zip(*rows, strict=True)
    )
