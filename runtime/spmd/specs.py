"""What the caller said of shardings, checked against what is there, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from autoshard.errors import SpecError
from autoshard.sharding.layout import Layout, R, Shape
from autoshard.sharding.mesh import DeviceMesh
from autoshard.sharding.spec import PartitionSpec, ShardingSpec

Spec: TypeAlias = ShardingSpec | PartitionSpec | None
"""A spec; of a bare partition spec the mesh is that of ``spmd``; None: whole."""

InShardings: TypeAlias = Spec | Sequence[Any] | Mapping[str, Any] | None
"""One entry an argument, in order or by name; an entry is a spec or a container of specs."""

OutSharding: TypeAlias = Spec | Sequence[Spec] | None
ParameterShardings: TypeAlias = (
    Spec | Mapping[str, Spec] | Callable[[str, nn.Parameter], Spec] | None
)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a call, by the name that messages give it."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor or array among the arguments, and where its spec puts it."""

    name: str
    value: Any
    spec: ShardingSpec | None

    @property
    def layout(self) -> Layout | None:
        """Its layout, or None for whole."""
        return None if self.spec is None else layout_of(self.spec, tuple(self.value.shape))


def as_spec(entry: object, mesh: DeviceMesh, of: str) -> ShardingSpec | None:
    """``entry`` as a spec of ``mesh``.

    Raises:
        SpecError: it is none, or one of another mesh.
    """
    if entry is None:
        return None
    if isinstance(entry, PartitionSpec):
        try:
            return ShardingSpec(mesh, entry)
        except SpecError as error:
            raise SpecError(f"{of}: {error}") from None
    if isinstance(entry, ShardingSpec):
        entry.check_mesh(mesh, name=of)
        if entry.partial:
            raise SpecError(
                f"{of} is {entry!r}, with summands over {entry.partial}; a whole value has none: "
                "leave partial out"
            )
        return entry
    raise SpecError(
        f"{of} is {entry!r}; give a ShardingSpec of the mesh, a PartitionSpec, or None for whole"
    )


@lru_cache(maxsize=1 << 14)
def layout_of(spec: ShardingSpec, shape: Shape) -> Layout:
    """``spec.layout(shape)``, remembered; the spec fits."""
    return spec.layout(shape)


def is_array(value: object) -> bool:
    """Whether a spec can say how ``value`` is cut."""
    return isinstance(value, torch.Tensor | np.ndarray)


def dtype_text(value: Any) -> str:
    """``float32`` of a tensor or an array."""
    return str(value.dtype).removeprefix("torch.")


