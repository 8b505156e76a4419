"""Operators that take a tensor apart or put several together: slices, cat, pad, roll, flip.

The dim that they work on stays whole, with one exception: equal blocks. A dim of k equal blocks is
``(c d)``, and ``d`` may be cut in every block at once (fused QKV, the two halves of a rotation).
"""

from __future__ import annotations

from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Dim, Rule
from autoshard.sharding.rules.dims import (
    broadcast,
    integer,
    integers,
    letters,
    linear_groups,
    number,
    single,
)


@rule_for("aten.select")
def select(call: OpCall) -> Rule:
    """``a b c -> a c``, b whole: one index of a dim."""
    names = letters(len(call.shapes[0]))
    dim = integer(call, "dim", 0) % len(names)
    return Rule(
        operands=(single(names),),
        result=single(n for i, n in enumerate(names) if i != dim),
        sizes=dict(zip(names, call.shapes[0], strict=True)),
        whole=frozenset({names[dim]}),
        linear=linear_groups(call, [[0]]),
    )


def slice_start(call: OpCall) -> tuple[int, int, int]:
    """``(dim, start, step)`` of an ``aten.slice`` with defaults and negative indices resolved."""
    shape = call.shapes[0]
    dim = integer(call, "dim", 0) % len(shape)
    start = integer(call, "start", 0)
    start = max(start + shape[dim], 0) if start < 0 else min(start, shape[dim])
    return dim, start, integer(call, "step", 1)


@rule_for("aten.slice")
def slice_(call: OpCall) -> Rule:
    """``a (c b) -> a b``, c whole: one of equal blocks; ``a s -> a t``, both whole: any other."""
    dim, start, step = slice_start(call)
    shape, length = call.shapes[0], call.result[dim]
    names = letters(len(shape))
    sizes = dict(zip(names, call.result, strict=True))
    block: Dim
    whole: frozenset[str]
    if length == shape[dim]:
        block, whole = (names[dim],), frozenset()
    elif step == 1 and length and not (shape[dim] % length or start % length):
        sizes["blocks"] = shape[dim] // length
        block, whole = ("blocks", names[dim]), frozenset({"blocks"})
    else:
        sizes["source"] = shape[dim]
        block, whole = ("source",), frozenset({"source", names[dim]})
    return Rule(
        operands=(tuple(block if i == dim else (n,) for i, n in enumerate(names)),),
        result=single(names),
        sizes=sizes,
        whole=whole,
        linear=linear_groups(call, [[0]]),
    )


@rule_for("aten.cat")
def cat(call: OpCall) -> Rule:
    """``a b, a b -> a (c b)``, c whole: equal blocks; unequal ones stay whole along the dim."""
    ndim = len(call.result)
    dim = integer(call, "dim", 0) % ndim
    names = letters(ndim)
    sizes = {
        n: size for i, (n, size) in enumerate(zip(names, call.result, strict=True)) if i != dim
    }
    widths = [shape[dim] for shape in call.shapes]
    parts: list[Dim]
    joined: Dim
    if len(set(widths)) == 1:
        sizes |= {"blocks": len(widths), names[dim]: widths[0]}
        parts = [(names[dim],)] * len(widths)
        joined, whole = ("blocks", names[dim]), frozenset({"blocks"})
    else:
        own = [f"s{i}" for i in range(len(widths))]
        sizes |= {names[dim]: call.result[dim], **dict(zip(own, widths, strict=True))}
        parts = [(n,) for n in own]
        joined, whole = (names[dim],), frozenset({names[dim], *own})
    return Rule(
        operands=tuple(
            tuple(part if i == dim else (n,) for i, n in enumerate(names)) for part in parts
        ),
        result=tuple(joined if i == dim else (n,) for i, n in enumerate(names)),
        sizes=sizes,
        whole=whole,
        linear=linear_groups(call, [range(len(widths))]),
    )


@rule_for("aten.stack")
def stack(call: OpCall) -> Rule:
    """``a c, a c -> a b c``, b whole: the tensors lie along a new dim."""
    names = letters(len(call.result))
    dim = integer(call, "dim", 0) % len(names)
    old = single(n for i, n in enumerate(names) if i != dim)
    return Rule(
        operands=(old,) * len(call.shapes),
        result=single(names),
        sizes=dict(zip(names, call.result, strict=True)),
        whole=frozenset({names[dim]}),
        linear=linear_groups(call, [range(len(call.shapes))]),
    )


@rule_for("aten.constant_pad_nd", "aten.pad")
def pad(call: OpCall) -> Rule:
    """``a s -> a t``, the padded dims whole; linear where the padding is 0."""
    shape, ndim = call.shapes[0], len(call.result)
    names = letters(ndim)
    sizes = dict(zip(names, call.result, strict=True))
    widths = integers(call, "pad") or ()
    padded = {ndim - 1 - i // 2 for i, width in enumerate(widths) if width}
    own = {d: f"s{d}" for d in padded}
    sizes |= {own[d]: shape[d] for d in padded}
    return Rule(
        operands=(single(own.get(i, n) for i, n in enumerate(names)),),
        result=single(names),
        sizes=sizes,
        whole=frozenset({*own.values(), *(names[d] for d in padded)}),
        linear=() if number(call, "value", 0) else linear_groups(call, [[0]]),
    )


@rule_for("aten.roll", "aten.flip")
def moved(call: OpCall) -> Rule:
    """``a b -> a b``, whole where items change place; every dim without ``dims``."""
    names = letters(len(call.result))
    dims = integers(call, "dims") or range(len(names))
    return broadcast(call, whole={names[d] for d in dims}, linear=[[0]])


@rule_for("aten.tril", "aten.triu")
def triangle(call: OpCall) -> Rule:
    """``a b c -> a b c``; b and c whole, since which items stay hangs on their global place."""
    return broadcast(call, whole=letters(len(call.result))[-2:], linear=[[0]])


@rule_for("aten.glu")
def glu(call: OpCall) -> Rule:
    """``a (c b) -> a b``, c whole: the first half times the sigmoid of the second."""
    names = letters(len(call.result))
    dim = integer(call, "dim", -1) % len(names)
    return Rule(
        operands=(tuple(("half", n) if i == dim else (n,) for i, n in enumerate(names)),),
        result=single(names),
        sizes={**dict(zip(names, call.result, strict=True)), "half": 2},
        whole=frozenset({"half"}),
    )
