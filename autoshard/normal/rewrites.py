"""One exported operator -> operators of the normal form: views, products, in-place writes to views.

A rewrite takes the builder and the :class:`Call` (arguments by schema name, defaults filled in)
and gives a value, a list of values (a multi-output operator), or a function from output index to
value. Losses, normalisations and attention stand in :mod:`autoshard.normal.rewrites_nn`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from autoshard.errors import CaptureError
from autoshard.graph import Attr
from autoshard.normal.ir import Builder, Value

Result = Value | list[Value] | Callable[[int], Value]

DROPPED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy"})
"""Arguments that say where a tensor lies, not what it is."""


@dataclass(frozen=True)
class Call:
    """One call of an operator: ``args`` by schema name, values in the place of tensors."""

    op: str
    target: Any
    args: dict[str, Any]
    shape: tuple[int, ...]
    dtype: str
    outputs: tuple[Any, ...] = ()

    @classmethod
    def of(cls, node: fx.Node, look: Callable[[fx.Node], Any]) -> Call:
        """The call of ``node``; ``look`` gives the value of an argument."""
        schema = node.target._schema  # type: ignore[union-attr]
        args: dict[str, Any] = {a.name: a.default_value for a in schema.arguments}
        for argument, value in zip(schema.arguments, node.args, strict=False):
            args[argument.name] = fx.map_arg(value, look)
        for key, value in node.kwargs.items():
            args[key] = fx.map_arg(value, look)
        shape: tuple[int, ...] = ()
        dtype = ""
        outputs: tuple[Any, ...] = ()
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            if any(isinstance(n, torch.SymInt) for n in val.shape):
                raise CaptureError(
                    f"{node.target} gives a tensor whose size depends on data (a boolean index, "
                    "nonzero or unique); shapes must be known before the run: use a mask with "
                    "torch.where, or topk"
                )
            shape, dtype = tuple(int(n) for n in val.shape), _name(val.dtype)
        elif isinstance(val, list | tuple):
            outputs = tuple(val)
        return cls(str(node.target), node.target, args, shape, dtype, outputs)

    def renamed(self, op: str, target: Any) -> Call:
        """The same call of another operator, whose arguments stand in the same order."""
        args = {a.name: a.default_value for a in target._schema.arguments}
        old = self.target._schema.arguments
        for before, after in zip(old, target._schema.arguments, strict=False):
            args[after.name] = self.args[before.name]
        return replace(self, op=op, target=target, args=args)

    def __getitem__(self, name: str) -> Any:
        return self.args[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attr(value: Any) -> Attr:
    """A non-tensor argument as a graph attribute.

    Raises:
        CaptureError: a value that depends on data, or of a kind that no graph can hold.
    """
    if isinstance(value, torch.dtype):
        return _name(value)
    if isinstance(value, list | tuple):
        return tuple(attr(v) for v in value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError(f"the size {value} depends on data; shapes must be known before the run")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CaptureError(f"an argument {value!r} of type {type(value).__name__} cannot be kept")


def split_arguments(call: Call) -> tuple[dict[str, Value], dict[str, Attr]]:
    """Tensor arguments by role, and the others that differ from the schema's defaults."""
    operands: dict[str, Value] = {}
    attrs: dict[str, Attr] = {}
    for argument in call.target._schema.arguments:
        value = call.args[argument.name]
        if isinstance(value, Value):
            operands[argument.name] = value
        elif isinstance(value, list | tuple) and any(isinstance(v, Value) for v in value):
            operands |= {
                f"{argument.name}.{i}": v for i, v in enumerate(value) if isinstance(v, Value)
            }
        elif argument.name not in DROPPED and value != argument.default_value:
            attrs[argument.name] = attr(value)
    if not operands:
        # The shape and the dtype of what is made from nothing are the node's.
        attrs.pop("size", None)
        if call.dtype.startswith(("float", "bfloat", "complex")) and "dtype" in call.args:
            attrs.setdefault("dtype", call.dtype)
    first = next(iter(operands.values()), None)
    rank = len(first.shape) if first is not None else 0
    dim = attrs.get("dim")
    if rank and isinstance(dim, int) and not isinstance(dim, bool) and dim < 0:
        attrs["dim"] = dim + rank
    elif isinstance(dim, tuple):
        attrs["dim"] = tuple(d % rank if rank and isinstance(d, int) else d for d in dim)
    return operands, attrs


def plain(b: Builder, call: Call) -> Result:
    """The call as it is."""
    operands, attrs = split_arguments(call)
    if call.outputs:

        def output(index: int) -> Value:
            val = call.outputs[index]
            return b.emit(call.op, operands, val.shape, _name(val.dtype), **attrs, output=index)

        return output
    if not call.dtype:
        raise CaptureError(
            f"module {b.module or '(root)'} reads a tensor's value into Python ({call.op}); "
            "keep it a tensor, or make it a constant before forward"
        )
    return b.emit(call.op, operands, call.shape, call.dtype, **attrs)


