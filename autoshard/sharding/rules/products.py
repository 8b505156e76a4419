"""Products: every factor may be cut, and seeds cuts of its own.

From ``linear``'s one line come data parallel (cut ``a``), column parallel (``o``) and row parallel
(``k``, which leaves partial sums).
"""

from __future__ import annotations

import re

from autoshard.sharding.layout import Shape
from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Rule, parse
from autoshard.sharding.rules.dims import broadcast_dims, letters, single

EITHER = ((0,), (1,))


@rule_for("aten.linear")
def linear(call: OpCall) -> Rule | None:
    """``a b k, o k -> a b o``; None with a bias (the normal form adds it afterwards)."""
    if len(call.shapes) != 2:
        return None
    batch = " ".join(letters(len(call.shapes[0]) - 1))
    out = "o" if len(call.shapes[1]) == 2 else ""
    text = f"{batch} k, {out} k -> {batch} {out}"
    return parse(text, call.shapes, call.result, linear=EITHER)


@rule_for("aten.mm")
def mm(call: OpCall) -> Rule:
    """``m k, k n -> m n``."""
    return parse("m k, k n -> m n", call.shapes, call.result, linear=EITHER)


@rule_for("aten.bmm")
def bmm(call: OpCall) -> Rule:
    """``b m k, b k n -> b m n``."""
    return parse("b m k, b k n -> b m n", call.shapes, call.result, linear=EITHER)


@rule_for("aten.mv")
def mv(call: OpCall) -> Rule:
    """``m k, k -> m``."""
    return parse("m k, k -> m", call.shapes, call.result, linear=EITHER)


@rule_for("aten.dot", "aten.vdot")
def dot(call: OpCall) -> Rule:
    """``k, k ->``."""
    return parse("k, k ->", call.shapes, call.result, linear=EITHER)


@rule_for("aten.outer", "aten.ger")
def outer(call: OpCall) -> Rule:
    """``m, n -> m n``."""
    return parse("m, n -> m n", call.shapes, call.result, linear=EITHER)


@rule_for("aten.matmul")
def matmul(call: OpCall) -> Rule:
    """``a b m k, b k n -> a b m n``: leading dims broadcast, vectors lack ``m`` or ``n``."""
    left, right = call.shapes
    rows = ("m",) if len(left) > 1 else ()
    columns = ("n",) if len(right) > 1 else ()
    batch = letters(len(call.result) - len(rows) - len(columns))
    sizes = dict(zip(batch, call.result, strict=False))
    sizes |= {"k": left[-1]}
    if rows:
        sizes["m"] = left[-2]
    if columns:
        sizes["n"] = right[-1]
    return Rule(
        operands=(
            (*broadcast_dims(batch, sizes, left[:-2]), *single((*rows, "k"))),
            (*broadcast_dims(batch, sizes, right[:-2]), *single(("k", *columns))),
        ),
        result=single((*batch, *rows, *columns)),
        sizes=sizes,
        linear=(frozenset({0}), frozenset({1})),
        anchors=frozenset(sizes),
    )


@rule_for("aten.addmm", "aten.baddbmm")
def product_and_sum(call: OpCall) -> Rule:
    """``b m n, b m k, b k n -> b m n``, k whole: cut, every device would add the first operand."""
    batch = "b" if len(call.result) == 3 else ""
    added = _right_aligned("b m n" if batch else "m n", call.shapes[0])
    text = f"{added}, {batch} m k, {batch} k n -> {batch} m n"
    return parse(text, call.shapes, call.result, whole="k", linear=[[0, 1], [0, 2]])


@rule_for("aten._grouped_mm")
def grouped_mm(call: OpCall) -> Rule | None:
    """``m k, e k n, f -> m n``: rows of each expert, up to its entry in f, times its matrix.

    f whole: a device counts its own rows and experts from all entries. Over a cut e it multiplies
    the rows of its own experts, the others are zero. None for other ranks or a bias.
    """
    if call.roles != ("self", "mat2", "offs") or [len(s) for s in call.shapes] != [2, 3, 1]:
        return None
    text = "m k, e k n, f -> m n"
    return parse(text, call.shapes, call.result, whole="f", linear=EITHER)


@rule_for("autoshard.experts")
def experts(call: OpCall) -> Rule:
    """``t i, t k, t k, e (g f) i, e o f -> t o``: a token's experts, summed with its weights.

    Over a cut e each device has the tokens of all and gives the part of its own experts; over a cut
    f the part of its own channels.
    """
    text = "t i, t k, t k, e (g f) i, e o f -> t o"
    return parse(text, call.shapes, call.result, whole="i k g o", linear=[[2], [4]], sizes={"g": 2})


def _right_aligned(names: str, shape: Shape) -> str:
    parts = names.split()
    return " ".join(parts[len(parts) - len(shape) :])


@rule_for("aten.einsum")
def einsum(call: OpCall) -> Rule | None:
    """The equation itself; None with ``...`` or a letter twice in one tensor."""
    equation = str(call.attrs.get("equation", "")).replace(" ", "")
    found = re.fullmatch(r"([a-zA-Z,]*)->([a-zA-Z]*)", equation)
    if found is None:
        return None
    terms = found[1].split(",")
    if any(len(set(term)) < len(term) for term in (*terms, found[2])):
        return None
    text = ", ".join(" ".join(term) for term in terms) + " -> " + " ".join(found[2])
    groups = [[i] for i in range(len(terms))]
    return parse(text, call.shapes, call.result, linear=groups)