def arrays_in(value: object, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors and arrays in ``value``, a container or one of them, with their names."""
    if is_array(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from arrays_in(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", None)
        for index, item in enumerate(value):
            yield from arrays_in(item, f"{name}.{names[index]}" if names else f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if hasattr(value, field.name):
                yield from arrays_in(getattr(value, field.name), f"{name}.{field.name}")


# ---- arguments --------------------------------------------------------------------------------


def check_entries(entries: InShardings, mesh: DeviceMesh) -> None:
    """Check the entries of ``in_shardings`` as far as that is possible without arguments.

    Raises:
        SpecError: see :func:`as_spec`.
    """

    def check(entry: object, of: str) -> None:
        if isinstance(entry, Mapping):
            for key, item in entry.items():
                check(item, f"{of}[{key!r}]")
        elif isinstance(entry, list | tuple):
            for index, item in enumerate(entry):
                check(item, f"{of}[{index}]")
        else:
            as_spec(entry, mesh, of)

    check(entries, "in_shardings")


def place_arguments(
    entries: InShardings, arguments: Sequence[Argument], mesh: DeviceMesh
) -> list[Placed]:
    """Every tensor and array among the arguments, with its spec.

    Entries in a sequence belong, in order, to the arguments that are or contain tensors or arrays;
    or to all arguments, where there are as many entries and those of the others are None.

    Raises:
        SpecError: more entries than arguments, or a spec that does not fit; names the argument.
    """
    named: list[tuple[Argument, object]] = []
    if isinstance(entries, Mapping):
        known = {argument.name: argument for argument in arguments}
        for key in entries:
            if key not in known:
                raise SpecError(
                    f"in_shardings names {key!r}, which is not an argument of this call; its "
                    f"arguments are {_listed([a.name for a in arguments])}"
                )
        named = [(argument, entries.get(argument.name)) for argument in arguments]
    elif isinstance(entries, list | tuple):
        holders = [a for a in arguments if any(True for _ in arrays_in(a.value, a.name))]
        rest = [e for a, e in zip(arguments, entries, strict=False) if a not in holders]
        if len(entries) == len(arguments) and all(e is None for e in rest):
            holders = list(arguments)
        if len(entries) > len(holders):
            others = [f"{a.name!r} ({type(a.value).__name__})" for a in arguments]
            others = [text for text, a in zip(others, arguments, strict=True) if a not in holders]
            raise SpecError(
                f"in_shardings has {len(entries)} entries, but {len(holders)} "
                f"{'argument is or contains' if len(holders) == 1 else 'arguments are or contain'} "
                f"tensors or arrays: {_listed([a.name for a in holders])}"
                + (f"; none is for {', '.join(others)}" if others else "")
                + "; give at most one entry for each"
            )
        padded = [*entries, *[None] * (len(holders) - len(entries))]
        named = list(zip(holders, padded, strict=True))
        named += [(a, None) for a in arguments if a not in holders]
    else:
        named = [(argument, entries) for argument in arguments]
    placed: dict[int, Placed] = {}
    for argument, entry in named:
        for found in _place(entry, argument.value, argument.name, mesh):
            before = placed.setdefault(id(found.value), found)
            if before.spec is None:
                placed[id(found.value)] = found
            elif found.spec is not None and before.layout != found.layout:
                raise SpecError(
                    f"{before.name!r} and {found.name!r} are one tensor, but their specs differ: "
                    f"{before.spec.partition_spec} and {found.spec.partition_spec}; give one spec, "
                    "or pass a copy"
                )
    return list(placed.values())


def _place(entry: object, value: object, name: str, mesh: DeviceMesh) -> Iterator[Placed]:
    if isinstance(entry, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(entry):
            raise SpecError(
                f"in_shardings gives argument {name!r} a list of {len(entry)} specs, but it is "
                f"{_what(value)}; give one spec for all of it, or a container of the same form"
            )
        for index, (inner, item) in enumerate(zip(entry, value, strict=True)):
            yield from _place(inner, item, f"{name}[{index}]", mesh)
        return
    if isinstance(entry, Mapping):
        keys = set(value) if isinstance(value, Mapping) else set()
        if not isinstance(value, Mapping) or not set(entry) <= keys:
            missing = sorted(map(str, set(entry) - keys))
            raise SpecError(
                f"in_shardings names {_listed(missing)} in argument {name!r}, but it is "
                f"{_what(value)}; give one spec for all of it, or a container of the same form"
            )
        for key, item in value.items():
            yield from _place(entry.get(key), item, f"{name}[{key!r}]", mesh)
        return
    spec = as_spec(entry, mesh, f"argument {name!r}")
    is_empty = True
    for inner, array in arrays_in(value, name):
        is_empty = False
        if spec is not None:
            spec.validate(array.shape, name=f"argument {inner!r}", dtype=dtype_text(array))
        yield Placed(inner, array, spec)
    if is_empty and isinstance(entry, ShardingSpec | PartitionSpec) and _is_scalar(value):
        raise SpecError(
            f"argument {name!r} is {_what(value)}; a spec says how a tensor or an array is cut: "
            "give None for it, or leave it out"
        )


def _is_scalar(value: object) -> bool:
    return isinstance(value, bool | int | float | complex | str | np.generic)


def _what(value: object) -> str:
    if is_array(value):
        return f"a {type(value).__name__} of shape {list(value.shape)}"  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {_listed([str(k) for k in value])}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}, a {type(value).__name__}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


# ---- parameters -------------------------------------------------------------------------------


def parameter_layouts(
    given: ParameterShardings, modules: Sequence[tuple[str, nn.Module]], mesh: DeviceMesh
) -> list[dict[str, tuple[nn.Parameter, ShardingSpec]]]:
    """For each module the parameters that are cut, by name, with their specs.

    Args:
        given: a spec for all, specs by pattern of a name (the first that fits), or a function.
        modules: with the names that messages give them.
        mesh: the mesh in use.

    Raises:
        SpecError: a spec does not fit; names parameter, dim, sizes and choices.
    """
    if given is None:
        return [{} for _ in modules]
    unused = set(given) if isinstance(given, Mapping) else set()
    out: list[dict[str, tuple[nn.Parameter, ShardingSpec]]] = []
    for of, module in modules:
        found: dict[str, tuple[nn.Parameter, ShardingSpec]] = {}
        for name, parameter in module.named_parameters():
            entry, said_by = _entry(given, name, parameter, unused)
            label = f"parameter {name!r} of {of}"
            spec = as_spec(entry, mesh, f"{said_by} for {label}")
            if spec is None:
                continue
            shape = tuple(parameter.shape)
            try:
                spec.validate(shape, name=label, dtype=dtype_text(parameter))
            except SpecError as error:
                if isinstance(given, ShardingSpec | PartitionSpec):
                    raise SpecError(
                        f"{error}; to give each parameter its own spec, let parameter_shardings be "
                        "a dict of name patterns, or a function of (name, parameter)"
                    ) from None
                raise
            if any(state is not R for state in layout_of(spec, shape)):
                found[name] = parameter, spec
        out.append(found)
    if unused and modules:
        names = [name for _, module in modules for name, _ in module.named_parameters()]
        shown = _listed(names[:12]) + (f", ... ({len(names)})" if len(names) > 12 else "")
        raise SpecError(
            f"parameter_shardings has the pattern {_listed(sorted(unused))}, which fits no "
            f"parameter; the parameters are {shown}"
        )
    return out


def _entry(given: Any, name: str, parameter: nn.Parameter, unused: set[str]) -> tuple[object, str]:
    if isinstance(given, Mapping):
        entry: object = None
        said_by = "parameter_shardings"
        is_first = True
        for pattern, candidate in given.items():
            if fnmatchcase(name, pattern):
                unused.discard(pattern)
                if is_first:
                    entry, said_by = candidate, f"parameter_shardings[{pattern!r}]"
                    is_first = False
        return entry, said_by
    if isinstance(given, ShardingSpec | PartitionSpec):
        return given, "parameter_shardings"
    if callable(given):
        return given(name, parameter), f"parameter_shardings({name!r}, ...)"
    raise SpecError(
        f"parameter_shardings is {given!r}; give a spec, a dict of name patterns, or a function of "
        "(name, parameter)"
    )


def check_parameters(given: ParameterShardings, mesh: DeviceMesh) -> None:
    """Check ``parameter_shardings`` as far as that is possible without modules.

    Raises:
        SpecError: a spec of another mesh, or something that is none.
    """
    if isinstance(given, Mapping):
        for pattern, entry in given.items():
            if not isinstance(pattern, str):
                raise SpecError(
                    f"parameter_shardings has the key {pattern!r}; give patterns of names: "
                    '{"*.weight": spec}'
                )
            as_spec(entry, mesh, f"parameter_shardings[{pattern!r}]")
    elif not callable(given):
        as_spec(given, mesh, "parameter_shardings")


# ---- results ----------------------------------------------------------------------------------


class OutLayouts:
    """Layout of each tensor of a result, asked in order; goes along to the ranks."""

    def __init__(self, specs: ShardingSpec | tuple[ShardingSpec, ...]) -> None:
        self.specs, self.asked = specs, 0

    def __call__(self, shape: Shape) -> Layout:
        """Layout of the next tensor, whose shape is ``shape``.

        Raises:
            SpecError: its spec does not fit, or there is none.
        """
        number, self.asked = self.asked, self.asked + 1
        if isinstance(self.specs, ShardingSpec):
            spec = self.specs
        elif number >= len(self.specs):
            raise SpecError(
                f"out_sharding has {len(self.specs)} specs, but the result has more tensors; give "
                "one spec for all, or one for each in order"
            )
        else:
            spec = self.specs[number]
        try:
            return spec.layout(shape)
        except SpecError as error:
            raise SpecError(f"out_sharding does not fit result {number}: {error}") from None


def out_layouts(given: OutSharding, mesh: DeviceMesh) -> OutLayouts | None:
    """What the ranks need of ``out_sharding``.

    Raises:
        SpecError: see :func:`as_spec`.
    """
    if isinstance(given, list | tuple):
        specs = tuple(as_spec(entry, mesh, f"out_sharding[{i}]") for i, entry in enumerate(given))
        whole = ShardingSpec(mesh)
        return OutLayouts(tuple(whole if spec is None else spec for spec in specs))
    if isinstance(given, Mapping):
        raise SpecError(
            f"out_sharding is {given!r}; give one spec for all tensors of the result, or a list "
            "with one for each in order"
        )
    spec = as_spec(given, mesh, "out_sharding")
    return None if spec is None else OutLayouts(spec)
