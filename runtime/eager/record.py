"""A Python-level torch function, bound to operators of the normal form.

The function runs once on tensors without data that have the global shapes; every ``aten`` operator
it reaches *before* autograd and decomposition (``aten.linear``, ``aten.layer_norm``) is taken down
and rewritten as the analyzer rewrites an exported graph. An operator without a rule that torch
itself composes of others is taken apart once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.errors import CaptureError, RuleError
from autoshard.graph import ITEM_BYTES, Attr
from autoshard.runtime.eager.compiler import without_compiler
from autoshard.runtime.eager.normal import (
    REWRITES,
    Builder,
    Call,
    Value,
    plain,
    split_arguments,
)
from autoshard.sharding.registry import OpCall, rule_of
from autoshard.sharding.rule import Rule

_bindings: Any = torch._C
is_alias_of: Callable[[Tensor, Tensor], bool] = _bindings._is_alias_of
"""Whether two tensors share memory."""


class UnrecordableError(Exception):
    """The function reads data, writes through a view, or is otherwise not one fixed list of ops."""


@dataclass(frozen=True, slots=True)
class Write:
    """An operand is overwritten with a value."""

    operand: int
    value: Value
    grad: bool = True


@dataclass(frozen=True, slots=True)
class Made:
    """In the place of a tensor in the result: the value, or the operand that is returned itself.

    ``alias`` is the operand that the result is a view of.
    """

    value: Value | None
    operand: int | None = None
    alias: int | None = None
    strides: tuple[int, ...] | None = None


@dataclass(slots=True)
class Recording:
    """What a function does.

    Attributes:
        inputs: the operands.
        steps: operators and writes, in order.
        grad: of each operator whether autograd was on.
        result: the function's result with a :class:`Made` for every tensor.
    """

    inputs: list[Value]
    steps: list[Value | Write] = field(default_factory=list)
    grad: dict[int, bool] = field(default_factory=dict)
    result: Any = None


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    found = ITEM_BYTES.get(dtype)
    return int(getattr(torch, dtype).itemsize) if found is None else found


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def op_call(value: Value) -> OpCall:
    """The operator as rules see it."""
    return OpCall(
        op=value.op,
        shapes=tuple(v.shape for v in value.operands),
        roles=value.roles,
        attrs=value.attrs,
        result=value.shape,
        itemsize=itemsize(value.dtype),
        operand_itemsizes=tuple(itemsize(v.dtype) for v in value.operands),
    )


def rule_or_none(value: Value) -> Rule | None:
    """The rule of an operator, None where it must run whole."""
    return rule_of_call(op_call(value))


def rule_of_call(call: OpCall) -> Rule | None:
    """The rule of a call, None where it must run whole."""
    try:
        return rule_of(call)
    except RuleError as error:
        raise RuleError(f"{call.op}: {error}") from error
    except (IndexError, KeyError, ValueError):
        return None  # a call of a form that the rule does not foresee


class _Steps(Builder):
    """A builder that keeps constants in order, too: they are made anew at every call."""

    def __init__(self, recording: Recording, trained: set[int]) -> None:
        super().__init__()
        self._recording = recording
        self.trained = trained

    def emit(
        self,
        op: str,
        operands: Mapping[str, Value | None],
        shape: Iterable[int],
        dtype: str,
        /,
        **attrs: Attr,
    ) -> Value:
        value = super().emit(op, operands, shape, dtype, **attrs)
        if id(value) not in self._recording.grad:
            self._recording.grad[id(value)] = torch.is_grad_enabled()
            if torch.is_grad_enabled() and any(id(v) in self.trained for v in value.operands):
                self.trained.add(id(value))
            self._recording.steps.append(value)
        return value

    def full(self, shape: Iterable[int], fill: bool | int | float, dtype: str) -> Value:
        return self.emit("aten.full.default", {}, shape, dtype, fill_value=fill, dtype=dtype)


# ---- what the analyzer writes otherwise, because a step has no tensors that one can write to ----


def _copy(b: Builder, call: Call) -> Value:
    x = call["self"]
    return b.emit("aten.clone.default", {"self": x}, x.shape, x.dtype)


def _contiguous(b: Builder, call: Call) -> Value:
    x = call["self"]
    return b.emit("aten.contiguous.default", {"self": x}, x.shape, x.dtype)


def _norm(b: Builder, call: Call) -> Any:
    """A vector norm as a sum of powers, which a cut leaves partial."""
    x, power = call["self"], call["ord"]
    if not isinstance(power, (int, float)) or power <= 0 or power == float("inf"):
        return plain(b, call)
    if power % 2 or not x.is_float or x.dtype.startswith("complex"):
        return plain(b, call)
    x = b.cast(x, call.dtype)
    dims = call.args.get("dim")
    over = range(len(x.shape)) if dims is None or dims == [] else dims
    over = [over] if isinstance(over, int) else over
    powers = b.emit("aten.pow.Tensor_Scalar", {"self": x}, x.shape, x.dtype, exponent=power)
    total = b.reduce("aten.sum.dim_IntList", powers, over, keepdim=bool(call.args.get("keepdim")))
    return b.emit(
        "aten.pow.Tensor_Scalar", {"self": total}, total.shape, total.dtype, exponent=1 / power
    )


def _in_order(b: Builder, call: Call) -> Any:
    return plain(b, call)


OVERRIDES: dict[str, Callable[[Builder, Call], Any]] = {
    "aten.clone.default": _copy,
    "aten.lift_fresh_copy.default": _copy,
    "aten.contiguous.default": _contiguous,
    "aten.linalg_vector_norm.default": _norm,
}

_MASKED = frozenset({"aten.dropout.default", "aten.feature_dropout.default"})


def odd_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides, unless they are those of a contiguous tensor."""
    return None if tensor.is_contiguous() else tuple(tensor.stride())


