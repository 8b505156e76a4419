"""Operators that look items up by index."""

from __future__ import annotations

from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Dim, Rule, parse
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


@rule_for("aten.index")
def index(call: OpCall) -> Rule | None:
    """``v w c, a b, b -> a b c``, v and w whole: items of a tensor by tensors of indices.

    Indices that stand side by side put their dims in that place, others in front. None for masks
    (one byte an item): their result has no shape of its own.
    """
    shape = call.shapes[0]
    if 1 in call.operand_itemsizes[1:] or not all(r.startswith("indices.") for r in call.roles[1:]):
        return None
    places = [int(role.removeprefix("indices.")) for role in call.roles[1:]]
    kept = [d for d in range(len(shape)) if d not in places]
    ndim = len(call.result) - len(kept)
    names = letters(ndim)
    adjacent = bool(places) and places == list(range(places[0], places[0] + len(places)))
    before = [d for d in kept if adjacent and d < places[0]]
    after = [d for d in kept if d not in before]
    looked_up = call.result[len(before) : len(before) + ndim]
    sizes = dict(zip(names, looked_up, strict=True))
    source: list[Dim] = []
    for d, size in enumerate(shape):
        sizes[f"s{d}"] = size
        source.append((f"s{d}",))
    return Rule(
        operands=(
            tuple(source),
            *(broadcast_dims(names, sizes, operand) for operand in call.shapes[1:]),
        ),
        result=single((*(f"s{d}" for d in before), *names, *(f"s{d}" for d in after))),
        sizes=sizes,
        whole=frozenset(f"s{d}" for d in places),
        linear=(frozenset({0}),) if call.itemsize > 1 else (),
    )
