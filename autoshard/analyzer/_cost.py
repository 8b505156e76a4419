"""Floating-point operations of an operator, and what autograd keeps of it for backward."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from autoshard.errors import CaptureError
from autoshard.graph import ITEM_BYTES
from autoshard.normal.ir import LEAF_KINDS, Value, family
from autoshard.normal.operators import run_operator, torch_dtype

FREE = frozenset(
    {
        *("aten.reshape", "aten.permute", "aten.expand", "aten.slice", "aten.select"),
        *("aten.detach", "autoshard.identity", "autoshard.repeat_kv", "aten.cat", "aten.to"),
        "autoshard.append",
        *("aten.constant_pad_nd", "aten.roll", "aten.embedding", "aten.gather", "aten.index"),
        *("aten.index_select", "aten.full", "constant"),
    }
)
"""Operators that move data and compute nothing."""

PARTS = frozenset({"aten.slice", "aten.select"})
"""Views that show less than their operand."""

SDPA = "aten.scaled_dot_product_attention.default"


def forward_flops(value: Value) -> int:
    """Floating-point operations of the forward.

    Products count 2 a multiply-add: 2 m k n. Other operators count one for each element that they
    read or write, whichever is more.
    """
    product = _product_flops(value)
    if product is not None:
        return product
    if value.op in LEAF_KINDS or family(value.op) in FREE:
        return 0
    largest = max((prod(o.shape) for o in value.operands if o.is_float), default=0)
    reads = largest if _reduces(value) else 0
    return max(prod(value.shape), reads)


def _reduces(value: Value) -> bool:
    return family(value.op) in {"aten.mean", "aten.sum", "autoshard.nll_sum", "aten.amax"}


def _product_flops(value: Value) -> int | None:
    base = family(value.op)
    shapes = [o.shape for o in value.operands]
    if base == "aten.linear" or base in ("aten.mm", "aten.bmm", "aten.matmul", "aten.mv"):
        return 2 * prod(value.shape) * shapes[0][-1]
    if base.startswith("aten.conv") and "transpose" not in base and "pad" not in base:
        return 2 * prod(value.shape) * prod(shapes[1][1:])
    if base == "aten._grouped_mm" and len(shapes[0]) == 2:
        # Each row meets the one matrix of its group.
        return 2 * prod(shapes[0]) * shapes[1][-1]
    if base == "autoshard.experts":
        # Rows of tokens with each of their experts: two matrices of I x F, one of F x O.
        _, out, inner = shapes[4]
        return 2 * prod(shapes[1]) * inner * (2 * shapes[0][1] + out)
    if base.startswith("aten.conv_transpose"):
        return 2 * prod(shapes[0]) * prod(shapes[1][1:])
    if base == "aten.einsum" and len(shapes) == 2:
        left = str(value.attrs["equation"]).replace(" ", "").split("->")[0].split(",")
        if all("." not in part for part in left):
            sizes = {
                c: n
                for part, s in zip(left, shapes, strict=True)
                for c, n in zip(part, s, strict=True)
            }
            return 2 * prod(sizes.values())
    if value.op == SDPA:
        *batch, rows, depth = shapes[0]
        columns, out = shapes[1][-2], shapes[2][-1]
        return 2 * prod(batch) * rows * columns * (depth + out)
    return None


def backward_flops(value: Value, differentiable: Sequence[bool]) -> int:
    """Floating-point operations of the backward.

    Args:
        value: the operator.
        differentiable: for each operand, whether its gradient is needed.
    """
    needed = sum(differentiable)
    if not needed:
        return 0
    product = _product_flops(value)
    if value.op == SDPA:
        assert product is not None
        return product * 5 // 2
    if product is not None and family(value.op) == "autoshard.experts":
        return product * (differentiable[0] + any(differentiable[3:]))
    if product is not None:
        return product * needed
    return 2 * forward_flops(value)


class SavedTensors:
    """What autograd keeps, operator after operator of one graph.

    Every different call runs once on fake tensors under ``saved_tensors_hooks``.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._calls: dict[Any, tuple[frozenset[str], int, tuple[int, ...], str]] = {}
        self._strides: dict[int, tuple[int, ...]] = {}
        self._storage: dict[int, int] = {}
        self._kept: set[int] = set()
        self._never_counted: set[int] = set()
        self._alive: list[Value] = []

    def leaf(self, value: Value, *, parameter: bool) -> None:
        """A leaf that follows; parameters and constants are listed by every saver."""
        self._strides[id(value)] = _contiguous(value.shape)
        self._storage[id(value)] = id(value)
        self._alive.append(value)
        if parameter:
            self._never_counted.add(id(value))

    def operator(
        self, value: Value, differentiable: bool, needed: Sequence[bool]
    ) -> tuple[tuple[str, ...], int]:
        """Roles that ``value`` keeps and nothing before it kept, and further bytes."""
        self._alive.append(value)
        shapes = tuple((o.shape, self._strides[id(o)], o.dtype) for o in value.operands)
        text = repr(sorted(value.attrs.items()))
        key = (value.op, value.roles, shapes, tuple(needed), text, value.shape)
        if key not in self._calls:
            self._calls[key] = self._run(value, shapes, needed)
        roles, extra, strides, shared = self._calls[key]
        self._strides[id(value)] = strides
        # A part of a value is a value of its own here: parts are kept one by one (a fused QKV).
        shares = value.role(shared) if shared and family(value.op) not in PARTS else None
        self._storage[id(value)] = id(value) if shares is None else self._storage[id(shares)]
        whole = value.operands[0] if value.operands and shared else None
        if whole is not None and self._storage[id(whole)] in self._never_counted:
            self._storage[id(value)] = self._storage[id(whole)]
        if not differentiable:
            return (), 0
        out: list[str] = []
        for role in (*value.roles, "result"):
            if role not in roles:
                continue
            source = value if role == "result" else value.role(role)
            storage = self._storage[id(source)]
            if storage in self._never_counted:
                out.append(role)
            elif storage not in self._kept:
                self._kept.add(storage)
                out.append(role)
        return tuple(out), extra

    def _run(
        self, value: Value, shapes: Sequence[Any], needed: Sequence[bool]
    ) -> tuple[frozenset[str], int, tuple[int, ...], str]:
        known = _known(value, needed)
        dtypes = [torch_dtype(d) for _, _, d in shapes]
        with self._mode, torch.enable_grad():
            tensors = [
                torch.empty_strided(shape, strides, dtype=dtype).requires_grad_(
                    need and dtype.is_floating_point
                )
                for (shape, strides, _), dtype, need in zip(shapes, dtypes, needed, strict=True)
            ]
            storages = {_address(t): role for role, t in zip(value.roles, tensors, strict=True)}
            kept: list[Any] = []

            def pack(t: Any) -> Any:
                kept.append(t)
                return t

            try:
                with saved_tensors_hooks(pack, lambda t: t):
                    result = run_operator(value.op, value.roles, tensors, value.attrs, value.shape)
            except (RuntimeError, NotImplementedError, CaptureError, TypeError):
                return frozenset(value.roles), 0, _contiguous(value.shape), ""
            strides = tuple(int(s) for s in result.stride())
            shared = storages.get(_address(result), "")
            if known is not None:
                return *known, strides, shared
            roles: set[str] = set()
            extras: dict[int, int] = {}
            for t in kept:
                address = _address(t)
                if address in storages:
                    roles.add(storages[address])
                elif address == _address(result):
                    roles.add("result")
                else:
                    extras[address] = t.numel() * t.element_size()
            return frozenset(roles), sum(extras.values()), strides, shared


