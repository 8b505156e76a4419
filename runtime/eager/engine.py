"""The engine of one rank: keys, plans, conversions, and what to do without a plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoshard.errors import RequestError
from autoshard.runtime.comm import Communicator
from autoshard.runtime.eager.bound import Bound
from autoshard.runtime.eager.choose import Chooser
from autoshard.runtime.eager.composites import ungated
from autoshard.runtime.eager.copies import COPY, Copied, check_copies, note_copies, refuse
from autoshard.runtime.eager.gradients import Gradients
from autoshard.runtime.eager.planning import Given, Schedule, plan
from autoshard.runtime.eager.record import odd_strides, record
from autoshard.runtime.eager.tags import NAME, Meta, meta_of, set_meta
from autoshard.runtime.moves import Mover
from autoshard.sharding.layout import RP, Layout, R, forward_half
from autoshard.sharding.registry import user_rule_texts

_CACHE = "_autoshard_moved"
MOST_PLANS = 1 << 14
_functorch = torch._C._functorch

Handler = Callable[["Engine", Any, tuple[Any, ...], dict[str, Any]], Any]
_overrides: Any = torch.overrides
modes: Callable[[], list[TorchFunctionMode]] = _overrides._get_current_function_mode_stack
"""The modes that are on in this thread."""

HANDLERS: dict[Any, Handler] = {}
"""Functions that are no operators on values: attributes, conversions to Python, autograd."""


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Register the decorated function for functions of torch."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


class UnkeyableError(Exception):
    """An argument that cannot be part of a key."""


class Mode(TorchFunctionMode):
    """Hands every function of torch to the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.depth = 0

    def __enter__(self) -> Mode:
        self.depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        engine = self.engine
        if engine.raw:
            return func(*args, **(kwargs or {}))
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(engine, func, args, kwargs or {})
        return engine.call(func, args, kwargs or {})


_engines: weakref.WeakKeyDictionary[Communicator, dict[Any, Engine]] = weakref.WeakKeyDictionary()


