"""The form between an exported program and a ModelGraph: values that can still be changed.

A :class:`Value` is an operator and its one result, or a leaf. A :class:`Builder` makes values in
execution order and folds constants: what hangs on no parameter, input or random number is a
constant and is made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.graph import Attr

LEAF_KINDS = frozenset({"input", "parameter", "buffer"})

RANDOM = frozenset(
    {
        "aten.rand",
        "aten.randn",
        "aten.randint",
        "aten.randperm",
        "aten.rand_like",
        "aten.randn_like",
        "aten.bernoulli",
        "aten.multinomial",
        "aten.normal",
        "aten.native_dropout",
        "autoshard.dropout",
    }
)
"""Operators whose result is another one each time: never a constant."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Which block a value belongs to: the group of blocks and the call's index in it."""

    group: str
    index: int


@dataclass(slots=True, eq=False)
class Value:
    """One operator and its result, or a leaf; see :class:`autoshard.graph.Node` for the fields.

    Attributes:
        trainable: for a parameter, whether it requires grad.
        const: whether it hangs on no parameter, input or random number.
        boundary: whether it is the output of a block.
    """

    op: str
    operands: list[Value] = field(default_factory=list)
    roles: tuple[str, ...] = ()
    attrs: dict[str, Attr] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    module: str = ""
    instance: Instance | None = None
    trainable: bool = False
    const: bool = False
    boundary: bool = False

    @property
    def is_float(self) -> bool:
        """Whether it can have a gradient at all."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def role(self, name: str) -> Value | None:
        """The operand with this role, or None."""
        return self.operands[self.roles.index(name)] if name in self.roles else None


def family(op: str) -> str:
    """The operator without its overload: ``aten.add`` of ``aten.add.Tensor``."""
    return ".".join(op.split(".")[:2])


class Builder:
    """Makes values, in execution order.

    Attributes:
        order: operators that are no constants, in execution order (leaves are not in it).
        leaves: inputs, parameters and buffers by (kind, name).
        module: path of the module that issues the operators now.
        instance: the block that runs now, or None.
    """

    def __init__(self) -> None:
        self.order: list[Value] = []
        self.leaves: dict[tuple[str, str], Value] = {}
        self.module = ""
        self.instance: Instance | None = None
        self._constants: dict[Any, Value] = {}

    def emit(
        self,
        op: str,
        operands: Mapping[str, Value | None],
        shape: Iterable[int],
        dtype: str,
        /,
        **attrs: Attr,
    ) -> Value:
        """A new value; a constant that was made before is returned again.

        Args:
            op: full operator name.
            operands: by role; None for an optional tensor that is not there.
            shape: shape of the result.
            dtype: dtype of the result.
            **attrs: the other arguments.
        """
        present = {r: v for r, v in operands.items() if v is not None}
        value = Value(
            op=op,
            operands=list(present.values()),
            roles=tuple(present),
            attrs=dict(attrs),
            shape=tuple(shape),
            dtype=dtype,
            module=self.module,
            instance=self.instance,
        )
        value.const = family(op) not in RANDOM and all(v.const for v in value.operands)
        if not value.const:
            self.order.append(value)
            return value
        value.instance = None
        key = (op, value.roles, tuple(id(v) for v in value.operands), value.shape, dtype)
        return self._constants.setdefault((*key, repr(sorted(attrs.items()))), value)

    def leaf(
        self, kind: str, name: str, shape: Iterable[int], dtype: str, *, trainable: bool = False
    ) -> Value:
        """The input, parameter or buffer ``name``, made once."""
        key = "path" if kind == "input" else "fqn"
        if (kind, name) not in self.leaves:
            self.leaves[kind, name] = Value(
                op=kind, attrs={key: name}, shape=tuple(shape), dtype=dtype, trainable=trainable
            )
        return self.leaves[kind, name]

    # ---- short forms of what many rewrites need -------------------------------------------

    def reshape(self, x: Value, shape: Iterable[int]) -> Value:
        """``x`` in another shape; ``x`` itself if it has that shape."""
        shape = tuple(shape)
        if shape == x.shape:
            return x
        return self.emit("aten.reshape.default", {"self": x}, shape, x.dtype)

    def expand(self, x: Value, shape: Iterable[int]) -> Value:
        """``x`` broadcast to ``shape``."""
        shape = tuple(shape)
        if shape == x.shape:
            return x
        return self.emit("aten.expand.default", {"self": x}, shape, x.dtype)

    def permute(self, x: Value, dims: Iterable[int]) -> Value:
        """``x`` with dims in another order."""
        order = tuple(d % max(len(x.shape), 1) for d in dims)
        if order == tuple(range(len(x.shape))):
            return x
        shape = (x.shape[d] for d in order)
        return self.emit("aten.permute.default", {"self": x}, shape, x.dtype, dims=order)

    def cast(self, x: Value, dtype: str) -> Value:
        """``x`` as another dtype."""
        if dtype == x.dtype:
            return x
        return self.emit("aten.to.dtype", {"self": x}, x.shape, dtype, dtype=dtype)

    def slice(self, x: Value, dim: int, start: int, end: int, step: int = 1) -> Value:
        """``x[..., start:end:step, ...]`` with ``0 <= start <= end <= size``."""
        if start == 0 and end == x.shape[dim] and step == 1:
            return x
        shape = list(x.shape)
        shape[dim] = max(0, -(-(end - start) // step))
        attrs: dict[str, Attr] = {"dim": dim, "start": start, "end": end}
        if step != 1:
            attrs["step"] = step
        return self.emit("aten.slice.Tensor", {"self": x}, shape, x.dtype, **attrs)

    def select(self, x: Value, dim: int, index: int) -> Value:
        """``x[..., index, ...]``."""
        shape = x.shape[:dim] + x.shape[dim + 1 :]
        return self.emit("aten.select.int", {"self": x}, shape, x.dtype, dim=dim, index=index)

    def cat(self, parts: Iterable[Value], dim: int) -> Value:
        """The parts joined along ``dim``; empty ones left out."""
        kept = [p for p in parts if p.shape[dim]]
        if len(kept) == 1:
            return kept[0]
        shape = list(kept[0].shape)
        shape[dim] = sum(p.shape[dim] for p in kept)
        named = {f"tensors.{i}": p for i, p in enumerate(kept)}
        return self.emit("aten.cat.default", named, shape, kept[0].dtype, dim=dim)

    def full(self, shape: Iterable[int], fill: bool | int | float, dtype: str) -> Value:
        """A constant of one number."""
        return self.emit("aten.full.default", {}, shape, dtype, fill_value=fill)

    def add(self, a: Value, b: Value) -> Value:
        """``a + b`` where ``b`` broadcasts to ``a``."""
        return self.emit("aten.add.Tensor", {"self": a, "other": b}, a.shape, a.dtype)

    def mul(self, a: Value, b: Value) -> Value:
        """``a * b`` where ``b`` broadcasts to ``a``."""
        return self.emit("aten.mul.Tensor", {"self": a, "other": b}, a.shape, a.dtype)

    def reduce(self, op: str, x: Value, dims: Iterable[int], *, keepdim: bool = False) -> Value:
        """``aten.mean.dim`` or ``aten.sum.dim_IntList`` over ``dims``."""
        over = tuple(sorted(d % max(len(x.shape), 1) for d in dims))
        if not x.shape:
            return x
        kept = tuple(
            1 if i in over else n for i, n in enumerate(x.shape) if keepdim or i not in over
        )
        attrs: dict[str, Attr] = {"dim": over}
        if keepdim:
            attrs["keepdim"] = True
        return self.emit(op, {"self": x}, kept, x.dtype, **attrs)