def _known(value: Value, needed: Sequence[bool]) -> tuple[frozenset[str], int] | None:
    """Operators whose kernel on an accelerator keeps something else than the CPU's does."""
    if not any(needed):
        return frozenset(), 0
    item = ITEM_BYTES[value.dtype]
    if value.op == SDPA:
        # Flash and memory-efficient kernels: one float32 log-sum-exp a row beside in and output.
        rows = prod(value.operands[0].shape[:-1])
        return frozenset((*value.roles, "result")), 4 * rows
    if value.op == "autoshard.nll_sum":
        return frozenset({"target"}), prod(value.operands[0].shape) * item
    if value.op == "autoshard.batch_norm":
        channels = value.operands[0].shape[1]
        kept = {"input", "weight"} & set(value.roles)
        return frozenset(kept), 2 * channels * max(item, 4)
    if value.op == "autoshard.dropout":
        shared: Any = value.attrs.get("shared", ())
        return frozenset(), prod(n for d, n in enumerate(value.shape) if d not in shared)
    if value.op == "autoshard.experts":
        # Rows as the products take and give them, of both kinds of operands and the results that
        # the activation, the gate and the router's weights multiply; order, expert and place.
        index, down = value.role("index"), value.role("down")
        assert index is not None
        assert down is not None
        rows, (_, out, inner) = prod(index.shape), down.shape
        held = (value.operands[0].shape[1] + 4 * inner + out) * ITEM_BYTES[down.dtype]
        return frozenset({"index", "gate_up", "down"}), rows * (held + 3 * 8 + 1)
    if value.op in ("autoshard.repeat_kv", "autoshard.identity"):
        return frozenset(), 0
    return None


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _address(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)
