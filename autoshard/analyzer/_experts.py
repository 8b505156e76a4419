"""Layers of experts become one operator.

Captured, such a layer sorts its tokens by expert, which mixes all samples of a batch: then no
device could keep to its own. As one operator it takes each token by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.graph import Attr
from autoshard.normal.experts import ACTIVATIONS
from autoshard.normal.ir import Value, family

PRODUCTS = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
"""Products of groups of rows: torch's own, and what transformers takes where it has no kernel."""


def join_experts(order: Sequence[Value]) -> list[Value]:
    """The values with each layer of experts as one; what only it used is left behind.

    A value keeps its identity: the last one of a layer turns into the layer.
    """
    uses: dict[int, int] = {}
    for value in order:
        for operand in value.operands:
            uses[id(operand)] = uses.get(id(operand), 0) + 1
    user = {id(o): v for v in order for o in v.operands if uses[id(o)] == 1}
    for value in order:
        if family(value.op) == "aten.sum":
            layer = _layer(value)
            if layer is None:
                continue
            last = value
            after = user.get(id(value))
            if after is not None and family(after.op) == "aten.to":
                last = after
            operands, act = layer
            attrs: dict[str, Attr] = {
                "act": act,
                "dtype": last.dtype,
                "experts": operands["down"].shape[0],
            }
            last.op, last.attrs = "autoshard.experts", attrs
            last.roles, last.operands = tuple(operands), list(operands.values())
    return list(order)


def _layer(total: Value) -> tuple[dict[str, Value], str] | None:
    """Operands of the layer that ends in this sum, and what it applies; None where it is none."""
    try:
        return _matched(total)
    except _Other:
        return None


class _Other(Exception):
    """Something else than what was looked for."""


def _is(value: Value, *ops: str) -> Value:
    if family(value.op) not in ops:
        raise _Other
    return value


def _only(value: Value, op: str) -> Value:
    """The first operand of an operator."""
    return _is(value, op).operands[0]


def _same(a: Value, b: Value) -> None:
    if a is not b:
        raise _Other


def _matched(total: Value) -> tuple[dict[str, Value], str]:
    by_token = _only(total, "aten.sum")
    if total.attrs.get("dim") != (1,) or total.attrs.get("keepdim"):
        raise _Other
    back = _only(by_token, "aten.reshape")  # rows in the order of the tokens
    weighted, inverse = _is(back, "aten.index").operands
    product, scale = _is(weighted, "aten.mul").operands
    picked = _only(scale, "aten.reshape")
    weight, permutation = _is(picked, "aten.index").operands
    _, put, _ = _is(inverse, "aten.index_put").operands
    _same(put, permutation)
    inner, down, ends = _is(product, *PRODUCTS).operands
    applied, up = _is(inner, "aten.mul").operands
    gate = applied.operands[0]
    if applied.op not in ACTIVATIONS:
        raise _Other
    halves = _only(gate, "aten.select")
    _same(_only(up, "aten.select"), halves)
    if [v.attrs.get(k) for v in (gate, up) for k in ("dim", "index")] != [1, 0, 1, 1]:
        raise _Other
    rows, gate_up, first_ends = _is(_only(halves, "aten.reshape"), *PRODUCTS).operands
    _same(first_ends, ends)
    tokens, token = _is(rows, "aten.index").operands
    _same(_only(token, "aten.floor_divide"), permutation)
    experts = _only(permutation, "aten.sort")
    counted = _only(_only(ends, "aten.cumsum"), "aten.histc")
    _same(_only(_only(counted, "aten.to"), "aten.sort"), experts)
    index = _only(experts, "aten.reshape")
    weights = _only(weight, "aten.reshape")
    if by_token.shape[:2] != index.shape or weights.shape != index.shape:
        raise _Other
    matrices = [_only(m, "aten.permute") for m in (gate_up, down)]
    if any(m.attrs.get("dims") != (0, 2, 1) for m in (gate_up, down)):
        raise _Other
    operands = {
        "input": tokens,
        "index": index,
        "weight": weights,
        "gate_up": matrices[0],
        "down": matrices[1],
    }
    return operands, applied.op
