"""Keeps torch's compiler out of a process that does not compile.

Torch's Python kernels are marked "not to be compiled", and the mark imports ``torch._dynamo`` when
the kernel first runs: 2 s in every process. Where it is not loaded, the mark does nothing here.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAME = "torch._dynamo"


class _Absent(types.ModuleType):
    """Stands for the compiler; whatever else is asked of it loads the real one."""

    @staticmethod
    def disable(function: Any, recursive: bool = True, *, wrapping: bool = True) -> Any:
        """The function as it is."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _leave(self)
        return getattr(importlib.import_module(_NAME), name)


def _leave(stub: _Absent) -> None:
    if sys.modules.get(_NAME) is stub:
        del sys.modules[_NAME]
    if torch.__dict__.get("_dynamo") is stub:
        del torch.__dict__["_dynamo"]


@contextmanager
def without_compiler() -> Iterator[None]:
    """For a while in which torch's Python kernels run."""
    if _NAME in sys.modules:
        yield
        return
    stub = _Absent(_NAME)
    sys.modules[_NAME] = stub
    torch.__dict__["_dynamo"] = stub
    try:
        yield
    finally:
        _leave(stub)
