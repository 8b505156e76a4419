"""Operators that look items up by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.sharding.layout import Shape
from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Dims, Rule, parse
from autoshard.sharding.rules.dims import (
    broadcast_dims,
    integer,
    letters,
    linear_groups,
    single,
)


@rule_for("aten.embedding")
def embedding(call: OpCall) -> Rule | None:
    """``v d, a b -> a b d``: over a cut v each device looks up its rows, the others are zero.

    None with ``scale_grad_by_freq``: how often an index occurs is known to no shard.
    """
    if call.attrs.get("scale_grad_by_freq"):
        return None
    batch = " ".join(f"{n}" for n in letters(len(call.shapes[1])))
    text = f"v w, {batch} -> {batch} w"
    return parse(text, call.shapes, call.result, linear=[[0]])


@rule_for("aten.index_select")
def index_select(call: OpCall) -> Rule:
    """``a v c, n -> a n c``, v whole."""
    shape = call.shapes[0]
    names = letters(len(shape))
    dim = integer(call, "dim", 0) % len(shape)
    return Rule(
        operands=(
            single("source" if i == dim else n for i, n in enumerate(names)),
            single(names[dim : dim + 1] if call.shapes[1] else ()),
        ),
        result=single(names),
        sizes={**dict(zip(names, call.result, strict=True)), "source": shape[dim]},
        whole=frozenset({"source"}),
        linear=linear_groups(call, [[0]]),
    )


@rule_for("aten.gather")
def gather(call: OpCall) -> Rule:
    """``a v, a n -> a n``, v whole; so are other dims in which the index is shorter."""
    shape, index = call.shapes
    names = letters(len(index))
    dim = integer(call, "dim", 0) % max(len(index), 1)
    sizes = dict(zip(names, index, strict=True))
    own: list[str] = []
    whole: set[str] = set()
    for i, name in enumerate(names):
        if i == dim or shape[i] != index[i]:
            own.append(f"s{i}")
            sizes[f"s{i}"] = shape[i]
            whole |= {f"s{i}"} if i == dim else {f"s{i}", name}
        else:
            own.append(name)
    return Rule(
        operands=(single(own), single(names)),
        result=single(names),
        sizes=sizes,
        whole=frozenset(whole),
        linear=linear_groups(call, [[0]]),
    )


@rule_for("aten.scatter_add")
def scatter_add(call: OpCall) -> Rule | None:
    """``a v, a n, a n -> a v``, v and n whole; None where the index is shorter in another dim."""
    shape, index, source = call.shapes
    names = letters(len(shape))
    dim = integer(call, "dim", 0) % max(len(shape), 1)
    others = [i for i in range(len(shape)) if i != dim]
    if index != source or any(shape[i] != index[i] for i in others):
        return None
    items = single("items" if i == dim else n for i, n in enumerate(names))
    sizes = dict(zip(names, shape, strict=True))
    return Rule(
        operands=(single(names), items, items),
        result=single(names),
        sizes={**sizes, "items": index[dim]},
        whole=frozenset({"items", names[dim]}),
        linear=linear_groups(call, [[0, 2]]),
    )


@rule_for("aten.one_hot")
def one_hot(call: OpCall) -> Rule:
    """``a b -> a b n``, n whole."""
    names = letters(len(call.result))
    return Rule(
        operands=(single(names[:-1]),),
        result=single(names),
        sizes=dict(zip(names, call.result, strict=True)),
        whole=frozenset(names[-1:]),
    )


@dataclass(frozen=True)
class _Indexed:
    """``x[i, j]``: dims of x, of each index, and of the result."""

    source: Dims
    indices: tuple[Dims, ...]
    result: Dims
    sizes: dict[str, int]
    looked_up: frozenset[str]


def _indexed(shape: Shape, places: list[int], indices: Sequence[Shape]) -> _Indexed:
    """Indices that stand side by side put their dims in that place, others in front."""
    kept = [d for d in range(len(shape)) if d not in places]
    ndim = max(len(i) for i in indices)
    names = letters(ndim)
    sizes = dict.fromkeys(names, 1)
    for index_shape in indices:
        for name, size in zip(names[ndim - len(index_shape) :], index_shape, strict=True):
            sizes[name] = max(sizes[name], size)
    adjacent = places == list(range(places[0], places[0] + len(places)))
    before = [d for d in kept if adjacent and d < places[0]]
    after = [d for d in kept if d not in before]
    own = tuple(f"s{d}" for d in range(len(shape)))
    return _Indexed(
        source=single(own),
        indices=tuple(broadcast_dims(names, sizes, i) for i in indices),
        result=single((*(own[d] for d in before), *names, *(own[d] for d in after))),
        sizes={**sizes, **dict(zip(own, shape, strict=True))},
        looked_up=frozenset(own[d] for d in places),
    )


def _index_operands(call: OpCall) -> list[int]:
    """Which operands are indices; none where one is a mask (one byte an item)."""
    found = [i for i, role in enumerate(call.roles) if role.startswith("indices.")]
    masks = [i for i in found if call.operand_itemsizes[i : i + 1] == (1,)]
    return [] if masks else found


@rule_for("aten.index")
def index(call: OpCall) -> Rule | None:
    """``s0 s1, a b -> a b s1``, s0 whole: items of a tensor by tensors of indices.

    None for masks: their result has no shape of its own.
    """
    operands = _index_operands(call)
    if not operands:
        return None
    places = [int(call.roles[i].removeprefix("indices.")) for i in operands]
    it = _indexed(call.shapes[0], places, [call.shapes[i] for i in operands])
    return Rule(
        operands=(it.source, *it.indices),
        result=it.result,
        sizes=it.sizes,
        whole=it.looked_up,
        linear=(frozenset({0}),) if call.itemsize > 1 else (),
    )


@rule_for("aten.index_put")
def index_put(call: OpCall) -> Rule | None:
    """``s0 s1, a, a s1 -> s0 s1``, s0 and a whole: items written by indices, not in place.

    The tensor and what is written may be partial sums together. None for masks.
    """
    operands = _index_operands(call)
    if not operands or len(operands) + 2 != len(call.shapes):
        return None
    places = [int(call.roles[i].removeprefix("indices.")) for i in operands]
    it = _indexed(call.shapes[0], places, [call.shapes[i] for i in operands])
    flat = tuple(f for dim in it.result for f in dim)
    values = call.roles.index("values")
    return Rule(
        operands=(it.source, *it.indices, broadcast_dims(flat, it.sizes, call.shapes[values])),
        result=it.source,
        sizes=it.sizes,
        whole=it.looked_up | {f for dims in it.indices for dim in dims for f in dim},
        linear=(frozenset({0, values}),) if call.itemsize > 1 else (),
    )