class Engine:
    """Runs functions of torch on local tensors as if they were global ones.

    Args:
        comm: the collectives.
        chooser: chooses strategies.

    Attributes:
        raw: while positive, functions run on local tensors as they are.
        active: axes over which something is cut; over the others everything stays whole.
    """

    def __init__(self, comm: Communicator, chooser: Chooser) -> None:
        self.comm, self.chooser = comm, chooser
        self.whole_layout: Layout = (R,) * len(comm.mesh)
        self.mode = Mode(self)
        self.raw = 0
        self.active = tuple(range(len(comm.mesh)))
        self.gradients = Gradients(self)
        self._plans: dict[Any, Bound | str] = {}
        self._plans_by: dict[Any, dict[Any, Bound | str]] = {}
        self._movers: dict[Any, Mover] = {}
        self._leaf_cache: dict[Any, tuple[Any, ...]] = {}

    def begin(self, active: Sequence[int], data: Sequence[int]) -> None:
        """Before a call: the axes that cut something, and those that cut inputs.

        Plans differ by the latter, and by the rules that users gave.
        """
        self.active, self.chooser.data_axes = tuple(active), tuple(data)
        key = self.chooser.data_axes, tuple(user_rule_texts().items())
        self._plans = self._plans_by.setdefault(key, {})

    # ---- layouts ----------------------------------------------------------------------------

    def layout(self, tensor: Tensor) -> Layout:
        """The pair of a tensor; the forward half where it needs no gradient."""
        meta = self.meta(tensor)
        if meta is None:
            return self.whole_layout
        return meta.layout if tensor.requires_grad else forward_half(meta.layout)

    def meta(self, tensor: Tensor) -> Meta | None:
        """The tag; a parameter that was made in the body gets one."""
        found = tensor.__dict__.get(NAME)
        if found is None and isinstance(tensor, nn.Parameter):
            self.adopt(tensor, self.whole_layout, tuple(tensor.shape))
            found = tensor.__dict__[NAME]
        return cast("Meta | None", found)

    def adopt(self, parameter: Tensor, layout: Layout, shape: tuple[int, ...]) -> None:
        """Take a parameter in: where it is whole, its first use decides about its gradient."""
        layout = forward_half(layout)
        undecided = tuple(a for a in self.active if layout[a] is R)
        set_meta(parameter, Meta(layout, shape, undecided))

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The global shape."""
        meta = tensor.__dict__.get(NAME)
        return tuple(tensor.shape) if meta is None else meta.shape

    def mover(
        self, shape: tuple[int, ...], size: int, source: Layout, target: Layout, grad: bool
    ) -> Mover:
        """The move between two layouts."""
        key = (shape, size, source, target, grad)
        found = self._movers.get(key)
        if found is None:
            edge = self.chooser.resharder.edge(shape, size, source, target, grad)
            found = self._movers[key] = Mover(edge.forward, edge.backward, shape, self.comm)
        return found

    def moved(self, tensor: Tensor, target: Layout) -> Tensor:
        """``tensor`` in the layout ``target``; differentiable where it needs a gradient."""
        meta = self.meta(tensor)
        grad = tensor.requires_grad and torch.is_grad_enabled()
        shape = tuple(tensor.shape) if meta is None else meta.shape
        source = self.whole_layout if meta is None else meta.layout
        if not grad:
            source, target = forward_half(source), forward_half(target)
        elif meta is not None and meta.open:
            source = tuple(
                RP if a in meta.open and target[a] is not R else s for a, s in enumerate(source)
            )
            self.decided(tensor, Meta(source, shape))
        if source == target:
            return tensor
        mover = self.mover(shape, tensor.element_size(), source, target, grad)
        return self.converted(tensor, target, mover, grad)

    def gathered(self, tensor: Tensor) -> Tensor:
        """``tensor`` whole on every device, untagged."""
        out = self.moved(tensor, self.whole_layout)
        if meta_of(out) is not None:
            out = out.view_as(out)
            set_meta(out, None)
        return out

    def value(self, tensor: Tensor) -> Tensor:
        """The whole value, detached."""
        with torch.no_grad():
            return self.gathered(tensor.detach() if meta_of(tensor) is None else tensor)

    def converted(self, tensor: Tensor, target: Layout, mover: Mover, grad: bool) -> Tensor:
        """The operand moved, perhaps by an earlier call."""
        enabled = grad and tensor.requires_grad
        store: dict[Any, tuple[Any, ...]]
        key: Any = (target, enabled, torch.is_inference_mode_enabled())
        if tensor.is_leaf and tensor.requires_grad:
            self.gradients.used(tensor)
            store, key = self._leaf_cache, (id(tensor), *key)
        else:
            store = tensor.__dict__.setdefault(_CACHE, {})
        version = 0 if tensor.is_inference() else tensor._version
        found = store.get(key)
        if found is not None:
            kept, mine, own, source, data = found
            if (
                mine == version
                and own == kept._version
                and source is tensor.grad_fn
                and data == tensor.data_ptr()
            ):
                return cast("Tensor", kept)
        out = self.apply(mover, tensor, enabled)
        if out is tensor:
            return out
        if out is not tensor and out.__dict__.get(NAME) is not None:
            out = out.view_as(out)
        meta = meta_of(tensor)
        set_meta(out, Meta(target, mover.shape) if meta is None else meta.moved(target))
        if not out.is_inference():
            store[key] = (out, version, out._version, tensor.grad_fn, tensor.data_ptr())
        return out

    def apply(self, mover: Mover, tensor: Tensor, grad: bool) -> Tensor:
        """Move a local tensor."""
        return mover(tensor) if grad else mover.moved(tensor.detach())

    def bind(self, schedule: Schedule, name: str) -> Bound:
        """A schedule as this rank runs it."""
        return Bound(schedule, self.comm, name)

    def forget_leaves(self) -> None:
        """Drop conversions of leaves: they would keep autograd's graph alive."""
        self._leaf_cache.clear()

    def decided(self, tensor: Tensor, meta: Meta) -> None:
        """The open axes of a parameter are decided."""
        set_meta(tensor, meta)
        self.gradients.decided(tensor, meta)

    def used(self, tensor: Tensor) -> None:
        """A matrix that may be a parameter was used."""
        self.gradients.used(tensor)

    def looked_up(self, weight: Tensor, indices: Tensor, most: int) -> None:
        """Rows of a parameter were looked up, at most so many on one device."""
        self.gradients.looked_up(weight, indices, most)

    # ---- calls ------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch."""
        if _functorch.peek_interpreter_stack() is not None:
            return self._transformed(func, args, kwargs)
        tensors: list[Tensor] = []
        metas: list[Meta | None] = []
        try:
            row = [self._key(value, tensors, metas) for value in args]
            named = [(k, self._key(v, tensors, metas)) for k, v in kwargs.items()]
        except UnkeyableError:
            if not self._any_tagged((args, kwargs)):
                return func(*args, **kwargs)
            return self._without_plan(func, args, kwargs)
        if metas.count(None) == len(metas):
            return func(*args, **kwargs)
        key: Any = (func, torch.is_grad_enabled(), *row, *named)
        if len(tensors) > 1:
            numbers = [id(t) for t in tensors]
            if len(set(numbers)) != len(numbers):
                key = (*key, tuple([numbers.index(n) for n in numbers]))
        if torch._C._is_any_autocast_enabled():
            raise RequestError(
                f"{getattr(func, '__name__', func)} under torch.autocast: its casts happen below "
                "the sharding rules. Cast the module and its inputs instead, for instance "
                "model.to(torch.bfloat16) and x.to(torch.bfloat16)"
            )
        if "out" in kwargs and kwargs["out"] is not None:
            return self._out(func, args, kwargs)
        try:
            found = self._plans.get(key)
        except TypeError:
            return self._without_plan(func, args, kwargs)
        if found is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            found = self._plans[key] = self._plan(func, args, kwargs, tensors, metas)
        if isinstance(found, str):
            return self._without_plan(func, args, kwargs)
        copies = [t for t in tensors if COPY in t.__dict__]
        if copies:
            check_copies(func, copies)
            written = [tensors[i] for i in found.written if COPY in tensors[i].__dict__]
            for target in written:
                self.refuse_copy(target)
            out = found(tensors, self)
            for target in written:
                self._write_through(target)
        else:
            out = found(tensors, self)
        if found.aliases:
            note_copies(func, args, out)
        return out

    def _any_tagged(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return self.meta(value) is not None
        if isinstance(value, (list, tuple, set)):
            return any(self._any_tagged(v) for v in value)
        if isinstance(value, dict):
            return any(self._any_tagged(v) for v in value.values())
        if isinstance(value, slice):
            return self._any_tagged((value.start, value.stop, value.step))
        return False

    def _key(self, value: Any, tensors: list[Tensor], metas: list[Meta | None]) -> Any:
        """What of an argument a plan depends on; its tensors are added to the lists."""
        cls = type(value)
        if cls is Tensor or cls is nn.Parameter or isinstance(value, Tensor):
            meta = value.__dict__.get(NAME)
            if meta is None and isinstance(value, nn.Parameter):
                meta = self.meta(value)
            tensors.append(value)
            metas.append(meta)
            if meta is None:
                return (value.shape, value.stride(), value.dtype, value.requires_grad)
            return (meta, value.dtype, value.requires_grad)
        if cls is tuple:
            return tuple([self._key(v, tensors, metas) for v in value])
        if value is None or value is Ellipsis:
            return value
        if cls in _SCALARS:
            # Not a number is not equal to itself, and 0.0 equals -0.0: these go by their text.
            return (cls, value) if value and value == value else (cls, repr(value))
        if cls is slice:
            parts = (value.start, value.stop, value.step)
            if any(isinstance(p, Tensor) for p in parts):
                raise UnkeyableError
            return (slice, *parts)
        if cls is list:
            return (list, *[self._key(v, tensors, metas) for v in value])
        if cls is dict:
            return tuple([(k, self._key(v, tensors, metas)) for k, v in value.items()])
        if isinstance(value, tuple):
            return (cls, *[self._key(v, tensors, metas) for v in value])
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return value
        raise UnkeyableError

    def _plan(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[Tensor],
        metas: Sequence[Meta | None],
    ) -> Bound | str:
        given = [
            Given(
                tuple(t.shape) if m is None else m.shape,
                t.dtype,
                t.requires_grad,
                t.is_leaf,
                m,
                odd_strides(t) if m is None else m.strides,
            )
            for t, m in zip(tensors, metas, strict=True)
        ]
        first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}

        def rebuild(fakes: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            def replace(value: Any) -> Any:
                if isinstance(value, Tensor):
                    return fakes[first[id(value)]]
                if type(value) is tuple or type(value) is list:
                    return type(value)(replace(v) for v in value)
                if type(value) is dict:
                    return {k: replace(v) for k, v in value.items()}
                return value

            return replace(args), replace(kwargs)

        name = getattr(func, "__name__", "")
        try:
            recording = record(
                func, [(g.shape, g.strides, g.dtype, g.requires_grad) for g in given], rebuild
            )
        except RequestError as error:
            if type(error).__name__ == "RuleError":
                raise
            return str(error) or "not recordable"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return self.bind(plan(recording, given, self.chooser), name)

    def _without_plan(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Composites run with the mode on, one inner function at a time; others run whole."""
        inner = ungated(func)
        if inner is not None:
            with self.mode:
                return inner(*args, **kwargs)
        return self.whole(func, args, kwargs)

    def whole(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather the tensors and run a function on whole ones; write back what it wrote to."""
        pairs: dict[int, tuple[Tensor, Tensor, int]] = {}
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITERS

        def gather(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) in pairs:
                    return pairs[id(value)][1]
                if self.meta(value) is None:
                    return value
                out = self.gathered(value)
                if writes:
                    out = out.clone()
                pairs[id(value)] = (value, out, out._version)
                return out
            if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
                return type(value)([gather(v) for v in value])
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*(gather(v) for v in value))
            if isinstance(value, slice):
                return slice(gather(value.start), gather(value.stop), gather(value.step))
            if isinstance(value, dict):
                return {k: gather(v) for k, v in value.items()}
            return value

        out = func(*gather(args), **gather(kwargs))
        for source, gathered, version in pairs.values():
            if gathered._version != version:
                self.store(source, gathered)
            if out is gathered:
                out = source
        return out

    def store(self, target: Tensor, value: Tensor) -> None:
        """Overwrite a tensor with a value of any layout."""
        self.refuse_copy(target)
        layout = self.layout(target)
        if not value.requires_grad:
            layout = forward_half(layout)
        target.copy_(self.moved(value, layout))

    def _out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``out=``: the result is computed, then stored."""
        out = kwargs["out"]
        rest = {k: v for k, v in kwargs.items() if k != "out"}
        with self.mode:
            result = func(*args, **rest)
        targets = out if isinstance(out, (list, tuple)) else [out]
        values = result if isinstance(result, (list, tuple)) else [result]
        for target, value in zip(targets, values, strict=True):
            if self.shape(target) != self.shape(value):
                target.data = value.detach().to(target.dtype)
                set_meta(target, Meta(forward_half(self.layout(value)), self.shape(value)))
            else:
                self.store(target, value)
        return out

    def refuse_copy(self, target: Tensor) -> None:
        """Refuse to write to what only looks like a view.

        Raises:
            RequestError: for a view that had to be moved and is no index of its base.
        """
        refuse(target, self.shape(target))

    def _write_through(self, target: Tensor) -> None:
        copy = target.__dict__[COPY]
        with self.on():
            copy.base[copy.index] = target
        target.__dict__[COPY] = Copied(copy.base, copy.index, copy.base._version)

    def _transformed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside vmap, grad or jvp of torch.func: whole tensors only."""

        def check(value: Any) -> Any:
            if isinstance(value, Tensor):
                base = value
                while _functorch.is_functorch_wrapped_tensor(base):
                    base = _functorch.get_unwrapped(base)
                meta = meta_of(base)
                if meta is None:
                    return value
                if base is value:
                    return self.gathered(value)
                if all(s is R for s in forward_half(meta.layout)) and not base.requires_grad:
                    return value
                name = getattr(func, "__name__", str(func))
                raise RequestError(
                    f"{name} inside a transform of torch.func (vmap, grad, jvp) meets a tensor of "
                    f"global shape {meta.shape} that is cut over the mesh ({meta.layout}); these "
                    "transforms see local shards only. Write the loop with ordinary operators "
                    "(einsum, broadcasting, autograd.grad), or cut none of its tensors"
                )
            if type(value) in (list, tuple):
                return type(value)([check(v) for v in value])
            if type(value) is dict:
                return {k: check(v) for k, v in value.items()}
            return value

        return func(*check(args), **check(kwargs))

    # ---- switching --------------------------------------------------------------------------

    @contextmanager
    def rawly(self) -> Iterator[None]:
        """With functions that run on local tensors as they are."""
        self.raw += 1
        try:
            yield
        finally:
            self.raw = max(self.raw - 1, 0)

    @contextmanager
    def on(self) -> Iterator[None]:
        """With the mode, also inside a handler."""
        before, self.raw = self.raw, 0
        try:
            if self.mode in modes():
                yield
            else:
                with self.mode:
                    yield
        finally:
            self.raw = before


_SCALARS = frozenset({bool, int, float, complex, str})
_WRITERS = frozenset({"__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__"})


def engine_of(comm: Communicator, chooser: Callable[[], Chooser], key: Any) -> Engine:
    """The engine of these collectives, made once; its plans last."""
    found = _engines.setdefault(comm, {})
    if key not in found:
        found[key] = Engine(comm, chooser())
    return found[key]


def forget_plans() -> None:
    """Every engine plans anew: an operator has changed."""
    for engines in _engines.values():
        for engine in engines.values():
            for plans in engine._plans_by.values():
                plans.clear()
            engine._plans.clear()


def forget_moved(tensor: Tensor) -> None:
    """Drop what a tensor was moved to."""
    tensor.__dict__.pop(_CACHE, None)
