"""How one value lies on a mesh: a state for each axis, and the arithmetic of cuts.

A value flows forward and its gradient flows back, so a state is a pair, forward/gradient.
Four pairs occur (and a value without gradient has the forward half only):

=========  ==========================================================================
``Cut``    cut along a dim, and so is its gradient
``R``      R/R: every device has it and computes the same with it
``RP``     R/P: every device has it and uses it on its own shard; each holds a summand
           of the gradient
``P``      P/R: each device holds a summand; the gradient of each is the whole gradient
=========  ==========================================================================

A cut views dim ``dim`` of the *global* shape as ``(outer, n, inner)`` and cuts ``n`` as
``torch.chunk`` does. A plain cut has ``outer == 1``; fused QKV, a flattened (batch, sequence),
heads of uneven count and two axes on one dim need the other numbers. In canonical form ``n``
is the axis size wherever the size divides it, so two nested cuts of one dim are told apart by
``outer`` alone and any axis can be removed first.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod


class Uncut(enum.Enum):
    """The states that do not cut; see the module's table."""

    R = "R"
    RP = "RP"
    P = "P"

    def __repr__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Cut:
    """Dim ``dim`` is viewed as (outer, n, inner) and ``n`` is cut over the axis."""

    dim: int
    outer: int
    n: int

    def __repr__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim}, {self.outer}, {self.n})"


R, RP, P = Uncut.R, Uncut.RP, Uncut.P
State = Uncut | Cut
Layout = tuple[State, ...]
Shape = tuple[int, ...]


def forward_half(layout: Layout) -> Layout:
    """The layout of the value itself: ``RP`` reads as ``R``."""
    return tuple(R if s is RP else s for s in layout)


def gradient_half(layout: Layout) -> Layout:
    """The layout of the value's gradient: ``RP`` reads as ``P``, and ``P`` as ``R``."""
    return tuple(P if s is RP else R if s is P else s for s in layout)


def chunk(n: int, parts: int, index: int) -> tuple[int, int]:
    """``(start, stop)`` of part ``index`` of ``n`` items, as ``torch.chunk`` cuts them.

    Parts are ``ceil(n / parts)`` long; the last ones may be shorter or empty.
    """
    step = -(-n // parts)
    start = min(index * step, n)
    return start, min(start + step, n)


def canonical(cut: Cut, size: int) -> Cut:
    """The one form of ``cut`` over an axis of ``size`` devices: ``n`` is ``size`` if it divides."""
    return Cut(cut.dim, cut.outer, size) if cut.n % size == 0 else cut


def disjoint(a: Cut, b: Cut) -> bool:
    """Whether two cuts of one dim can stand together: one lies wholly inside the other."""
    return b.outer % (a.outer * a.n) == 0 or a.outer % (b.outer * b.n) == 0


def compatible(layout: Layout) -> bool:
    """Whether every two cuts of one dim in ``layout`` can stand together."""
    cuts = [s for s in layout if isinstance(s, Cut)]
    return len(cuts) < 2 or all(
        a.dim != b.dim or disjoint(a, b) for i, a in enumerate(cuts) for b in cuts[i + 1 :]
    )


def fits(cut: Cut, shape: Shape) -> bool:
    """Whether ``cut`` names an existing dim and its (outer, n) divide the dim's size."""
    return 0 <= cut.dim < len(shape) and shape[cut.dim] % (cut.outer * cut.n) == 0


@dataclass(frozen=True, slots=True)
class Radix:
    """One dim of a tensor as a product of digits, outermost first.

    ``axes[i]`` is the mesh axis (its index) that cuts digit ``i``, or None. ``sizes`` are the
    global digits; ``product(sizes)`` is the dim's size.
    """

    sizes: tuple[int, ...]
    axes: tuple[int | None, ...]

    def local_sizes(self, mesh: Shape, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The digits as the device at ``coordinate`` holds them."""
        return tuple(
            size if axis is None else length(size, mesh[axis], coordinate[axis])
            for size, axis in zip(self.sizes, self.axes, strict=True)
        )


def length(n: int, parts: int, index: int) -> int:
    """How many of ``n`` items part ``index`` of ``parts`` holds."""
    start, stop = chunk(n, parts, index)
    return stop - start


def radix(size: int, dim: int, layout: Layout) -> Radix:
    """Dim ``dim`` of global ``size`` as digits, with the axes of ``layout`` that cut them."""
    cuts = sorted(
        (
            (s.outer, axis, s.n)
            for axis, s in enumerate(layout)
            if isinstance(s, Cut) and s.dim == dim
        )
    )
    sizes: list[int] = []
    axes: list[int | None] = []
    done = 1
    for outer, axis, n in cuts:
        if outer % done:
            raise ValueError(f"cuts of dim {dim} (size {size}) overlap: {layout}")
        sizes += [outer // done, n]
        axes += [None, axis]
        done = outer * n
    if size % done:
        raise ValueError(f"cuts of dim {dim} do not divide its size {size}: {layout}")
    return Radix((*sizes, size // done), (*axes, None))


def local_shape(shape: Shape, layout: Layout, mesh: Shape, coordinate: Sequence[int]) -> Shape:
    """Shape of the shard that the device at ``coordinate`` holds.

    Args:
        shape: the global shape.
        layout: one state an axis.
        mesh: axis sizes.
        coordinate: the device's place on each axis.
    """
    if not any(isinstance(s, Cut) for s in layout):
        return shape
    return tuple(
        prod(radix(size, dim, layout).local_sizes(mesh, coordinate))
        for dim, size in enumerate(shape)
    )


def largest_shape(shape: Shape, layout: Layout, mesh: Shape) -> Shape:
    """Shape of the largest shard, that of the device at coordinate 0 of every axis."""
    return local_shape(shape, layout, mesh, (0,) * len(mesh))


def local_cut(
    cut: Cut, shape: Shape, others: Layout, mesh: Shape, coordinate: Sequence[int]
) -> Cut:
    """``cut`` in terms of a tensor that the cuts in ``others`` have already been applied to.

    ``others`` has no cut on the axis of ``cut``. Digits outside ``cut`` shrink to this device's
    share, so only ``outer`` changes.
    """
    dim = radix(shape[cut.dim], cut.dim, others)
    outer, done = 1, 1
    for size, axis in zip(dim.sizes, dim.axes, strict=True):
        if done == cut.outer:
            break
        take = min(size, cut.outer // done) if axis is None else size
        done *= take
        outer *= take if axis is None else length(size, mesh[axis], coordinate[axis])
    if done != cut.outer:
        raise ValueError(f"{cut} overlaps {others}")
    return Cut(cut.dim, outer, cut.n)


def coordinates(mesh: Shape) -> Iterable[tuple[int, ...]]:
    """Every coordinate of a mesh, in rank order (row-major)."""
    index = [0] * len(mesh)
    for _ in range(prod(mesh)):
        yield tuple(index)
        for axis in reversed(range(len(mesh))):
            index[axis] += 1
            if index[axis] < mesh[axis]:
                break
            index[axis] = 0


def coordinate_of(rank: int, mesh: Shape) -> tuple[int, ...]:
    """Coordinate of the ``rank``-th device of a mesh in row-major order."""
    out = []
    for size in reversed(mesh):
        out.append(rank % size)
        rank //= size
    return tuple(reversed(out))
