"""What goes to other processes: functions by value, and an error that names what cannot go."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from autoshard.errors import InputError
from autoshard.runtime.spmd.captured import names_used
from autoshard.runtime.spmd.specs import Argument


@contextmanager
def by_value(modules: set[str]) -> Iterator[None]:
    """Functions of these modules travel by value, with the globals that they use."""
    new = [
        sys.modules[name]
        for name in modules
        if name not in cloudpickle.list_registry_pickle_by_value()
    ]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def unsendable(
    name: str, function: object, arguments: Sequence[Argument], error: Exception
) -> InputError:
    """The error of pickling, with the name of what cannot be sent."""
    for what, value in _sent(name, function, arguments):
        try:
            _Probe().dump(value)
        except Exception as reason:
            return InputError(
                f"{what} cannot be sent to other processes: {reason}; {name} runs in "
                "processes of its own: make it inside the function, or pass what it is made of"
            )
    return InputError(f"{name} or one of its arguments cannot be sent to other processes: {error}")


def _sent(of: str, function: Any, arguments: Sequence[Argument]) -> Iterator[tuple[str, object]]:
    for argument in arguments:
        yield f"argument {argument.name!r} ({type(argument.value).__name__})", argument.value
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None:
        for name, value in getattr(owner, "__dict__", {}).items():
            yield f"{name!r} of {type(owner).__name__} ({type(value).__name__})", value
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        with contextlib.suppress(ValueError):
            value = cell.cell_contents
            yield f"{name!r}, which {of} uses ({type(value).__name__}),", value
    for name in sorted(names_used(function)):
        found = getattr(function, "__globals__", {})
        if name in found:
            value = found[name]
            yield f"{name!r}, which {of} uses ({type(value).__name__}),", value


class _Probe(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles to nowhere, without the data of tensors."""

    def __init__(self) -> None:
        class Nowhere:
            def write(self, data: Any) -> int:
                return len(data)

        super().__init__(
            Nowhere(), protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=lambda _: None
        )

    def persistent_id(self, value: object) -> object:
        if isinstance(value, torch.storage.TypedStorage | torch.UntypedStorage):
            return 0
        return None


__all__ = ["by_value", "unsendable"]
