"""Operators that make a tensor from nothing, or from another one's shape.

Random numbers are drawn for the global shape on every device, which keeps its part: replicas agree,
shards differ, and the numbers are those of one device.
"""

from __future__ import annotations

from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Rule
from autoshard.sharding.rules.dims import broadcast, letters


@rule_for(
    "aten.zeros",
    "aten.ones",
    "aten.full",
    "aten.arange",
    "aten.scalar_tensor",
    "aten.rand",
    "aten.randn",
    "aten.randint",
)
def new(call: OpCall) -> Rule:
    """``-> a b``."""
    return broadcast(call)


@rule_for(
    "aten.zeros_like",
    "aten.ones_like",
    "aten.full_like",
    "aten.rand_like",
    "aten.randn_like",
)
def like(call: OpCall) -> Rule:
    """``a b -> a b``."""
    return broadcast(call)


@rule_for("aten.bernoulli")
def bernoulli(call: OpCall) -> Rule:
    """``a b -> a b``; whole where the probabilities are a tensor: no shard could draw them all."""
    whole = () if "p" in call.attrs else letters(len(call.result))
    return broadcast(call, whole=whole)


@rule_for(
    "aten.new_zeros",
    "aten.new_ones",
    "aten.new_full",
)
def new_from(call: OpCall) -> Rule:
    """``1 1 -> a b``, the operand whole: only its dtype and device count."""
    rule = Rule(
        operands=(),
        result=tuple((n,) for n in letters(len(call.result))),
        sizes=dict(zip(letters(len(call.result)), call.result, strict=True)),
    )
    names = tuple(f"s{i}" for i in range(len(call.shapes[0])))
    return Rule(
        operands=(tuple((n,) for n in names),),
        result=rule.result,
        sizes={**rule.sizes, **dict(zip(names, call.shapes[0], strict=True))},
        whole=frozenset(names),
    )
