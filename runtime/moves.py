"""Moving a value from one layout to another, and its gradient back.

All kinds of cut, plain, strided and nested, go one way: the local tensor is viewed as the digits
of its dims (:func:`autoshard.sharding.layout.radix`), each cut digit is padded to equal parts,
and a group's ranks become dims in front::

    all_gather      [b, i]  ->  [ranks, b, i]  ->  [b, ranks, i]  ->  [b, ranks * i]
    reduce_scatter  [b, ranks * i]  ->  [b, ranks, i]  ->  [ranks, b, i]  ->  [b, i]
    all_to_all      [i, ranks * j]  ->  [ranks, i, j]  ->  [ranks, i, j]  ->  [ranks * i, j]

The arithmetic is done once for each (step, shape, mesh, coordinate) and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from autoshard.runtime.comm import Communicator
from autoshard.sharding.collective import Phase
from autoshard.sharding.layout import Cut, Layout, Shape, chunk, local_shape, radix
from autoshard.sharding.reshard import Step, padded


@dataclass(frozen=True, slots=True)
class _Digit:
    """A digit that one axis of a step cuts.

    Attributes:
        at: its place among the digits.
        n: its global size.
        parts: size of the axis.
        start: where this device's part begins.
        stop: where this device's part ends.
    """

    at: int
    n: int
    parts: int
    start: int
    stop: int

    @property
    def part(self) -> int:
        """Size of a part, padding included."""
        return padded(self.n, self.parts) // self.parts


def _digits(
    shape: Shape, layout: Layout, axes: Sequence[int], mesh: Shape, coordinate: Sequence[int]
) -> tuple[list[int], list[_Digit]]:
    """Local sizes of all digits, those that ``axes`` cut being whole; and these, by axis."""
    sizes: list[int] = []
    found: dict[int, _Digit] = {}
    for dim, size in enumerate(shape):
        for n, axis in zip(*_pair(size, dim, layout), strict=True):
            if axis is None:
                sizes.append(n)
                continue
            start, stop = chunk(n, mesh[axis], coordinate[axis])
            if axis in axes:
                found[axis] = _Digit(len(sizes), n, mesh[axis], start, stop)
                sizes.append(n)
            else:
                sizes.append(stop - start)
    return sizes, [found[axis] for axis in axes]


def _pair(size: int, dim: int, layout: Layout) -> tuple[Sequence[int], Sequence[int | None]]:
    digits = radix(size, dim, layout)
    return digits.sizes, digits.axes


def _front(rank: int, digits: Sequence[_Digit]) -> tuple[int, ...]:
    """Order of dims that brings parts to the front: parts stand before their digit so far."""
    places = [digit.at + sum(d.at < digit.at for d in digits) for digit in digits]
    return (*places, *(i for i in range(rank + len(digits)) if i not in places))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    back = [0] * len(order)
    for to, at in enumerate(order):
        back[at] = to
    return tuple(back)


def _grow(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """``tensor`` among zeros, at the start of each dim."""
    if tuple(tensor.shape) == tuple(sizes):
        return tensor
    out = tensor.new_zeros(sizes)
    at = out
    for dim, size in enumerate(tensor.shape):
        at = at.narrow(dim, 0, size)
    at.copy_(tensor)
    return out


def _split(sizes: Sequence[int], digits: Sequence[_Digit]) -> list[int]:
    """Sizes with each digit as (parts, part)."""
    by_place = {digit.at: digit for digit in digits}
    out: list[int] = []
    for at, size in enumerate(sizes):
        out += [by_place[at].parts, by_place[at].part] if at in by_place else [size]
    return out


def _replaced(sizes: Sequence[int], new: dict[int, int]) -> tuple[int, ...]:
    return tuple(new.get(at, size) for at, size in enumerate(sizes))


Prepared = Callable[[torch.Tensor, Communicator, Phase, str], torch.Tensor]


@lru_cache(maxsize=1 << 16)
def prepare(step: Step, shape: Shape, mesh: Shape, coordinate: tuple[int, ...]) -> Prepared:
    """``step`` as a function of the local tensor, for values of global ``shape``.

    The function never writes into its argument, and may return it or a view of it.
    """
    axes = step.axes
    source = local_shape(shape, step.before, mesh, coordinate)
    target = local_shape(shape, step.after, mesh, coordinate)
    match step.kind:
        case "all_reduce":

            def run(t: torch.Tensor, comm: Communicator, phase: Phase, value: str) -> torch.Tensor:
                copy = t.clone(memory_format=torch.contiguous_format)
                return comm.all_reduce(copy, "sum", axes, phase, value)

        case "mask":
            keeps = not any(coordinate[axis] for axis in axes)

            def run(t: torch.Tensor, comm: Communicator, phase: Phase, value: str) -> torch.Tensor:
                return t if keeps else torch.zeros_like(t, memory_format=torch.contiguous_format)

        case "slice":
            sizes, digits = _digits(shape, step.after, axes, mesh, coordinate)

            def run(t: torch.Tensor, comm: Communicator, phase: Phase, value: str) -> torch.Tensor:
                view = t.reshape(sizes)
                for digit in digits:
                    view = view.narrow(digit.at, digit.start, digit.stop - digit.start)
                return view.reshape(target)

        case "embed":
            sizes, digits = _digits(shape, step.before, axes, mesh, coordinate)

            def run(t: torch.Tensor, comm: Communicator, phase: Phase, value: str) -> torch.Tensor:
                out = t.new_zeros(sizes)
                at = out
                for digit in digits:
                    at = at.narrow(digit.at, digit.start, digit.stop - digit.start)
                at.copy_(t.reshape(at.shape))
                return out.view(target)

        case "all_gather":
            sizes, digits = _digits(shape, step.before, axes, mesh, coordinate)
            own = _replaced(sizes, {d.at: d.stop - d.start for d in digits})
            equal = _replaced(sizes, {d.at: d.part for d in digits})
            joined = _replaced(sizes, {d.at: d.part * d.parts for d in digits})
            order = _inverse(_front(len(sizes), digits))
            parts = tuple(d.parts for d in digits)
            cut = [d for d in digits if d.part * d.parts != d.n]

            def run(t: torch.Tensor, comm: Communicator, phase: Phase, value: str) -> torch.Tensor:
                buffer = _grow(t.reshape(own), equal).contiguous()
                whole = comm.all_gather(buffer, axes, phase, value)
                view = whole.view(*parts, *equal).permute(order).reshape(joined)
                for digit in cut:
                    view = view.narrow(digit.at, 0, digit.n)
                return view.reshape(target)

        case "reduce_scatter":
            sizes, digits = _digits(shape, step.after, axes, mesh, coordinate)
            equal = _replaced(sizes, {d.at: d.part * d.parts for d in digits})
            split = _split(equal, digits)
            order = _front(len(sizes), digits)
            group = prod(d.parts for d in digits)
            shard = _replaced(sizes, {d.at: d.part for d in digits})
            cut = [d for d in digits if d.stop - d.start != d.part]

            def run(t: torch.Tensor, comm: Communicator, phase: Phase, value: str) -> torch.Tensor:
                buffer = _grow(t.reshape(sizes), equal).view(split).permute(order).contiguous()
                view = comm.reduce_scatter(buffer.view(group, *shard), axes, phase, value)
                for digit in cut:
                    view = view.narrow(digit.at, 0, digit.stop - digit.start)
                return view.reshape(target)

        case "all_to_all":
            (axis,) = axes
            before, after = step.before[axis], step.after[axis]
            assert isinstance(before, Cut)
            assert isinstance(after, Cut)
            # Each of the two dims as digits of the layout that cuts it; both cuts are even.
            sizes = []
            places: dict[int, int] = {}
            for dim, size in enumerate(shape):
                layout = step.before if dim == before.dim else step.after
                for n, by in zip(*_pair(size, dim, layout), strict=True):
                    if by == axis:
                        places[dim] = len(sizes)
                        sizes.append(n // mesh[axis])
                    elif by is None:
                        sizes.append(n)
                    else:
                        start, stop = chunk(n, mesh[by], coordinate[by])
                        sizes.append(stop - start)
            gathered, scattered = places[before.dim], places[after.dim]
            ranks = mesh[axis]
            split = [*sizes[:scattered], ranks, *sizes[scattered:]]
            order = (scattered, *(i for i in range(len(split)) if i != scattered))
            back = [*range(1, gathered + 1), 0, *range(gathered + 1, len(split))]

            def run(t: torch.Tensor, comm: Communicator, phase: Phase, value: str) -> torch.Tensor:
                buffer = t.reshape(split).permute(order).contiguous()
                rows = comm.all_to_all(buffer, axes, phase, value)
                return rows.permute(back).reshape(target)

    def checked(t: torch.Tensor, comm: Communicator, phase: Phase, value: str) -> torch.Tensor:
        if tuple(t.shape) != source:
            raise ValueError(
                f"{step.kind} of {value or 'a value'}: shape {tuple(t.shape)} on the device at "
                f"{coordinate}, not {source}, the shard of {shape} by {step.before}"
            )
        return run(t, comm, phase, value)

    return checked


def apply_step(
    tensor: torch.Tensor,
    step: Step,
    shape: Shape,
    comm: Communicator,
    *,
    phase: Phase = "forward",
    value: str = "",
) -> torch.Tensor:
    """Take one step with this rank's part of a value.

    Every rank of the step's axes must take it. Not differentiable; see :func:`move`.

    Args:
        tensor: the local part, as ``step.before`` says; it is not written into, and the result
            may be a view of it.
        step: what to do.
        shape: global shape of the value.
        comm: the collectives.
        phase: for the recorder.
        value: for the recorder.
    """
    return prepare(step, shape, comm.mesh, comm.coordinate)(tensor, comm, phase, value)


def reshard(
    tensor: torch.Tensor,
    steps: Sequence[Step],
    shape: Shape,
    comm: Communicator,
    *,
    phase: Phase = "forward",
    value: str = "",
) -> torch.Tensor:
    """Take several steps, one after another; see :func:`apply_step`."""
    for step in steps:
        tensor = prepare(step, shape, comm.mesh, comm.coordinate)(tensor, comm, phase, value)
    return tensor


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mover: Mover) -> torch.Tensor:
        ctx.mover = mover
        out = mover.moved(tensor)
        return tensor.view_as(tensor) if out is tensor else out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # The gradient moves as a value whose own gradient goes the other way; without
        # create_graph, that is the plain reshard.
        return ctx.mover.reverse(gradients[0]), None


class Mover:
    """Moves a value by ``forward`` and, in the backward pass, its gradient by ``backward``.

    Without steps either way it gives its argument back. Differentiable any number of times. A
    result may share memory with the argument, which is never written into.

    Args:
        forward: steps of the value.
        backward: steps of its gradient.
        shape: global shape of the value.
        comm: the collectives.
        phase: for the recorder; the other one is that of ``backward``.
        value: for the recorder.
    """

    def __init__(
        self,
        forward: Sequence[Step],
        backward: Sequence[Step],
        shape: Shape,
        comm: Communicator,
        *,
        phase: Phase = "forward",
        value: str = "",
    ) -> None:
        self.forward, self.backward, self.shape = tuple(forward), tuple(backward), tuple(shape)
        self.comm, self.phase, self.value = comm, phase, value
        self._steps = [prepare(s, self.shape, comm.mesh, comm.coordinate) for s in self.forward]
        self._reverse: Mover | None = None

    @property
    def reverse(self) -> Mover:
        """The move of the gradient."""
        if self._reverse is None:
            self._reverse = Mover(
                self.backward,
                self.forward,
                self.shape,
                self.comm,
                phase="backward" if self.phase == "forward" else "forward",
                value=self.value,
            )
        return self._reverse

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value after the forward steps, not differentiable."""
        for step in self._steps:
            tensor = step(tensor, self.comm, self.phase, self.value)
        return tensor

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part, moved."""
        if not self.forward and not self.backward:
            return tensor
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return self.moved(tensor)
        out: torch.Tensor = _Move.apply(tensor, self)  # type: ignore[no-untyped-call]
        return out

    def __repr__(self) -> str:
        return f"Mover({self.value or self.shape}: {self.forward} / {self.backward})"


def move(
    tensor: torch.Tensor,
    forward: Sequence[Step],
    backward: Sequence[Step],
    shape: Shape,
    comm: Communicator,
    *,
    phase: Phase = "forward",
    value: str = "",
) -> torch.Tensor:
    """Move a value, and its gradient back; see :class:`Mover`, which is for many calls."""
    if not forward and not backward:
        return tensor
    return Mover(forward, backward, shape, comm, phase=phase, value=value)(tensor)