REWRITES: dict[str, Callable[[Builder, Call], Result]] = {}


def rewrite(*ops: str) -> Callable[[Callable[[Builder, Call], Result]], Any]:
    """Register a rewrite for full operator names."""

    def register(function: Callable[[Builder, Call], Result]) -> Any:
        for op in ops:
            if op in REWRITES:
                raise ValueError(f"two rewrites of {op}")
            REWRITES[op] = function
        return function

    return register


# ---- views and copies ---------------------------------------------------------------------


@rewrite(
    *("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"),
    *("aten.flatten.using_ints", "aten.unflatten.int", "aten.unsqueeze.default"),
    *("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.view_as.default"),
    *("aten.reshape_as.default", "aten.ravel.default", "aten.atleast_1d.default"),
)
def _reshape(b: Builder, call: Call) -> Value:
    return b.reshape(call["self"], _target_shape(call))


def _target_shape(call: Call) -> tuple[int, ...]:
    """The result's shape from arguments, for views that are taken again of a changed base."""
    return call.shape


@rewrite("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default")
def _expand(b: Builder, call: Call) -> Value:
    return b.expand(call["self"], call.shape)


@rewrite("aten.broadcast_tensors.default", "aten.meshgrid.indexing")
def _broadcast(b: Builder, call: Call) -> Result:
    shape = tuple(int(n) for n in call.outputs[0].shape)
    parts = call["tensors"]
    if "meshgrid" in call.op:
        order = list(range(len(parts)))
        if call["indexing"] == "xy" and len(parts) > 1:
            order[:2] = [1, 0]
        ones = [
            tuple(prod(p.shape) if d == order[i] else 1 for d in range(len(parts)))
            for i, p in enumerate(parts)
        ]
        parts = [b.reshape(p, s) for p, s in zip(parts, ones, strict=True)]
    return lambda index: b.expand(parts[index], shape)


@rewrite("aten.permute.default")
def _permute(b: Builder, call: Call) -> Value:
    return b.permute(call["self"], call["dims"])


def _swapped(rank: int, i: int, j: int) -> list[int]:
    order = list(range(rank))
    if rank:
        order[i % rank], order[j % rank] = order[j % rank], order[i % rank]
    return order


@rewrite("aten.transpose.int", "aten.swapaxes.default", "aten.swapdims.default")
def _transpose(b: Builder, call: Call) -> Value:
    x = call["self"]
    i = call.args.get("dim0", call.args.get("axis0"))
    j = call.args.get("dim1", call.args.get("axis1"))
    assert isinstance(i, int)
    assert isinstance(j, int)
    return b.permute(x, _swapped(len(x.shape), i, j))


@rewrite("aten.t.default", "aten.mT.default", "aten.mH.default", "aten.adjoint.default")
def _matrix_transpose(b: Builder, call: Call) -> Value:
    x = call["self"]
    return x if len(x.shape) < 2 else b.permute(x, _swapped(len(x.shape), -2, -1))


@rewrite("aten.numpy_T.default")
def _reverse(b: Builder, call: Call) -> Value:
    x = call["self"]
    return b.permute(x, reversed(range(len(x.shape))))


@rewrite("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int")
def _movedim(b: Builder, call: Call) -> Value:
    x = call["self"]
    rank = len(x.shape)
    source, to = call["source"], call["destination"]
    sources = [s % rank for s in ([source] if isinstance(source, int) else source)]
    targets = [t % rank for t in ([to] if isinstance(to, int) else to)]
    rest = [d for d in range(rank) if d not in sources]
    order = [0] * rank
    for s, t in zip(sources, targets, strict=True):
        order[t] = s
    for t in range(rank):
        if t not in targets:
            order[t] = rest.pop(0)
    return b.permute(x, order)


@rewrite(
    *("aten.contiguous.default", "aten.alias.default", "aten.clone.default"),
    *("aten.lift_fresh.default", "aten.lift_fresh_copy.default", "aten.view.dtype"),
    *("aten.positive.default", "aten.resolve_conj.default", "aten.resolve_neg.default"),
)
def _same(b: Builder, call: Call) -> Value:
    if call.dtype and call.dtype != call["self"].dtype:
        raise CaptureError(
            f"module {b.module or '(root)'} reads the bits of a {call['self'].dtype} tensor as "
            f"{call.dtype} ({call.op}), which has no gradient and no normal form"
        )
    value = call["self"]
    assert isinstance(value, Value)
    return value


