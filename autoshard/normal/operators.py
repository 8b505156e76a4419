"""One operator of a graph, run on tensors: for constants, for what autograd saves, for tests.

The operators called ``autoshard.*`` are defined here by ordinary torch code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.errors import CaptureError
from autoshard.graph import Attr
from autoshard.normal.experts import experts


def torch_dtype(name: str) -> torch.dtype:
    """``torch.float32`` of ``float32``."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CaptureError(f"unknown dtype {name!r}")
    return found


@cache
def overload(op: str) -> Any:
    """The torch operator of ``aten.add.Tensor``.

    Raises:
        CaptureError: torch has no such operator.
    """
    parts = op.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, IndexError) as error:
        raise CaptureError(f"this torch has no operator {op!r}") from error


DENSE = frozenset({"aten.view_as_complex.default"})
"""Operators that refuse what is not contiguous; the normal form has no copies."""


def run_operator(
    op: str,
    roles: Sequence[str],
    operands: Sequence[Tensor],
    attrs: Mapping[str, Attr],
    shape: Sequence[int],
) -> Tensor:
    """The result of one operator.

    Args:
        op: full name.
        roles: role of each operand.
        operands: the operands.
        attrs: the other arguments.
        shape: shape of the result (views need it).

    Raises:
        CaptureError: an operator that torch does not have.
    """
    if op in OWN:
        named = dict(zip(roles, operands, strict=True))
        own: Tensor = OWN[op](named, attrs)
        return own
    if op == "aten.reshape.default":
        return operands[0].reshape(tuple(shape))
    if op == "aten.expand.default":
        return operands[0].expand(tuple(shape))
    if op in DENSE:
        operands = [o.contiguous() for o in operands]
    target = overload(op)
    given: dict[str, Any] = {k: _argument(k, v) for k, v in attrs.items()}
    output = given.pop("output", None)
    lists: dict[str, dict[int, Tensor]] = {}
    for role, operand in zip(roles, operands, strict=True):
        name, _, index = role.partition(".")
        if index:
            lists.setdefault(name, {})[int(index)] = operand
        else:
            given[name] = operand
    for name, items in lists.items():
        given[name] = [items.get(i) for i in range(max(items) + 1)]
    for argument in target._schema.arguments:
        if argument.name in given or argument.has_default_value():
            continue
        if argument.name == "size":
            given["size"] = tuple(shape)
        elif str(argument.type).startswith("Optional"):
            given[argument.name] = None
        else:
            given[argument.name] = _required(argument)
    arguments = target._schema.arguments
    positional = [given.pop(a.name, a.default_value) for a in arguments if not a.kwarg_only]
    result = target(*positional, **given)
    picked = result if output is None else result[output]
    assert isinstance(picked, Tensor)
    return picked


def _required(argument: Any) -> Any:
    raise CaptureError(f"argument {argument.name!r} is missing")


def _argument(name: str, value: Attr) -> Any:
    if name == "dtype" and isinstance(value, str):
        return torch_dtype(value)
    return list(value) if isinstance(value, tuple) else value


# ---- our own operators --------------------------------------------------------------------


def _nll_sum(x: Mapping[str, Tensor], attrs: Mapping[str, Attr]) -> Tensor:
    smoothing: Any = attrs.get("label_smoothing", 0.0)
    ignored: Any = attrs["ignore_index"]
    return F.cross_entropy(
        x["input"], x["target"], reduction="sum", ignore_index=ignored, label_smoothing=smoothing
    )


def _count_valid(x: Mapping[str, Tensor], attrs: Mapping[str, Attr]) -> Tensor:
    ignored: Any = attrs["ignore_index"]
    return x["target"].ne(ignored).sum().to(torch_dtype(str(attrs["dtype"])))


def _batch_norm(x: Mapping[str, Tensor], attrs: Mapping[str, Attr]) -> Tensor:
    momentum: Any = attrs["momentum"]
    eps: Any = attrs["eps"]
    return F.batch_norm(
        x["input"],
        x.get("running_mean"),
        x.get("running_var"),
        x.get("weight"),
        x.get("bias"),
        training=True,
        momentum=momentum if momentum is not None else 0.0,
        eps=eps,
    )


def _repeat_kv(x: Mapping[str, Tensor], attrs: Mapping[str, Attr]) -> Tensor:
    n: Any = attrs["n"]
    value = x["input"]
    return value.unsqueeze(-3).expand(*value.shape[:-2], n, *value.shape[-2:]).flatten(-4, -3)


def _dropout(x: Mapping[str, Tensor], attrs: Mapping[str, Attr]) -> Tensor:
    p: Any = attrs["p"]
    shared: Any = attrs.get("shared", ())
    value = x["input"]
    shape = [1 if d in shared else n for d, n in enumerate(value.shape)]
    keep = torch.empty(shape, dtype=value.dtype, device=value.device).bernoulli_(1 - p)
    return value * keep / (1 - p) if p < 1 else value * 0


def _append(x: Mapping[str, Tensor], attrs: Mapping[str, Attr]) -> Tensor:
    cache, new = x["cache"], x["new"]
    kept = cache.shape[-2] - new.shape[-2]
    return new[..., -kept:, :] if kept < 0 else torch.cat((cache[..., :kept, :], new), -2)


OWN: dict[str, Any] = {
    "autoshard.experts": experts,
    "autoshard.identity": lambda x, attrs: x["input"].view_as(x["input"]),
    "autoshard.nll_sum": _nll_sum,
    "autoshard.count_valid": _count_valid,
    "autoshard.batch_norm": _batch_norm,
    "autoshard.repeat_kv": _repeat_kv,
    "autoshard.dropout": _dropout,
    "autoshard.append": _append,
}
"""Our own operators: (operands by role, attrs) -> result."""
