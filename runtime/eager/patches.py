"""What the mode does not see, while a body runs: redirected, or refused with a clear error."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoshard.errors import RequestError
from autoshard.runtime.eager.engine import Engine, modes
from autoshard.runtime.eager.tags import meta_of

_OURS = ("autoshard.", "torch.utils.checkpoint", "torch.nn.modules._functions")
_current: list[Engine] = []


def current_engine() -> Engine | None:
    """The engine whose body runs in this process now."""
    return _current[-1] if _current else None


@contextmanager
def patched(engine: Engine) -> Iterator[None]:
    """All of them, for the time of a body.

    They are put in place once, for whole classes of torch forget what they know of their
    attributes each time; without a body they do what they replace.
    """
    _install()
    _current.append(engine)
    try:
        with _uncompiled():
            yield
    finally:
        _current.pop()


@functools.cache
def _install() -> None:
    for install in (_functions, _checkpoints, _scripts, _threads, _parameters, _zero_grad):
        install()


def _mine() -> Engine | None:
    """The engine, where this thread runs its body with the mode on."""
    engine = current_engine()
    return None if engine is None or engine.raw or engine.mode not in modes() else engine


def gather_all(engine: Engine, value: Any) -> Any:
    """Tensors in containers as whole ones."""
    if isinstance(value, Tensor):
        return value if engine.meta(value) is None else engine.gathered(value)
    if type(value) in (list, tuple):
        return type(value)([gather_all(engine, v) for v in value])
    if type(value) is dict:
        return {k: gather_all(engine, v) for k, v in value.items()}
    return value


def _any_tagged(value: Any) -> bool:
    if isinstance(value, Tensor):
        return meta_of(value) is not None
    if isinstance(value, nn.Module):
        return any(meta_of(t) is not None for t in (*value.parameters(), *value.buffers()))
    if isinstance(value, (list, tuple)):
        return any(_any_tagged(v) for v in value)
    if isinstance(value, dict):
        return any(_any_tagged(v) for v in value.values())
    return False


# ---- autograd.Function ------------------------------------------------------------------------


def _functions() -> None:
    """A user's own Function runs on whole tensors: its backward is not seen by the mode."""
    original = vars(torch.autograd.Function)["apply"].__func__
    reentrant = torch.utils.checkpoint.CheckpointFunction

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _mine()
        if engine is None:
            return original(cls, *args, **kwargs)
        if (
            cls is reentrant
        ):  # the form of checkpoints that the mode does not see is done by the other
            function, preserve, *rest = args
            return torch.utils.checkpoint.checkpoint(
                function, *rest, use_reentrant=False, preserve_rng_state=preserve
            )
        if cls.__module__.startswith(_OURS):
            return original(cls, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            return original(cls, *gather_all(engine, args), **gather_all(engine, kwargs))

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]


# ---- checkpoint -------------------------------------------------------------------------------


def _checkpoints() -> None:
    """Recomputation runs under the mode."""
    module: Any = torch.utils.checkpoint
    generator = module._checkpoint_without_reentrant_generator

    def without_reentrant(function: Any, *args: Any, **kwargs: Any) -> Any:
        engine = current_engine()
        if engine is None:
            return generator(function, *args, **kwargs)
        on = engine.on

        def run(*args: Any, **kwargs: Any) -> Any:
            with on():
                return function(*args, **kwargs)

        return generator(run, *args, **kwargs)

    module._checkpoint_without_reentrant_generator = without_reentrant


# ---- scripts ----------------------------------------------------------------------------------


def _scripts() -> None:
    """A compiled script computes on local shards, unseen."""

    def refusing(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _mine() is not None and _any_tagged((args, kwargs)):
                name = getattr(self, "name", getattr(self, "original_name", "a function"))
                raise RequestError(
                    f"TorchScript ({name}) inside a sharded function meets tensors that are cut "
                    "over the mesh and would compute on local shards; call the Python function "
                    "that it was made from"
                )
            return original(self, *args, **kwargs)

        return call

    for owner in (torch.jit.ScriptFunction, torch._C.ScriptMethod):
        owner.__call__ = refusing(owner.__call__)  # type: ignore[method-assign]


# ---- threads ----------------------------------------------------------------------------------


class _Refusing(TorchFunctionMode):
    """In another thread: no tensor that is cut."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _any_tagged((args, kwargs)):
            raise RequestError(
                f"{getattr(func, '__name__', func)} in thread {threading.current_thread().name!r} "
                "meets a tensor that is cut over the mesh; a sharded function can use such tensors "
                "in its own thread only: hand the thread whole values (tensor.numpy(), .tolist())"
            )
        return func(*args, **(kwargs or {}))


def _threads() -> None:
    """Threads that a body starts refuse tensors that are cut; the mode belongs to one thread."""
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if current_engine() is not None:
            inner = self.run

            def run() -> None:
                with _Refusing():
                    inner()

            self.run = run  # type: ignore[method-assign]
        original(self)

    threading.Thread.start = start  # type: ignore[method-assign]


# ---- parameters made in the body ---------------------------------------------------------------


def _parameters() -> None:
    """A parameter made of a shard is one."""
    original = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        out = original(cls, data, requires_grad)
        engine = current_engine()
        if engine is not None and isinstance(data, Tensor):
            meta = meta_of(data)
            if meta is not None:
                with torch._C.DisableTorchFunction():
                    engine.adopt(out, meta.layout, meta.shape)
        return out

    nn.Parameter.__new__ = new  # type: ignore[method-assign]


# ---- optimizers ----------------------------------------------------------------------------------


def _zero_grad() -> None:
    """Gradients are cleared where they lie: none, or zeros, is the same of a shard and a whole."""
    original = torch.optim.Optimizer.zero_grad

    @functools.wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if _mine() is None:
            return original(self, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            return original(self, *args, **kwargs)

    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


# ---- torch.compile ------------------------------------------------------------------------------


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Compiled code runs as it was written; tracing would go through the mode.

    Where the compiler is not loaded yet, that is said once somebody asks for it.
    """
    original = torch.compile
    with ExitStack() as stack:

        def run_as_written() -> None:
            stance: Any = torch.compiler.set_stance("force_eager")
            stack.enter_context(stance)

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            torch.compile = original
            run_as_written()
            return original(*args, **kwargs)

        if "torch._dynamo" in sys.modules:
            run_as_written()
        else:
            torch.compile = compile
            stack.callback(setattr, torch, "compile", original)
        yield
