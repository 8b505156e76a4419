"""Which mesh axes cut which dims of a tensor: partition specs and sharding specs.

    P("data", None)             dim 0 is cut over axis "data", dim 1 is whole
    P(("data", "model"))        dim 0 is cut over "data", and each piece over "model"
    P()                         whole: every device has all of it

A dim of size ``n`` over an axis of size ``k`` is cut as ``torch.chunk`` cuts it: pieces of
``ceil(n / k)``, the last ones shorter or empty. Any size is legal, also one smaller than the axis.
Where several axes cut one dim, every one but the last must divide what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from autoshard.errors import SpecError
from autoshard.sharding.layout import (
    Cut,
    Layout,
    R,
    Shape,
    State,
    canonical,
    chunk,
    compatible,
    fits,
    local_shape,
)
from autoshard.sharding.layout import (
    P as PARTIAL,
)
from autoshard.sharding.mesh import DeviceMesh

Entry: TypeAlias = str | tuple[str, ...] | None
"""What cuts one dim: nothing, an axis, or several axes, outermost first."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class PartitionSpec:
    """For each dim of a tensor the axes that cut it; dims that are not named are whole.

    ``PartitionSpec("data", None)``, ``PartitionSpec(("data", "model"))``, ``PartitionSpec()``.
    ``("data",)`` reads as ``"data"`` and ``()`` as ``None``.

    Raises:
        SpecError: an entry is not None, an axis name or a tuple of axis names.
    """

    entries: tuple[Entry, ...]

    def __init__(self, *entries: str | Iterable[str] | None) -> None:
        object.__setattr__(
            self, "entries", tuple(_entry(dim, entry) for dim, entry in enumerate(entries))
        )

    def axes(self, dim: int) -> tuple[str, ...]:
        """The axes that cut ``dim``, outermost first."""
        entry = self.entries[dim] if dim < len(self.entries) else None
        return () if entry is None else (entry,) if isinstance(entry, str) else entry

    @property
    def names(self) -> tuple[str, ...]:
        """Every axis that cuts a dim, in order of dims."""
        return tuple(name for dim in range(len(self.entries)) for name in self.axes(dim))

    def replace(self, dim: int, entry: Entry) -> PartitionSpec:
        """The same spec with another entry for ``dim``."""
        padded = [*self.entries, *(None,) * (dim + 1 - len(self.entries))]
        padded[dim] = entry
        return PartitionSpec(*padded)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, dim: int) -> Entry:
        return self.entries[dim]

    def __str__(self) -> str:
        """``P("data", None)``, as messages and tables write it."""
        return f"P({', '.join(_entry_text(e) for e in self.entries)})"

    def __repr__(self) -> str:
        return f"PartitionSpec({str(self)[2:-1]})"


P = PartitionSpec
"""Short for :class:`PartitionSpec`."""


def _entry(dim: int, entry: str | Iterable[str] | None) -> Entry:
    if entry is None or (isinstance(entry, str) and entry):
        return entry
    try:
        axes = () if isinstance(entry, str) else tuple(entry)
    except TypeError:
        axes = ("",)
    if isinstance(entry, str) or not all(isinstance(a, str) and a for a in axes):
        raise SpecError(
            f"entry {dim} of a partition spec is {entry!r}; give None (the dim is whole), an axis "
            'name, or a tuple of axis names, outermost first: P("data", None)'
        )
    return axes[0] if len(axes) == 1 else axes or None


def _entry_text(entry: Entry) -> str:
    if entry is None:
        return "None"
    if isinstance(entry, str):
        return f'"{entry}"'
    return f"({', '.join(_entry_text(e) for e in entry)})"