@rewrite("aten.detach.default")
def _detach(b: Builder, call: Call) -> Value:
    x = call["self"]
    return x if x.const else b.emit("aten.detach.default", {"self": x}, x.shape, x.dtype)


@rewrite(
    *("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other"),
    *("aten._to_copy.default", "aten.type_as.default", "aten.to.prim_Device"),
)
def _cast(b: Builder, call: Call) -> Value:
    return b.cast(call["self"], call.dtype)


@rewrite("aten.slice.Tensor", "aten.narrow.default")
def _slice(b: Builder, call: Call) -> Value:
    x, dim = call["self"], call["dim"] % len(call["self"].shape)
    size = x.shape[dim]
    start, end, step = call["start"], call.args.get("end"), call.args.get("step", 1)
    if "length" in call.args:
        start = start % size if start < 0 else start
        end = start + call["length"]
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    end = min(max(end + size if end < 0 else end, start), size)
    return b.slice(x, dim, start, end, step)


@rewrite("aten.select.int")
def _select(b: Builder, call: Call) -> Value:
    x, dim = call["self"], call["dim"] % len(call["self"].shape)
    return b.select(x, dim, call["index"] % x.shape[dim])


@rewrite(
    *("aten.split.Tensor", "aten.split_with_sizes.default", "aten.split.sizes"),
    *("aten.chunk.default", "aten.unsafe_split.Tensor", "aten.unsafe_chunk.default"),
    *("aten.tensor_split.sections", "aten.tensor_split.indices"),
)
def _split(b: Builder, call: Call) -> Result:
    """Equal parts are a dim of their own, so that each part can be cut alike; others are slices."""
    x = call["self"]
    dim = call["dim"] % len(x.shape)
    sizes = [int(val.shape[dim]) for val in call.outputs]
    count = len(sizes)
    if count > 1 and len(set(sizes)) == 1:
        shape = (*x.shape[:dim], count, sizes[0], *x.shape[dim + 1 :])
        whole = b.reshape(x, shape)
        return lambda index: b.select(whole, dim, index % count)

    def part(index: int) -> Value:
        start = sum(sizes[: index % count])
        return b.slice(x, dim, start, start + sizes[index])

    return part


@rewrite("aten.unbind.int")
def _unbind(b: Builder, call: Call) -> Result:
    x = call["self"]
    dim = call["dim"] % len(x.shape)
    return lambda index: b.select(x, dim, index % x.shape[dim])


@rewrite("aten.cat.default", "aten.concat.default", "aten.concatenate.default")
def _cat(b: Builder, call: Call) -> Value:
    parts = [p for p in call["tensors"] if p.shape != (0,)] or call["tensors"][:1]
    return b.cat([b.cast(p, call.dtype) for p in parts], call["dim"] % len(parts[0].shape))


@rewrite("aten.stack.default")
def _stack(b: Builder, call: Call) -> Value:
    dim = call["dim"] % len(call.shape)
    one = (*call.shape[:dim], 1, *call.shape[dim + 1 :])
    return b.cat([b.reshape(p, one) for p in call["tensors"]], dim)


@rewrite("aten.pad.default", "aten.constant_pad_nd.default")
def _pad(b: Builder, call: Call) -> Result:
    pad = call["pad"]
    if not any(pad):
        value = call["self"]
        assert isinstance(value, Value)
        return value
    if call.args.get("mode", "constant") != "constant":
        return plain(b, call)
    fill = call["value"] or 0
    x = call["self"]
    fill = float(fill) if x.is_float else int(fill)
    return b.emit(
        "aten.constant_pad_nd.default",
        {"self": x},
        call.shape,
        call.dtype,
        pad=tuple(pad),
        value=fill,
    )


@rewrite(
    *("aten.new_zeros.default", "aten.zeros_like.default", "aten.zeros.default"),
    *("aten.new_ones.default", "aten.ones_like.default", "aten.ones.default"),
    *("aten.new_full.default", "aten.full_like.default", "aten.full.default"),
    *("aten.new_empty.default", "aten.empty_like.default", "aten.empty.memory_format"),
    *("aten.scalar_tensor.default",),
)
def _full(b: Builder, call: Call) -> Value:
    fill: Any = 0
    if "ones" in call.op:
        fill = 1
    elif "full" in call.op:
        fill = call["fill_value"]
    elif "scalar_tensor" in call.op:
        fill = call["s"]
    if call.dtype == "bool":
        fill = bool(fill)
    elif call.dtype.startswith(("float", "bfloat")):
        fill = float(fill)
    return b.full(call.shape, fill, call.dtype)


# ---- products -----------------------------------------------------------------------------


