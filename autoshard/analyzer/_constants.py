"""Constants of a graph: their values, and the attention masks that are causal ones in disguise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import CaptureError, InputError
from autoshard.graph import Constant, ModelGraph
from autoshard.normal.ir import Value
from autoshard.normal.operators import run_operator, torch_dtype

MAX_EVALUATED = 1 << 26
"""Most elements, intermediate values included, that are computed to recognise a mask."""

_VIEWS = frozenset({"aten.expand.default", "aten.permute.default", "aten.slice.Tensor"})

_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


def evaluate_constants(
    graph: ModelGraph, buffers: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Values of all constants of ``graph``, on the CPU.

    Args:
        graph: any graph.
        buffers: the module's buffers by dotted name; only those that constants read.
        dtype: floating constants are computed in this dtype instead of their own.

    Returns:
        Name of the constant -> value.

    Raises:
        InputError: a buffer is missing or has another shape.
        CaptureError: an operator that torch does not have.
    """
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        for constant in graph.constants:
            values[constant.name] = _evaluate(
                constant, [values[o] for o in constant.operands], buffers, dtype
            )
    return values


def _evaluate(
    constant: Constant | Value,
    operands: Sequence[Tensor],
    buffers: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> Tensor:
    floating = constant.dtype in _FLOATS
    wanted = dtype if dtype is not None and floating else torch_dtype(constant.dtype)
    if constant.op == "buffer":
        name = str(constant.attrs["fqn"])
        if name not in buffers:
            raise InputError(f"the value of buffer {name!r} is needed; given: {sorted(buffers)}")
        value = buffers[name].detach().to(device="cpu", dtype=wanted)
        if tuple(value.shape) != tuple(constant.shape):
            raise InputError(
                f"buffer {name!r} has shape {tuple(value.shape)}; the graph was captured with "
                f"{tuple(constant.shape)}"
            )
        return value
    if constant.op == "literal":
        data: Any = constant.attrs["data"]
        return torch.tensor(data, dtype=wanted).reshape(constant.shape)
    attrs = dict(constant.attrs)
    if dtype is not None and attrs.get("dtype") in _FLOATS:
        attrs["dtype"] = str(dtype).removeprefix("torch.")
    made = "dtype" in {a.name for a in _schema(constant.op)} and not constant.operands
    if made:
        attrs["dtype"] = str(wanted).removeprefix("torch.")
    result = run_operator(constant.op, constant.roles, operands, attrs, constant.shape)
    return result.to(wanted)


def _schema(op: str) -> Sequence[Any]:
    from autoshard.normal.operators import OWN, overload

    return () if op in OWN else overload(op)._schema.arguments


def value_of(value: Value, buffers: Mapping[str, Tensor]) -> Tensor | None:
    """Value of a constant, or None where it is too large or hangs on a buffer without value."""
    seen: dict[int, Tensor] = {}
    total = 0
    for item in closure([value]):
        if item.op not in _VIEWS:
            total += prod(item.shape)
        if total > MAX_EVALUATED:
            return None
        try:
            with torch.no_grad():
                seen[id(item)] = _evaluate(
                    item, [seen[id(o)] for o in item.operands], buffers, None
                )
        except (CaptureError, InputError, RuntimeError, NotImplementedError):
            return None
    return seen[id(value)]


def closure(values: Sequence[Value]) -> list[Value]:
    """All constants that ``values`` hang on, operands first."""
    out: list[Value] = []
    seen: set[int] = set()
    stack: list[tuple[Value, bool]] = [(v, False) for v in reversed(values)]
    while stack:
        value, done = stack.pop()
        if done:
            out.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            stack.append((value, True))
            stack += [(o, False) for o in reversed(value.operands)]
    return out


def recognise_masks(order: Sequence[Value], buffers: Mapping[str, Tensor]) -> int:
    """Turn constant masks into ``is_causal`` or nothing, where that is what they say.

    Returns:
        Number of masks that stay explicit.
    """
    kinds: dict[int, str] = {}
    explicit = 0
    for value in order:
        if value.op != "aten.scaled_dot_product_attention.default":
            continue
        mask = value.role("attn_mask")
        if mask is None:
            continue
        if not mask.const:
            explicit += 1
            continue
        if id(mask) not in kinds:
            kinds[id(mask)] = _kind(mask, buffers)
        kind = kinds[id(mask)]
        query, key = value.operands[0], value.operands[1]
        square = query.shape[-2] == key.shape[-2]
        if kind == "other" or (kind == "causal" and not square):
            explicit += 1
            continue
        index = value.roles.index("attn_mask")
        del value.operands[index]
        value.roles = value.roles[:index] + value.roles[index + 1 :]
        if kind == "causal":
            value.attrs["is_causal"] = True
    return explicit


def _kind(mask: Value, buffers: Mapping[str, Tensor]) -> str:
    """``full`` (nothing masked), ``causal``, or ``other``."""
    found = value_of(mask, buffers)
    if found is None or found.dim() < 2:
        return "other"
    if found.dtype == torch.bool:
        seen = found
    else:
        hidden = found <= torch.finfo(found.dtype).min
        if not bool(((found == 0) | hidden).all()):
            return "other"
        seen = ~hidden
    if bool(seen.all()):
        return "full"
    rows, columns = seen.shape[-2:]
    if rows != columns:
        return "other"
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if bool((seen == causal).all()) else "other"
