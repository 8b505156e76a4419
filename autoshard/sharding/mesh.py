"""A mesh of devices: named axes, and the rank that stands at each place.

    mesh = DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=["data", "model"])

                 model 0   model 1
        data 0      0         1
        data 1      2         3

An *axis* is a direction of the mesh, a *dim* is a direction of a tensor. Devices stand in row-major
order: along the last axis they are nearest to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import index
from typing import Any, Protocol, TypeAlias

from autoshard.errors import MeshError
from autoshard.sharding.layout import Shape, coordinate_of


class HasToList(Protocol):
    """An array of integers: NumPy's, torch's, or alike."""

    def tolist(self) -> Any:
        """The array as nested lists."""


Devices: TypeAlias = Sequence[Any] | HasToList
"""Ranks as a nested list with one level an axis, or as an array of integers."""

LONG_MESH = 16
"""From this many devices on a mesh of ranks 0, 1, 2, ... is printed by its sizes."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class DeviceMesh:
    """Ranks on a grid with named axes.

    Args:
        devices: ranks as a nested list with one level an axis (or an array of integers);
            ``[0, 1, 2, 3]`` has one axis, ``[[0, 1], [2, 3]]`` two.
        axis_names: a name for each axis, outermost first.

    Attributes:
        axis_names: as given.
        shape: size of each axis.
        ranks: the ranks in row-major order.

    Raises:
        MeshError: the list is ragged or empty, a rank occurs twice, or names do not fit.
    """

    axis_names: tuple[str, ...]
    shape: Shape
    ranks: tuple[int, ...]

    def __init__(self, devices: Devices, axis_names: Iterable[str]) -> None:
        nested: Any = devices.tolist() if hasattr(devices, "tolist") else devices
        shape, ranks = _grid(nested)
        names = _names(axis_names)
        if len(names) != len(shape):
            raise MeshError(
                f"devices has {len(shape)} {'level' if len(shape) == 1 else 'levels'} "
                f"(shape {list(shape)}), axis_names has {len(names)}: {list(names)}; "
                "give one name for each level of the list, outermost first"
            )
        seen: dict[int, int] = {}
        for place, rank in enumerate(ranks):
            if rank in seen:
                raise MeshError(
                    f"device {rank} stands at {coordinate_of(seen[rank], shape)} and at "
                    f"{coordinate_of(place, shape)}; give every device once"
                )
            seen[rank] = place
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "ranks", ranks)

    @classmethod
    def of(cls, **sizes: int) -> DeviceMesh:
        """Ranks 0, 1, 2, ... on axes of the given sizes: ``DeviceMesh.of(data=4, model=2)``.

        Raises:
            MeshError: no axis, or a size that is not a positive integer.
        """
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"axis {name!r} has size {size!r}; give a whole number, at least 1")
        if not sizes:
            raise MeshError("a mesh needs an axis: DeviceMesh.of(data=4)")
        mesh = object.__new__(cls)
        object.__setattr__(mesh, "axis_names", tuple(sizes))
        object.__setattr__(mesh, "shape", tuple(sizes.values()))
        object.__setattr__(mesh, "ranks", tuple(range(prod(sizes.values()))))
        return mesh

    # ---- sizes ------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.ranks)

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """Size of each axis, by name, outermost first."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    @property
    def devices(self) -> list[Any]:
        """The ranks as a nested list with one level an axis."""
        rows: list[Any] = list(self.ranks)
        for size in reversed(self.shape[1:]):
            rows = [rows[i : i + size] for i in range(0, len(rows), size)]
        return rows

    def axis(self, name: str) -> int:
        """Position of the axis called ``name``.

        Raises:
            MeshError: no such axis; the message lists those there are.
        """
        try:
            return self.axis_names.index(name)
        except ValueError:
            raise MeshError(f"no axis {name!r}; the mesh has {self.describe()}") from None

    def axis_size(self, name: str) -> int:
        """Size of the axis called ``name``.

        Raises:
            MeshError: no such axis.
        """
        return self.shape[self.axis(name)]

    # ---- places -----------------------------------------------------------------------------

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` stands: an index on each axis.

        Raises:
            MeshError: the rank is not in the mesh.
        """
        try:
            return coordinate_of(self.ranks.index(rank), self.shape)
        except ValueError:
            raise MeshError(
                f"device {rank!r} is not in the mesh {self}; its devices: {_ranks_text(self.ranks)}"
            ) from None

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank that stands at ``coordinate``.

        Raises:
            MeshError: the coordinate lies outside the mesh.
        """
        where = tuple(coordinate)
        if len(where) != len(self.shape) or not all(
            0 <= i < size for i, size in zip(where, self.shape, strict=True)
        ):
            limits = ", ".join(
                f"{n} 0 to {s - 1}" for n, s in zip(self.axis_names, self.shape, strict=True)
            )
            raise MeshError(f"coordinate {where} is outside the mesh; it has {limits}")
        place = 0
        for i, size in zip(where, self.shape, strict=True):
            place = place * size + i
        return self.ranks[place]

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along ``axes``, outermost of ``axes`` first.

        ``DeviceMesh([[0, 1], [2, 3]], ["data", "model"]).groups(["data"])`` is
        ``((0, 2), (1, 3))``.

        Raises:
            MeshError: an axis is unknown.
        """
        along = [self.axis(name) for name in axes]
        fixed = [i for i in range(len(self.shape)) if i not in along]
        out = []
        for outside in product(*(range(self.shape[i]) for i in fixed)):
            group = []
            for inside in product(*(range(self.shape[i]) for i in along)):
                place = dict(zip((*fixed, *along), (*outside, *inside), strict=True))
                group.append(self.rank_at([place[i] for i in range(len(self.shape))]))
            out.append(tuple(group))
        return tuple(out)

    # ---- texts ------------------------------------------------------------------------------

    def describe(self) -> str:
        """``axes 'data' (size 4) and 'model' (size 2)``, for messages."""
        parts = [f"{n!r} (size {s})" for n, s in zip(self.axis_names, self.shape, strict=True)]
        if len(parts) == 1:
            return f"axis {parts[0]}"
        return f"axes {', '.join(parts[:-1])} and {parts[-1]}"

    def __str__(self) -> str:
        return ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))

    def __repr__(self) -> str:
        if self.size >= LONG_MESH and self.ranks == tuple(range(self.size)):
            if all(name.isidentifier() for name in self.axis_names):
                return f"DeviceMesh.of({self})"
            return f"DeviceMesh.of(**{dict(self.axis_sizes)!r})"
        return f"DeviceMesh(devices={self.devices!r}, axis_names={list(self.axis_names)!r})"