@rewrite("aten.linear.default")
def _linear(b: Builder, call: Call) -> Value:
    out = b.emit(
        "aten.linear.default",
        {"input": call["input"], "weight": call["weight"]},
        call.shape,
        call.dtype,
    )
    return out if call["bias"] is None else b.add(out, call["bias"])


@rewrite("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def _addmm(b: Builder, call: Call) -> Result:
    if call["alpha"] != 1 or call["beta"] != 1 or "addmv" in call.op:
        return plain(b, call)
    name = "mat" if "addmm" in call.op else "batch"
    product = "aten.mm.default" if "addmm" in call.op else "aten.bmm.default"
    out = b.emit(
        product, {"self": call[name + "1"], "mat2": call[name + "2"]}, call.shape, call.dtype
    )
    return b.add(out, call["self"])


@rewrite(
    *(f"aten.conv{n}d.{kind}" for n in (1, 2, 3) for kind in ("default", "padding")),
    *("aten.convolution.default", "aten.conv_transpose1d.default"),
    *("aten.conv_transpose2d.input", "aten.conv_transpose3d.input"),
)
def _conv(b: Builder, call: Call) -> Value:
    bias = call["bias"]
    call.args["bias"] = None
    operands, attrs = split_arguments(call)
    for name in ("stride", "padding", "dilation"):
        spatial = len(call.shape) - 2
        given = attrs.get(name)
        if isinstance(given, int):
            given = (given,)
        if isinstance(given, tuple) and len(given) == 1:
            attrs[name] = given * spatial
    out = b.emit(call.op, operands, call.shape, call.dtype, **attrs)
    if bias is None:
        return out
    spatial = len(call["weight"].shape) - 2
    return b.add(out, b.reshape(bias, (*bias.shape, *(1,) * spatial)))


# ---- writes to views ----------------------------------------------------------------------


class VIEWS:
    """Which exported operators give a view of their first argument."""

    ALWAYS = frozenset(
        {
            *("view", "unsqueeze", "squeeze", "expand", "expand_as", "permute", "transpose", "t"),
            *("slice", "select", "narrow", "alias", "detach", "view_as", "unflatten", "movedim"),
            *("mT", "swapaxes", "swapdims", "lift_fresh"),
        }
    )
    IF_CONTIGUOUS = frozenset({"reshape", "flatten", "contiguous", "reshape_as", "ravel"})

    @classmethod
    def is_view(cls, node: fx.Node) -> bool:
        """Whether the result of ``node`` shares memory with its first argument."""
        base = str(node.target).split(".")[1]
        if base in cls.ALWAYS:
            return True
        source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
        if not isinstance(source, torch.Tensor):
            return False
        if base in ("to", "type_as"):
            val = node.meta.get("val")
            return isinstance(val, torch.Tensor) and val.dtype == source.dtype
        return base in cls.IF_CONTIGUOUS and source.is_contiguous()


def scatter(b: Builder, call: Call, base: Value, new: Value) -> Value:
    """``base`` with the part that the view ``call`` shows replaced by ``new``.

    Raises:
        CaptureError: a view that cannot be written through (an expanded one).
    """
    name = call.op.split(".")[1]
    if name in ("slice", "narrow"):
        part = _slice(b, call)
        if part is base:
            return new
        dim = call["dim"] % len(base.shape)
        start, end = part.attrs["start"], part.attrs["end"]
        assert isinstance(start, int)
        assert isinstance(end, int)
        if part.attrs.get("step", 1) == 1:
            before = b.slice(base, dim, 0, start)
            return b.cat([before, new, b.slice(base, dim, end, base.shape[dim])], dim)
        return b.emit(
            "aten.slice_scatter.default",
            {"self": base, "src": new},
            base.shape,
            base.dtype,
            dim=dim,
            start=start,
            end=end,
            step=part.attrs["step"],
        )
    if name == "select":
        dim = call["dim"] % len(base.shape)
        index = call["index"] % base.shape[dim]
        one = b.reshape(new, (*base.shape[:dim], 1, *base.shape[dim + 1 :]))
        before = b.slice(base, dim, 0, index)
        return b.cat([before, one, b.slice(base, dim, index + 1, base.shape[dim])], dim)
    if name in ("permute", "transpose", "t", "mT", "movedim", "swapaxes", "swapdims"):
        view = REWRITES[call.op](b, call)
        assert isinstance(view, Value)
        if view is base:
            return new
        order: Any = view.attrs["dims"]
        return b.permute(new, [order.index(d) for d in range(len(order))])
    if name not in ("expand", "expand_as"):
        return b.reshape(new, base.shape)
    raise CaptureError(
        f"module {b.module or '(root)'} writes into a view made by {call.op}, which has no "
        "out-of-place form; write to a tensor of its own"
    )
