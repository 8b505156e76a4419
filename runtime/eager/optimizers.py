"""Optimizers: those that update element by element run on the shards as they are.

All others (a norm, a factored moment, a line search) run under the mode, where norms are global.
An optimizer made outside comes with whole state; it is cut when it first steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autoshard.errors import RequestError
from autoshard.runtime.eager.engine import Engine
from autoshard.runtime.eager.tags import Meta, meta_of, set_meta
from autoshard.runtime.shards import take_shard
from autoshard.sharding.layout import forward_half

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad"),
        *("Adadelta", "ASGD"),
    )
)
"""Exact types: a subclass may do anything in its step."""


def _is_untagged(value: Any) -> bool:
    return isinstance(value, Tensor) and meta_of(value) is None and value.dim() > 0


def cut_state(engine: Engine, optimizer: Optimizer) -> None:
    """State that has its parameter's global shape becomes a shard."""
    for parameter, state in optimizer.state.items():
        meta = meta_of(parameter)
        if meta is None or not isinstance(state, dict):
            continue
        for name, value in state.items():
            if _is_untagged(value) and tuple(value.shape) == meta.shape:
                layout = forward_half(meta.layout)
                shard = take_shard(value.detach(), layout, engine.comm.mesh, engine.comm.coordinate)
                set_meta(shard, Meta(layout, meta.shape))
                state[name] = shard


def tag_state(optimizer: Optimizer) -> None:
    """State made by a step on shards is a shard."""
    for parameter, state in optimizer.state.items():
        meta = meta_of(parameter)
        if meta is None or not isinstance(state, dict):
            continue
        for value in state.values():
            if _is_untagged(value) and value.shape == parameter.shape:
                set_meta(value, meta.forward())


class Stepping:
    """Hooks around every optimizer's step while a body runs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._raw: list[Any] = []  # what to leave after each step that is under way
        self._handles: list[Any] = []

    def __enter__(self) -> Stepping:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        while self._raw:  # of a step that raised
            self._leave(self._raw.pop())

    def _leave(self, raw: Any) -> None:
        if raw is not None:
            raw.__exit__(None, None, None)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        engine = self.engine
        if type(optimizer) is torch.optim.SparseAdam:
            raise RequestError(
                "SparseAdam needs sparse gradients of its own; inside a sharded function look-ups "
                "give dense gradients (sent as rows where that is less): use Adam, or SGD"
            )
        if type(optimizer) not in ELEMENTWISE:
            self._raw.append(None)
            return None
        with torch._C.DisableTorchFunction():
            cut_state(engine, optimizer)
            if engine.gradients.has_parts and any(
                engine.gradients.is_partial(parameter)
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                raise RequestError(
                    "an optimizer steps while gradients are parts on each device; leave "
                    "no_sync() before the last backward of the step"
                )
        closure = (args[1] if len(args) > 1 else None) or kwargs.get("closure")
        raw: Any = torch._C.DisableTorchFunction() if closure is None else engine.rawly()
        raw.__enter__()
        self._raw.append(raw)
        if closure is None:
            return None
        wrapped = self._with_mode(closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _with_mode(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with self.engine.on():
                return closure()

        return run

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        raw = self._raw.pop() if self._raw else None
        if raw is not None:
            self._leave(raw)
            with torch._C.DisableTorchFunction():
                tag_state(optimizer)