@dataclass(frozen=True, slots=True, repr=False)
class ShardingSpec:
    """How a tensor lies on a mesh.

    Attributes:
        mesh: the devices.
        partition_spec: the axes that cut each dim.
        partial: axes over which each device holds a summand; for results.
        cuts: the exact cut of each axis of a dim that ``partition_spec`` alone does not tell:
            strided cuts, as of fused projections, and whole heads of uneven count. Made by
            :meth:`from_layout`; left empty by hand.

    Raises:
        SpecError: an axis is unknown or used twice.
    """

    mesh: DeviceMesh
    partition_spec: PartitionSpec = PartitionSpec()
    partial: tuple[str, ...] = ()
    cuts: tuple[tuple[str, Cut], ...] = ()

    def __post_init__(self) -> None:
        """Check types, that axes exist, and that each is used once."""
        if not isinstance(self.mesh, DeviceMesh):
            raise SpecError(
                f"mesh is {self.mesh!r}; give a DeviceMesh: ShardingSpec(mesh, PartitionSpec(...))"
            )
        if not isinstance(self.partition_spec, PartitionSpec):
            raise SpecError(
                f"partition_spec is {self.partition_spec!r}; give a PartitionSpec: "
                "ShardingSpec(mesh, PartitionSpec(...))"
            )
        partial = (self.partial,) if isinstance(self.partial, str) else tuple(self.partial)
        object.__setattr__(self, "partial", partial)
        used: dict[str, str] = {}
        places = [(a, f"dim {d}") for d in range(len(self.partition_spec)) for a in self._axes(d)]
        for name, place in [*places, *((a, "partial") for a in partial)]:
            if name not in self.mesh.axis_names:
                raise SpecError(
                    f"{self.partition_spec if place != 'partial' else f'partial={partial}'} names "
                    f"axis {name!r}, which the mesh does not have; it has {self.mesh.describe()}"
                )
            if name in used:
                raise SpecError(self._twice(name, used[name], place))
            used[name] = place
        for name, cut in self.cuts:
            if used.get(name) != f"dim {cut.dim}":
                raise SpecError(
                    f"cuts says {cut} for axis {name!r}, but {self.partition_spec} does not cut "
                    f"dim {cut.dim} over it; make such a spec with ShardingSpec.from_layout"
                )

    def _axes(self, dim: int) -> tuple[str, ...]:
        return self.partition_spec.axes(dim)

    def _twice(self, name: str, first: str, second: str) -> str:
        spec = self.partition_spec
        if second == "partial":
            if first == "partial":
                return f"axis {name!r} occurs twice in partial={self.partial}; give it once"
            return (
                f"axis {name!r} cuts {first} of {spec} and is partial; an axis does one of both: "
                f"leave it out of partial, or leave {first} whole"
            )
        places = sorted({int(p.split()[1]) for p in (first, second)})
        options = []
        for keep in places:
            choice = spec
            for dim in places:
                axes = tuple(a for a in spec.axes(dim) if a != name)
                choice = choice.replace(dim, (*axes, name) if dim == keep else axes)
            options.append(str(choice))
        where = f"{first} and {second}" if first != second else f"{first} twice"
        return (
            f"axis {name!r} cuts {where} in {spec}; an axis cuts one dim, once: choose "
            f"{' or '.join(options)}"
        )

    # ---- fit --------------------------------------------------------------------------------

    def check_mesh(self, mesh: DeviceMesh, *, name: str = "") -> None:
        """Check that this is a spec of ``mesh``.

        Args:
            mesh: the mesh that is used.
            name: what the spec is of, for the message.

        Raises:
            SpecError: it is a spec of another mesh.
        """
        if self.mesh != mesh:
            raise SpecError(
                f"the sharding spec{f' of {name}' if name else ''} is of mesh {self.mesh!r}, "
                f"but the mesh in use is {mesh!r}; make all specs with one mesh"
            )

    def validate(self, shape: Sequence[int], *, name: str = "", dtype: str = "") -> None:
        """Check that a tensor of ``shape`` can be cut so.

        An axis larger than its dim is legal: the last devices hold empty shards.

        Args:
            shape: the global shape.
            name: of the tensor, for the message.
            dtype: of the tensor, for the message.

        Raises:
            SpecError: the spec names more dims than there are, or the axes before the last of
                a dim do not divide it; the message names dim, size, axes and the choices.
        """
        shape = tuple(shape)
        what = tensor_text(shape, dtype, name)
        if len(self.partition_spec) > len(shape):
            kept = PartitionSpec(*self.partition_spec.entries[: len(shape)])
            have = (
                "it is a scalar"
                if not shape
                else f"it has {_count(len(shape), 'dim')} "
                f"({', '.join(f'dim {d}: size {s}' for d, s in enumerate(shape))})"
            )
            raise SpecError(
                f"{self.partition_spec} names {_count(len(self.partition_spec), 'dim')} of {what}, "
                f"but {have}; give one entry a dim, at most: {kept}"
            )
        exact = {name for name, _ in self.cuts}
        for dim, size in enumerate(shape):
            axes = [a for a in self._axes(dim) if self.mesh.axis_size(a) > 1 and a not in exact]
            left = size
            for axis in axes[:-1]:
                if left % self.mesh.axis_size(axis):
                    raise SpecError(self._indivisible(dim, size, axes, axis, left, what, shape))
                left //= self.mesh.axis_size(axis)
        for axis_name, cut in self.cuts:
            if not fits(cut, shape):
                raise SpecError(
                    f"axis {axis_name!r} cuts dim {cut.dim} of {what} as {cut.outer} x {cut.n} x "
                    f"rest, which does not divide its size; make the spec for this shape: "
                    "ShardingSpec.from_layout(mesh, layout, shape)"
                )

    def _indivisible(
        self, dim: int, size: int, axes: list[str], axis: str, left: int, what: str, shape: Shape
    ) -> str:
        spec = self.partition_spec
        sizes = self.mesh.axis_sizes
        over = ", then ".join(f"axis {a!r} (size {sizes[a]})" for a in axes)
        # The one that divides nothing goes last; nothing else can be said to help.
        last = (*(a for a in axes if a != axis), axis)
        options: list[Entry] = [last] if size % prod(sizes[a] for a in last[:-1]) == 0 else []
        options += list(axes)
        texts = [str(_padded(spec.replace(dim, o), len(shape))) for o in options]
        return (
            f"dim {dim} of {what} is cut over {over}, but {left} does not divide by {sizes[axis]}, "
            f"and only the last axis of a dim may cut it unevenly; choose {' or '.join(texts)}, "
            f"or leave dim {dim} whole: {_padded(spec.replace(dim, None), len(shape))}"
        )

    # ---- shards -----------------------------------------------------------------------------

    def layout(self, shape: Sequence[int]) -> Layout:
        """The state of the tensor on each axis of the mesh, in canonical form.

        An axis of size 1 cuts nothing and reads as ``R``.

        Raises:
            SpecError: see :meth:`validate`.
        """
        shape = tuple(shape)
        self.validate(shape)
        states: dict[str, State] = dict.fromkeys(self.partial, PARTIAL)
        states.update(self.cuts)
        for dim, size in enumerate(shape):
            axes = [a for a in self._axes(dim) if self.mesh.axis_size(a) > 1 and a not in states]
            outer, left = 1, size
            for axis in axes:
                parts = self.mesh.axis_size(axis)
                n = left if axis == axes[-1] else parts
                states[axis] = canonical(Cut(dim, outer, n), parts)
                outer, left = outer * parts, left // parts
        return tuple(
            states.get(name, R) if parts > 1 else R for name, parts in self.mesh.axis_sizes.items()
        )

    def shard_shape(self, shape: Sequence[int], coordinate: Sequence[int] | None = None) -> Shape:
        """Shape of the shard at ``coordinate``; by default the largest one.

        Raises:
            SpecError: see :meth:`validate`.
        """
        where = tuple(coordinate) if coordinate is not None else (0,) * len(self.mesh.shape)
        self.mesh.rank_at(where)
        return local_shape(tuple(shape), self.layout(shape), self.mesh.shape, where)

    def shard_indices(self, shape: Sequence[int], rank: int) -> tuple[tuple[int, ...], ...]:
        """For each dim the global indices that ``rank`` holds, in the order it holds them.

        Raises:
            SpecError: see :meth:`validate`.
        """
        shape = tuple(shape)
        layout, where = self.layout(shape), self.mesh.coordinate(rank)
        out = []
        for dim, size in enumerate(shape):
            held = range(size)
            kept: Iterable[int] = held
            for axis, state in enumerate(layout):
                if isinstance(state, Cut) and state.dim == dim and size:
                    start, stop = chunk(state.n, self.mesh.shape[axis], where[axis])
                    inner = size // (state.outer * state.n)
                    kept = [i for i in kept if start <= i // inner % state.n < stop]
            out.append(tuple(kept))
        return tuple(out)

    def shard_slices(self, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """For each dim the slice of the global tensor that ``rank`` holds.

        Raises:
            SpecError: see :meth:`validate`; or a strided cut, whose shards are no slices.
        """
        out = []
        for dim, held in enumerate(self.shard_indices(shape, rank)):
            if held and held[-1] - held[0] + 1 != len(held):
                raise SpecError(
                    f"dim {dim} is cut in strides ({dict(self.cuts)}), so that device {rank} does "
                    "not hold one slice of it; use shard_indices"
                )
            out.append(slice(held[0], held[-1] + 1) if held else slice(0, 0))
        return tuple(out)

    # ---- layouts ----------------------------------------------------------------------------

    @classmethod
    def from_layout(cls, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> ShardingSpec:
        """The spec of a value whose state on each axis is ``layout``.

        A cut that a partition spec cannot tell (strided, or in units larger than one element that
        the axis does not divide) is kept exactly, in ``cuts``.

        Raises:
            SpecError: the layout has another number of axes, or does not fit the shape.
        """
        shape = tuple(shape)
        if len(layout) != len(mesh.shape):
            raise SpecError(
                f"layout {layout} has {_count(len(layout), 'state')}, the mesh has "
                f"{mesh.describe()}; give one state an axis"
            )
        if bad := [s for s in layout if isinstance(s, Cut) and not fits(s, shape)]:
            raise SpecError(
                f"{bad[0]} does not fit {list(shape)}: dim {bad[0].dim} must exist and divide by "
                f"{bad[0].outer} x {bad[0].n}"
            )
        if not compatible(layout):
            raise SpecError(f"two cuts of one dim overlap in {layout}")
        by_name = dict(zip(mesh.axis_names, layout, strict=True))
        cuts = {
            name: canonical(s, mesh.axis_size(name))
            for name, s in by_name.items()
            if isinstance(s, Cut) and mesh.axis_size(name) > 1
        }
        entries: list[tuple[str, ...]] = []
        for dim in range(len(shape)):
            here = [name for name, cut in cuts.items() if cut.dim == dim]
            entries.append(tuple(sorted(here, key=lambda name: (cuts[name].outer, cuts[name].n))))
        while entries and not entries[-1]:
            entries.pop()
        partial = tuple(name for name, s in by_name.items() if s is PARTIAL)
        plain = cls(mesh, PartitionSpec(*entries), partial)
        exact: list[tuple[str, Cut]] = []
        for dim, axes in enumerate(entries):
            if not _is_plain(mesh, axes, cuts, shape[dim]):
                exact += [(name, cuts[name]) for name in axes]
        return cls(mesh, plain.partition_spec, partial, tuple(exact))

    def __repr__(self) -> str:
        more = f", partial={self.partial!r}" if self.partial else ""
        if self.cuts:
            texts = [f"({n!r}, Cut({c.dim}, {c.outer}, {c.n}))" for n, c in self.cuts]
            more += f", cuts=({', '.join(texts)},)"
        return f"ShardingSpec({self.mesh!r}, {self.partition_spec!r}{more})"


def _is_plain(mesh: DeviceMesh, axes: tuple[str, ...], cuts: dict[str, Cut], size: int) -> bool:
    """Whether cutting the dim over ``axes`` in turn, as torch.chunk does, gives just ``cuts``."""
    outer, left = 1, size
    for name in axes:
        parts = mesh.axis_size(name)
        n = left if name == axes[-1] else parts
        uneven = left % parts > 0 and name != axes[-1]
        if uneven or cuts[name] != canonical(Cut(cuts[name].dim, outer, n), parts):
            return False
        outer, left = outer * parts, left // parts
    return True


def _padded(spec: PartitionSpec, rank: int) -> PartitionSpec:
    return PartitionSpec(*spec.entries, *(None,) * (rank - len(spec)))


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


SHORT_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
}
"""Dtypes as tables and messages write them."""


def tensor_text(shape: Sequence[int], dtype: str = "", name: str = "") -> str:
    """``embed.weight f32[16, 10]``."""
    body = f"{SHORT_DTYPES.get(dtype, dtype)}[{', '.join(map(str, shape))}]"
    return f"{name} {body}" if name else body
