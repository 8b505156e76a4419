"""Normalisations: what is normalised over stays whole, but for a batch norm's batch."""

from __future__ import annotations

from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Dims, Internal, Rule
from autoshard.sharding.rules.dims import integer, integers, letters, single


@rule_for("aten.layer_norm", "aten.rms_norm")
def layer_norm(call: OpCall) -> Rule:
    """``a b d, d, d -> a b d``, d whole."""
    names = letters(len(call.result))
    count = len(integers(call, "normalized_shape") or (1,))
    normalised = names[len(names) - count :]
    return Rule(
        operands=tuple(single(names if role == "input" else normalised) for role in call.roles),
        result=single(names),
        sizes=dict(zip(names, call.result, strict=True)),
        whole=frozenset(normalised),
    )


@rule_for("aten.group_norm")
def group_norm(call: OpCall) -> Rule:
    """``n (g c) x, (g c), (g c) -> n (g c) x``; c and x whole, groups may be cut."""
    groups = integer(call, "num_groups", 1)
    spatial = tuple(f"x{i}" for i in range(len(call.result) - 2))
    channel = ("g", "c")
    image: Dims = (("n",), channel, *single(spatial))
    return Rule(
        operands=tuple(image if role == "input" else (channel,) for role in call.roles),
        result=image,
        sizes={
            "n": call.result[0],
            "g": groups,
            "c": call.result[1] // groups,
            **dict(zip(spatial, call.result[2:], strict=True)),
        },
        whole=frozenset({"c", *spatial}),
    )


@rule_for("aten.instance_norm")
def instance_norm(call: OpCall) -> Rule | None:
    """``n c x, c, c -> n c x``, x whole; None with running statistics."""
    if "running_mean" in call.roles or "running_var" in call.roles:
        return None
    spatial = tuple(f"x{i}" for i in range(len(call.result) - 2))
    names = ("n", "c", *spatial)
    return Rule(
        operands=tuple(single(names if role == "input" else "c") for role in call.roles),
        result=single(names),
        sizes=dict(zip(names, call.result, strict=True)),
        whole=frozenset(spatial),
    )


@rule_for("autoshard.batch_norm")
def batch_norm(call: OpCall) -> Rule:
    """``n c x, c, c, c, c -> n c x``: all may be cut; statistics are the whole batch's.

    Over a cut ``n`` or ``x``: forward an all_reduce of the sums, then of the centred squares;
    backward one of the sums of the gradient and of its product with the normalised input.
    Running statistics are written in place.
    """
    spatial = tuple(f"x{i}" for i in range(len(call.result) - 2))
    names = ("n", "c", *spatial)
    sizes = dict(zip(names, call.result, strict=True))
    when = frozenset({"n", *spatial})
    itemsize = max(4, (call.operand_itemsizes or (call.itemsize,))[0])
    sums = Internal(when=when, elements=("c",), itemsize=itemsize)
    return Rule(
        operands=tuple(
            single(names) if role == "input" else (("c",),) if shape else ()
            for role, shape in zip(call.roles, call.shapes, strict=True)
        ),
        result=single(names),
        sizes=sizes,
        internal=(
            sums,
            sums,
            Internal(when=when, elements=("c",), itemsize=itemsize, count=2, phase="backward"),
        ),
        mutates=frozenset(
            i
            for i, role in enumerate(call.roles)
            if role in ("running_mean", "running_var", "counter")
        ),
    )