def _ranks_text(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= LONG_MESH:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))}, ..., {ranks[-1]} ({len(ranks)} devices)"


def _names(axis_names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(axis_names, str):
        raise MeshError(
            f"axis_names is the text {axis_names!r}; give a list of names: [{axis_names!r}]"
        )
    names = tuple(axis_names)
    for name in names:
        if not isinstance(name, str) or not name:
            raise MeshError(f"{name!r} is not an axis name; give non-empty texts")
    if twice := [n for i, n in enumerate(names) if n in names[:i]]:
        raise MeshError(
            f"axis name {twice[0]!r} occurs twice in {list(names)}; give each axis its own"
        )
    return names


def _grid(nested: Any) -> tuple[Shape, tuple[int, ...]]:
    """Shape and ranks of a nested list."""
    if not _is_list(nested):
        raise MeshError(
            f"devices is {nested!r}; give a list of ranks with one level an axis: [0, 1, 2, 3]"
        )
    shape: list[int] = []
    level: list[tuple[tuple[int, ...], Any]] = [((), nested)]
    while any(_is_list(item) for _, item in level):
        where, first = level[0]
        for here, item in level:
            if not _is_list(item) or not _is_list(first) or len(item) != len(first):
                raise MeshError(
                    f"devices is ragged: devices{_path(where)} {_count(first)}, "
                    f"devices{_path(here)} {_count(item)}; give lists of equal length"
                )
        if not first:
            raise MeshError(
                "devices is empty; give at least one rank: "
                'DeviceMesh(devices=[0], axis_names=["data"])'
            )
        shape.append(len(first))
        level = [((*here, i), item) for here, items in level for i, item in enumerate(items)]
    ranks = []
    for where, item in level:
        try:
            if isinstance(item, bool):
                raise TypeError
            rank = index(item)
        except TypeError:
            rank = -1
        if rank < 0:
            raise MeshError(
                f"devices{_path(where)} is {item!r}; give ranks: whole numbers, 0 or more"
            )
        ranks.append(rank)
    return tuple(shape), tuple(ranks)


def _is_list(item: Any) -> bool:
    return isinstance(item, Sequence) and not isinstance(item, str | bytes)


def _count(item: Any) -> str:
    return f"has {len(item)} entries" if _is_list(item) else f"is {item!r}"


def _path(where: tuple[int, ...]) -> str:
    return "".join(f"[{i}]" for i in where)