def _memory_order(tensor: Tensor) -> list[int] | None:
    """Dims by stride, where a mask like ``tensor`` is not drawn in the order of its dims."""
    strides = torch.empty_like(tensor).stride()
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    return None if order == sorted(order) else order


def _permuted(b: Builder, call: Call, order: Sequence[int]) -> Call:
    x = b.permute(call["input"], order)
    return replace(call, args=call.args | {"input": x}, shape=x.shape)


FUNCTIONAL = {"normal_": "normal_functional"}
"""Operators in place whose other form has another name."""


class _Recorder(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down the operators that are reached before autograd.

    Torch accepts only its own classes on this key, hence the base class; nothing of it is used.
    """

    def __init__(
        self, recording: Recording, operands: Sequence[Tensor], trained: Sequence[bool]
    ) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]
        self.recording = recording
        self.build = _Steps(
            recording, {id(v) for v, t in zip(recording.inputs, trained, strict=True) if t}
        )
        self.operands = {id(t): i for i, t in enumerate(operands)}
        self.values: dict[int, Value] = {
            id(t): v for t, v in zip(operands, recording.inputs, strict=True)
        }
        self.kept: list[Any] = list(operands)
        self._viewed: set[int] = set()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        return TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: object) -> Any:
        return TorchDispatchMode.__exit__(self, *exception)  # type: ignore[no-untyped-call]

    def look(self, value: Any) -> Any:
        """Tensors as values, in lists too."""
        if isinstance(value, Tensor):
            found = self.values.get(id(value))
            if found is None:
                raise UnrecordableError("a tensor that is no operand")
            return found
        if isinstance(value, (list, tuple)):
            return [self.look(v) for v in value]
        return value

    def dispatch(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take down one operator, and give its result."""
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith("aten.lift_fresh."):
            out = func(*args, **kwargs)
            if id(args[0]) in self.values:
                self.values[id(out)] = self.values[id(args[0])]
            elif isinstance(args[0], Tensor) and args[0].numel() == 1 and not args[0].requires_grad:
                raise UnrecordableError("a number lifted to a tensor")
            self.kept.append(out)
            return out
        if "_forward_only" in name:
            raise UnrecordableError(f"{name} has no derivative")
        schema = func._schema
        args, kwargs = _without_device(schema, args, kwargs)
        written = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if written and not name.startswith("aten.batch_norm"):
            return self._in_place(func, name, written, args, kwargs)
        out = func(*args, **kwargs)
        if out is None or not _has_tensor(out):
            if name.startswith(
                ("aten._local_scalar", "aten.item", "aten.equal", "aten.is_nonzero")
            ):
                raise UnrecordableError(name)
            return out
        self._record(func, name, args, kwargs, out)
        return out

    def call(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Call:
        """The call with values in the place of tensors."""
        given: dict[str, Any] = {a.name: a.default_value for a in func._schema.arguments}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            given[argument.name] = self.look(value)
        for key, value in kwargs.items():
            given[key] = self.look(value)
        single = isinstance(out, Tensor)
        return Call(
            name,
            func,
            given,
            tuple(out.shape) if single else (),
            dtype_name(out.dtype) if single else "",
            () if single else tuple(out),
        )

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        call = self.call(func, name, args, kwargs, out)
        rewrite = OVERRIDES.get(name) or REWRITES.get(name)
        if name in _MASKED and (order := _memory_order(args[0])) is not None:
            masked = REWRITES[name](self.build, _permuted(self.build, call, order))
            assert isinstance(masked, Value)
            back = [order.index(d) for d in range(len(order))]
            self._bind(out, self.build.permute(masked, back))
            return
        if (
            name.startswith("aten.to.")
            and call.args.get("copy")
            and call.dtype == call["self"].dtype
        ):
            rewrite = _copy
        if name == "aten.linalg_vector_norm.default" and id(call["self"]) in self.build.trained:
            rewrite = None  # its own derivative is 0 at 0
        if rewrite is None and self._taken_apart(func, call, args, kwargs, out):
            return
        result: Any = plain(self.build, call) if rewrite is None else rewrite(self.build, call)
        if isinstance(out, Tensor):
            if not isinstance(result, Value):
                result = result(0) if callable(result) else result[0]
            self._bind(out, result)
        else:
            for index, one in enumerate(out):
                if isinstance(one, Tensor):
                    self._bind(one, result(index) if callable(result) else result[index])
        for a in args:
            if isinstance(a, Tensor) and isinstance(out, Tensor) and out._base is not None:
                self._viewed.add(id(out._base))

    def _bind(self, out: Tensor, value: Value) -> None:
        self.values[id(out)] = value
        self.kept.append(out)

    def _taken_apart(self, func: Any, call: Call, args: Any, kwargs: Any, out: Any) -> bool:
        """Whether the operator has no rule and was taken down as what it is composed of."""
        if not func._can_decompose() or func.namespace != "aten":
            return False
        try:
            operands, attrs = split_arguments(call)
        except CaptureError:
            operands, attrs = {}, {}
        probe = Value(
            op=call.op,
            operands=list(operands.values()),
            roles=tuple(operands),
            attrs=dict(attrs),
            shape=call.shape,
            dtype=call.dtype or dtype_name(next(t.dtype for t in out if isinstance(t, Tensor))),
        )
        if call.outputs or rule_or_none(probe) is None:
            if call.outputs and rule_of_family(probe):
                return False
            steps = self.recording.steps
            before = len(steps)
            try:
                with self:
                    inner = func.decompose(*args, **kwargs)
            except UnrecordableError:
                del steps[before:]
                return False
            if inner is NotImplemented:
                return False
            if len(steps) == before and not _same_tree(inner, out, self.values):
                return False
            outs = [out] if isinstance(out, Tensor) else list(out)
            inners = [inner] if isinstance(inner, Tensor) else list(inner)
            for a, b in zip(outs, inners, strict=True):
                if isinstance(a, Tensor):
                    if id(b) not in self.values:
                        raise UnrecordableError(call.op)
                    self._bind(a, self.values[id(b)])
            self.kept += inners
            return True
        return False

    def _in_place(self, func: Any, name: str, written: Any, args: Any, kwargs: Any) -> Any:
        if len(written) != 1 or written[0].name != func._schema.arguments[0].name:
            raise UnrecordableError(f"{name} writes to its arguments")
        target = args[0]
        _, base, overload = name.split(".")
        old = self.look(target)
        index = self.operands.get(id(target))
        if index is None and (target._base is not None or id(target) in self._viewed):
            raise UnrecordableError(f"{name} writes through a view")
        if index is not None and id(target) in self._viewed:
            raise UnrecordableError(f"{name} writes to what a view shows")
        given = [self.look(a) for a in args]
        b = self.build
        value: Value
        if base == "copy_":
            func(*args, **kwargs)
            value = b.expand(b.cast(given[1], old.dtype), old.shape)
        elif base in ("fill_", "zero_"):
            func(*args, **kwargs)
            fill = given[1] if len(given) > 1 else kwargs.get("value", 0)
            if isinstance(fill, Value):
                value = b.expand(b.cast(fill, old.dtype), old.shape)
            else:
                value = b.full(old.shape, fill, old.dtype)
        else:
            packet = getattr(torch.ops.aten, FUNCTIONAL.get(base, base[:-1]), None)
            if packet is None or base == "resize_":
                raise UnrecordableError(f"{name} has no other form")
            names = packet.overloads()
            chosen = overload if overload in names else "p" if base == "bernoulli_" else "default"
            if chosen not in names:
                raise UnrecordableError(f"{name} has no other form")
            out_of_place = getattr(packet, chosen)
            out = out_of_place(*args, **kwargs)
            func(*args, **kwargs)
            self._record(out_of_place, str(out_of_place), args, kwargs, out)
            value = b.cast(self.values[id(out)], old.dtype)
            if value.shape != old.shape:
                value = b.reshape(value, tuple(target.shape))
        trained = self.build.trained
        if index is None:
            if id(old) in trained and not torch.is_grad_enabled():
                raise UnrecordableError(f"{name} changes a value and keeps its history")
            self.values[id(target)] = value
        else:
            # The operand is what it was, with other data: who reads it next reads those.
            self.recording.steps.append(Write(index, value, torch.is_grad_enabled()))
            if id(value) in trained and torch.is_grad_enabled():
                trained.add(id(old))
        return target


# Set afterwards: torch wraps what stands in the class's body, and the wrapper loads its compiler.
_Recorder.__torch_dispatch__ = _Recorder.dispatch  # type: ignore[assignment]


def _without_device(
    schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What makes or moves a tensor makes one without data."""
    place = next((i for i, a in enumerate(schema.arguments) if a.name == "device"), None)
    if place is None:
        return args, kwargs
    if place < len(args):
        return (*args[:place], "meta", *args[place + 1 :]), kwargs
    if kwargs.get("device") is None and args and isinstance(args[0], Tensor):
        return args, kwargs
    return args, {**kwargs, "device": "meta"}


def rule_of_family(value: Value) -> bool:
    """Whether an operator of several results has a rule by its family."""
    from autoshard.sharding.registry import known_families

    return op_call(value).family in known_families()


def _same_tree(inner: Any, out: Any, values: Mapping[int, Value]) -> bool:
    """Whether every tensor of ``inner`` is known (it hands on its arguments)."""
    rows = [inner] if isinstance(inner, Tensor) else list(inner)
    return all(id(t) in values for t in rows if isinstance(t, Tensor))


def _has_tensor(out: Any) -> bool:
    if isinstance(out, Tensor):
        return True
    return isinstance(out, (list, tuple)) and any(isinstance(v, Tensor) for v in out)


def record(
    function: Callable[..., Any],
    operands: Sequence[tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype, bool]],
    rebuild: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]],
) -> Recording:
    """What ``function`` does to operands of these global shapes.

    Args:
        function: a function of torch.
        operands: (shape, strides if not contiguous, dtype, whether it requires grad) of each.
        rebuild: from the operands to positional and keyword arguments.

    Raises:
        UnrecordableError: it does not do the same for all data.
    """
    recording = Recording(
        [Value(op="input", shape=shape, dtype=dtype_name(dtype)) for shape, _, dtype, _ in operands]
    )
    # Without a graph: what others do to saved tensors (checkpoints) is not for these.
    tensors = [
        torch.empty(shape, dtype=dtype, device="meta")
        if strides is None
        else torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        for shape, strides, dtype, _ in operands
    ]
    args, kwargs = rebuild(tensors)
    recorder = _Recorder(recording, tensors, [t for _, _, _, t in operands])
    with without_compiler(), enable_python_dispatcher(), recorder:
        out = function(*args, **kwargs)
    recording.result = _made(out, recorder, tensors)
    return recording


def _made(out: Any, recorder: _Recorder, operands: Sequence[Tensor]) -> Any:
    if isinstance(out, Tensor):
        index = recorder.operands.get(id(out))
        if index is not None:
            return Made(None, operand=index)
        value = recorder.values.get(id(out))
        if value is None:
            raise UnrecordableError("a result that no operator made")
        alias = next((i for i, t in enumerate(operands) if is_alias_of(out, t)), None)
        return Made(value, alias=alias, strides=odd_strides(out))
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*(_made(v, recorder, operands) for v in out))
    if type(out).__module__ == "torch.return_types":
        return type(out)([_made(v, recorder, operands) for v in out])
    if isinstance(out, (list, tuple)):
        return type(out)(_made(v, recorder, operands) for v in out)
    if out is None or isinstance(out, (bool, int, float, complex, str, torch.dtype, torch.Size)):
        return out
    raise UnrecordableError(f"a result of type {type(out).__name__}")
