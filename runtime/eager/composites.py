"""Python functions of torch made of others, without the question whether a mode is on."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, cast

_ungated: dict[Any, Any] = {}
_GATES = frozenset(
    {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
)


def _closed(*_: object, **__: object) -> bool:
    return False


def ungated(func: Any) -> Callable[..., Any] | None:
    """A Python function of torch that does not ask for a mode again; None for other functions."""
    if func in _ungated:
        return cast("Callable[..., Any] | None", _ungated[func])
    made = None
    if isinstance(func, types.FunctionType) and func.__module__.startswith("torch"):
        inner = func
        while hasattr(inner, "__wrapped__") and isinstance(inner.__wrapped__, types.FunctionType):
            inner = inner.__wrapped__
        scope: Mapping[str, Any] = inner.__globals__
        patched = {k: (_closed if k in _GATES else v) for k, v in scope.items()}
        made = types.FunctionType(
            inner.__code__, patched, inner.__name__, inner.__defaults__, inner.__closure__
        )
        made.__kwdefaults__ = inner.__kwdefaults__
    _ungated[func] = made
    return made


__all__ = ["ungated"]
