"""Operators that give one value for one value, with broadcasting: ``a b c, c -> a b c``.

Any factor may be cut. No factor is an anchor: they are cut as their neighbours are. What is linear
lets partial sums pass: a sum of sums is one, a product of a sum with a whole value is one; a scalar
that is *added* would be added on every device.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Rule
from autoshard.sharding.rules.dims import broadcast, number

# fmt: off
UNARY = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil", "celu",
    "clamp", "clamp_max", "clamp_min", "cos", "cosh", "elu", "erf", "erfc", "erfinv", "exp",
    "exp2", "expm1", "floor", "frac", "gelu", "hardshrink", "hardsigmoid", "hardswish",
    "hardtanh", "isfinite", "isinf", "isnan", "leaky_relu", "lgamma", "log", "log10", "log1p",
    "log2", "log_sigmoid", "logical_not", "logit", "mish", "nan_to_num", "reciprocal", "relu",
    "relu6", "round", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin", "sinc", "sinh",
    "softplus", "softshrink", "sqrt", "square", "tan", "tanh", "threshold", "trunc",
)

BINARY = (
    "atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "eq", "floor_divide", "fmod", "ge", "gt",
    "hypot", "le", "logical_and", "logical_or", "logical_xor", "lt", "maximum", "minimum", "ne",
    "pow", "remainder", "addcmul", "addcdiv", "lerp", "__and__", "__or__", "__xor__",
)

SAME = (
    "aten.neg", "aten.clone", "aten.alias", "aten.detach", "aten.contiguous", "aten.positive",
    "aten.lift_fresh_copy", "autoshard.identity", "autoshard.dropout",
)

LOSSES = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div", "l1_loss",
    "mse_loss", "smooth_l1_loss", "soft_margin_loss",
)
# fmt: on


@rule_for(*(f"aten.{name}" for name in (*UNARY, *BINARY)))
def nonlinear(call: OpCall) -> Rule:
    """``a b, a b -> a b``; partial sums do not pass."""
    return broadcast(call)


@rule_for(*SAME)
def linear_unary(call: OpCall) -> Rule:
    """``a b -> a b``; a partial sum passes (through dropout, under one mask for all devices)."""
    return broadcast(call, linear=[[0]])


@rule_for("aten.add", "aten.sub", "aten.rsub")
def sum_of_two(call: OpCall) -> Rule:
    """``a b, b -> a b``; both may be partial sums together, but not one of them beside a scalar."""
    return broadcast(call, linear=[[0, 1]] if len(call.shapes) == 2 else ())


@rule_for("aten.mul")
def product_of_two(call: OpCall) -> Rule:
    """``a b, b -> a b``; one of the two may be a partial sum."""
    return broadcast(call, linear=[[i] for i in range(len(call.shapes))])


@rule_for("aten.div", "aten.true_divide")
def quotient(call: OpCall) -> Rule:
    """``a b, b -> a b``; the numerator may be a partial sum, unless the quotient is rounded."""
    return broadcast(call, linear=() if call.attrs.get("rounding_mode") else [[0]])


@rule_for("aten.to", "aten._to_copy")
def conversion(call: OpCall) -> Rule:
    """``a b -> a b``; a partial sum passes to a floating dtype, where nothing is truncated."""
    dtype = call.attrs.get("dtype")
    floating = dtype is None or str(dtype).removeprefix("torch.").startswith(("float", "bfloat"))
    return broadcast(call, linear=[[0]] if floating else ())


@rule_for("aten.where")
def where(call: OpCall) -> Rule:
    """``a b, a b, b -> a b``; both branches may be partial sums together, a scalar being 0."""
    branches = [i for i, role in enumerate(call.roles) if role != "condition"]
    scalars = [number(call, name, 0) for name in ("self", "other") if name in call.attrs]
    rule = broadcast(call)
    if any(scalars) or not branches or call.itemsize == 1:
        return rule
    return replace(rule, linear=(frozenset(branches),))


@rule_for("aten.masked_fill")
def masked_fill(call: OpCall) -> Rule:
    """``a b, b -> a b``; a partial sum passes where the value filled in is 0."""
    rule = broadcast(call)
    if len(call.shapes) != 2 or number(call, "value", 0) or call.itemsize == 1:
        return rule
    return replace(rule, linear=(frozenset({0}),))


@rule_for("aten.prelu")
def prelu(call: OpCall) -> Rule:
    """``a b c, b -> a b c``: one slope a channel, or one for all."""
    rule = broadcast(OpCall(op=call.op, shapes=call.shapes[:1], roles=(), result=call.result))
    (slopes,) = call.shapes[1]
    channel = (rule.result[1],) if slopes > 1 else ((),)
    return replace(rule, operands=(rule.result, channel))


@rule_for(*(f"aten.{name}" for name in LOSSES))
def elementwise_loss(call: OpCall) -> Rule | None:
    """``a b, a b -> a b`` with ``reduction=0``; None with another (the normal form has none)."""
    return broadcast(call) if call.attrs.get("reduction") == 0 else None
