"""What the mode does not see, while a body runs: redirected, or refused with a clear error."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
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
    """All of them, for the time of a body."""
    with ExitStack() as stack:
        for context in (_functions, _checkpoints, _scripts, _threads, _parameters, _compiled):
            stack.enter_context(context(engine))
        _current.append(engine)
        try:
            yield
        finally:
            _current.pop()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _mine(engine: Engine) -> bool:
    """Whether this thread runs the body, with the mode on."""
    return engine.mode in modes() and not engine.raw


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


@contextmanager
def _functions(engine: Engine) -> Iterator[None]:
    """A user's own Function runs on whole tensors: its backward is not seen by the mode."""
    original = vars(torch.autograd.Function)["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(_OURS) or not _mine(engine):
            return original(cls, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            return original(cls, *gather_all(engine, args), **gather_all(engine, kwargs))

    with _replaced(torch.autograd.Function, "apply", classmethod(apply)):
        yield


# ---- checkpoint -------------------------------------------------------------------------------


@contextmanager
def _checkpoints(engine: Engine) -> Iterator[None]:
    """Recomputation runs under the mode; the reentrant form is done by the other one."""
    module = torch.utils.checkpoint
    generator = module._checkpoint_without_reentrant_generator

    def with_mode(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with engine.on():
                return function(*args, **kwargs)

        return run

    def without_reentrant(function: Any, *args: Any, **kwargs: Any) -> Any:
        return generator(with_mode(function), *args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            return module.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve
            )

    with (
        _replaced(module, "_checkpoint_without_reentrant_generator", without_reentrant),
        _replaced(module, "CheckpointFunction", Reentrant),
    ):
        yield


# ---- scripts ----------------------------------------------------------------------------------


@contextmanager
def _scripts(engine: Engine) -> Iterator[None]:
    """A compiled script computes on local shards, unseen."""

    def refusing(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _mine(engine) and _any_tagged((args, kwargs)):
                name = getattr(self, "name", getattr(self, "original_name", "a function"))
                raise RequestError(
                    f"TorchScript ({name}) inside a sharded function meets tensors that are cut "
                    "over the mesh and would compute on local shards; call the Python function "
                    "that it was made from"
                )
            return original(self, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner in (torch.jit.ScriptFunction, torch._C.ScriptMethod):
            call = vars(owner).get("__call__") or owner.__call__
            stack.enter_context(_replaced(owner, "__call__", refusing(call)))
        yield


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


@contextmanager
def _threads(engine: Engine) -> Iterator[None]:
    """Threads that a body starts refuse tensors that are cut; the mode belongs to one thread."""
    bootstrap = threading.Thread.run

    def start(self: threading.Thread) -> None:
        inner = self.run

        def run() -> None:
            with _Refusing():
                inner()

        self.run = run  # type: ignore[method-assign]
        original(self)

    original = threading.Thread.start
    assert bootstrap is threading.Thread.run
    with _replaced(threading.Thread, "start", start):
        yield


# ---- parameters made in the body ---------------------------------------------------------------


@contextmanager
def _parameters(engine: Engine) -> Iterator[None]:
    """A parameter made of a shard is one."""
    original = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        out = original(cls, data, requires_grad)
        meta = None if data is None or not isinstance(data, Tensor) else meta_of(data)
        if meta is not None:
            with torch._C.DisableTorchFunction():
                engine.adopt(out, meta.layout, meta.shape)
        return out

    with _replaced(nn.Parameter, "__new__", staticmethod(new)):
        yield


# ---- torch.compile ------------------------------------------------------------------------------


@contextmanager
def _compiled(engine: Engine) -> Iterator[None]:
    """Compiled code runs as it was written; tracing would go through the mode."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    stance: Any = torch.compiler.set_stance("force_eager")
    with stance:
        yield
