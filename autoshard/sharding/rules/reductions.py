"""Operators that reduce over dims, or need a dim whole to give it back.

A sum over a cut dim leaves partial sums; a mean is a sum divided by the *global* count. A maximum,
a variance, an order or a softmax is no sum of the shards' own: its dims stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Rule, parse
from autoshard.sharding.rules.dims import (
    broadcast,
    dims_of,
    integer,
    leaves_out,
    letters,
    linear_groups,
    number,
    single,
)


def _reduced(call: OpCall, *, whole: bool, linear: Iterable[Iterable[int]] = ()) -> Rule:
    shape = call.shapes[0]
    names = letters(len(shape))
    dims = dims_of(call, "dim", len(shape))
    return Rule(
        operands=(single(names),),
        result=leaves_out(call, dims, names) if call.result else (),
        sizes=dict(zip(names, shape, strict=True)),
        whole=frozenset(names[d] for d in dims) if whole else frozenset(),
        linear=linear_groups(call, linear),
    )


@rule_for("aten.sum", "aten.mean")
def total(call: OpCall) -> Rule:
    """``a b -> a``: b is contracted, a cut leaves partial sums."""
    return _reduced(call, whole=False, linear=[[0]])


@rule_for(
    "aten.amax",
    "aten.amin",
    "aten.argmax",
    "aten.argmin",
    "aten.all",
    "aten.any",
    "aten.logsumexp",
    "aten.prod",
    "aten.std",
    "aten.var",
    "aten.linalg_vector_norm",
)
def extreme(call: OpCall) -> Rule:
    """``a b -> a``, b whole."""
    return _reduced(call, whole=True)


@rule_for("aten.max", "aten.min")
def maximum(call: OpCall) -> Rule:
    """``a b -> a``, b whole; with two tensors elementwise."""
    return broadcast(call) if len(call.shapes) == 2 else _reduced(call, whole=True)


@rule_for("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax")
def softmax(call: OpCall) -> Rule:
    """``a b -> a b``, b whole: normalised over."""
    names = letters(len(call.result))
    return broadcast(call, whole={names[integer(call, "dim", -1)]} if names else ())


@rule_for("aten.cumsum")
def cumsum(call: OpCall) -> Rule:
    """``a b -> a b``, b whole: each item is the sum of those before it."""
    names = letters(len(call.result))
    return broadcast(call, whole={names[integer(call, "dim", 0)]} if names else (), linear=[[0]])


@rule_for("aten.cumprod")
def cumprod(call: OpCall) -> Rule:
    """``a b -> a b``, b whole."""
    names = letters(len(call.result))
    return broadcast(call, whole={names[integer(call, "dim", 0)]} if names else ())


@rule_for("aten.sort", "aten.argsort", "aten.topk")
def order(call: OpCall) -> Rule:
    """``a s -> a t``, both whole: the order of a dim hangs on all of it."""
    shape, names = call.shapes[0], letters(len(call.result))
    dim = integer(call, "dim", -1) % max(len(shape), 1)
    return Rule(
        operands=(single("source" if i == dim else n for i, n in enumerate(names)),),
        result=single(names),
        sizes={**dict(zip(names, call.result, strict=True)), "source": shape[dim] if shape else 1},
        whole=frozenset({"source", *names[dim : dim + 1]}),
    )


@rule_for("aten.histc")
def histogram(call: OpCall) -> Rule | None:
    """``a b -> n``, n whole: counts of a cut are partial. None where the range is the data's."""
    if number(call, "min", 0) == number(call, "max", 0):
        return None
    names = " ".join(letters(len(call.shapes[0])))
    return parse(f"{names} -> n", call.shapes, call.result, whole="n", anchors="")
