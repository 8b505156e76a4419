"""Parameters that people say how to store, in the whole space, where no mesh is known yet.

A pin says for each dim of a parameter which of the axes ``data`` and ``model`` cut it, outermost
first; an axis that it does not name leaves the parameter whole. On a mesh without an axis (its size
is 1) what is said of that axis holds by itself. Along ``context`` a parameter is stored as along
``data`` where a mesh has both; ``replica`` and ``expert`` leave no choice.

Blocks are alike, so a pattern names a parameter in all blocks or in none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from autoshard.candidates import Candidates, Stored
from autoshard.errors import RequestError, RuleError, SpecError, UnknownNameError
from autoshard.exports.reading import listed, wildcard
from autoshard.graph import ModelGraph
from autoshard.search.inner import Prepared
from autoshard.search.space import AXES, USES, active
from autoshard.sharding.layout import Cut, Layout, Shape
from autoshard.sharding.spec import PartitionSpec

PINNED_AXES = ("data", "model")
"""Axes along which it is the search's choice how a parameter is stored."""

Patterns = Mapping[str, PartitionSpec]
"""Pattern of parameters' names -> how they are stored."""


def resolve(patterns: Patterns, graph: ModelGraph) -> dict[str, PartitionSpec]:
    """The spec of each parameter that a pattern names.

    Args:
        patterns: dotted names, ``*`` for any part; leading parts may be left out.
        graph: of a few blocks, or of all.

    Raises:
        UnknownNameError: a pattern names no parameter.
        RequestError: a pattern names a parameter of some blocks only, or two say different things.
        SpecError: a spec names an axis that is not one of :data:`PINNED_AXES`, or too many dims.
    """
    out: dict[str, PartitionSpec] = {}
    said_by: dict[str, str] = {}
    names = {name: name for name in graph.parameters} | dict(graph.aliases)
    for pattern, spec in patterns.items():
        _check_axes(pattern, spec)
        found = {own for name, own in names.items() if _matches(name, pattern)}
        if not found:
            known = dict.fromkeys(wildcard(name) for name in names)
            raise UnknownNameError("parameter", pattern, known)
        _check_blocks(pattern, found, graph)
        for name in sorted(found):
            shape = graph.parameters[name].shape
            if len(spec) > len(shape):
                raise SpecError(
                    f"pin {pattern!r}: {spec} names {len(spec)} dims, but {name} of shape "
                    f"{list(shape)} has {len(shape)}; give one entry a dim, at most"
                )
            if name in out and _padded(out[name], len(shape)) != _padded(spec, len(shape)):
                raise RequestError(
                    f"pins {said_by[name]!r} and {pattern!r} say {out[name]} and {spec} of {name}; "
                    "leave one out"
                )
            out[name], said_by[name] = spec, pattern
    return out


def _check_axes(pattern: str, spec: PartitionSpec) -> None:
    names = spec.names
    for axis in names:
        if axis in AXES and axis not in PINNED_AXES:
            raise SpecError(
                f"pin {pattern!r}: {spec} names axis {axis!r}, along which nothing can be chosen; "
                f"name {' and '.join(PINNED_AXES)} alone"
            )
        if axis not in PINNED_AXES:
            raise SpecError(str(UnknownNameError(f"axis of pin {pattern!r}", axis, PINNED_AXES)))
    if len(set(names)) < len(names):
        raise SpecError(f"pin {pattern!r}: {spec} names an axis twice; an axis cuts one dim, once")


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _check_blocks(pattern: str, found: set[str], graph: ModelGraph) -> None:
    """Refuse a pattern that names a parameter in some of the blocks alike."""
    for repeat in graph.repeats:
        runs = [graph.nodes[start : start + repeat.length] for start in repeat.starts]
        for same in zip(*runs, strict=True):
            if same[0].op != "parameter":
                continue
            names = [str(node.attrs["fqn"]) for node in same]
            if 0 < len(found.intersection(names)) < len(names):
                raise RequestError(
                    f"pin {pattern!r} names {listed(sorted(found.intersection(names)))} but not "
                    "that of other blocks, and pins of the full space are of all blocks; write "
                    f"{wildcard(names[0])!r}"
                )


def _padded(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    return tuple(spec.axes(dim) for dim in range(rank))


def stored(pins: Mapping[str, PartitionSpec], names: tuple[str, ...]) -> Stored:
    """Whether a layout over axes ``names`` is what a parameter's pin says, if it has one."""
    of_role = {name: name for name in PINNED_AXES}
    if "data" in names:
        of_role["context"] = "data"

    def holds(parameter: str, layout: Layout) -> bool:
        spec = pins.get(parameter)
        if spec is None:
            return True
        cuts: dict[int, list[tuple[int, str]]] = {}
        for name, state in zip(names, layout, strict=True):
            if isinstance(state, Cut) and name in of_role:
                cuts.setdefault(state.dim, []).append((state.outer, of_role[name]))
        return all(
            tuple(dict.fromkeys(role for _, role in sorted(cuts.get(dim, ()))))
            == tuple(name for name in spec.axes(dim) if name in names)
            for dim in {*cuts, *range(len(spec))}
        )

    return holds


def storable(pins: Mapping[str, PartitionSpec], graph: ModelGraph) -> Callable[[Shape], bool]:
    """Whether the axes of a stage, of given sizes, can store every parameter as it is pinned.

    Args:
        pins: as :func:`resolve` returns them.
        graph: of a few blocks, at any batch.
    """
    prepared = Prepared(graph)
    nodes = {prepared.proposals.class_of(graph.parameters[p].name): p for p in pins}
    pinned = [graph.parameters[p].name for p in nodes.values()]
    known: dict[Shape, bool] = {}

    def holds(sizes: Shape) -> bool:
        if sizes not in known:
            axes, large = active(sizes)
            candidates = prepared.candidates(
                large, [USES[name] for name in axes], stored=stored(pins, axes)
            )
            known[sizes] = all(_has(candidates, name) for name in pinned)
        return known[sizes]

    return holds


def _has(candidates: Candidates, name: str) -> bool:
    try:
        return bool(candidates[name])
    except RuleError:
        return False
