"""What a function uses besides its arguments: modules, optimizers and tensors it refers to.

A function may name a global, close over a variable, be a method, or get an object that holds a
model. What these refer to is trained like an argument, so it has to be known.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

_DEPTH = 8
_LONG = 4096  # a longer container of plain numbers is not looked through


@dataclass(slots=True)
class Captured:
    """What was found, each once.

    Attributes:
        objects: modules, optimizers and schedulers.
        tensors: tensors and arrays that belong to none of them, with their names.
        by_value: modules whose functions use such globals: their functions have to travel by
            value, or the ranks would import the module anew, with globals of their own.
    """

    objects: list[Any] = field(default_factory=list)
    tensors: list[tuple[str, Any]] = field(default_factory=list)
    by_value: set[str] = field(default_factory=set)


def captured_by(function: object, arguments: Iterable[object] = ()) -> Captured:
    """What ``function``, and plain objects among ``arguments``, refer to."""
    found = Captured()
    seen: set[int] = set()

    def walk(value: Any, name: str, depth: int) -> bool:
        """Whether anything was found in ``value``."""
        if isinstance(value, str | bytes | int | float | type | ModuleType) or value is None:
            return False
        if isinstance(value, nn.Module | Optimizer) or is_scheduler(value):
            if id(value) not in seen:
                found.objects.append(value)
                seen.add(id(value))
                if is_scheduler(value):
                    walk(value.optimizer, f"{name}.optimizer", depth)
            return True
        if isinstance(value, torch.Tensor | np.ndarray):
            if id(value) not in seen:
                found.tensors.append((name, value))
                seen.add(id(value))
            return True
        if id(value) in seen or depth > _DEPTH:
            return False
        seen.add(id(value))
        if isinstance(value, MethodType):
            own = walk(value.__self__, name, depth + 1)
            return walk(value.__func__, name, depth + 1) or own
        if isinstance(value, partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            return walk_all([(part, name) for part in parts], depth + 1)
        if isinstance(value, FunctionType):
            return walk_function(value, depth)
        if isinstance(value, Mapping):
            items: Iterable[Any] = value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            items = value
        elif _is_users(type(value)) and hasattr(value, "__dict__"):
            return walk_all([(v, f"{name}.{k}") for k, v in vars(value).items()], depth + 1)
        else:
            return False
        if len(value) > _LONG and isinstance(next(iter(items)), int | float | str):
            return False
        return walk_all([(item, name) for item in items], depth + 1)

    def walk_all(values: Iterable[tuple[Any, str]], depth: int) -> bool:
        hits = [walk(value, name, depth) for value, name in values]  # every one, not the first
        return any(hits)

    def walk_function(value: FunctionType, depth: int) -> bool:
        if not _is_users(value):
            return False
        hit = False
        for cell_name, cell in zip(
            value.__code__.co_freevars, value.__closure__ or (), strict=True
        ):
            try:
                hit |= walk(cell.cell_contents, cell_name, depth + 1)
            except ValueError:  # not bound yet
                continue
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            hit |= walk(default, f"a default of {value.__name__}", depth + 1)
        for global_name in global_names(value.__code__):
            if global_name in value.__globals__:
                item = value.__globals__[global_name]
                if walk(item, global_name, depth + 1):
                    hit = True
                    if value.__module__ != "__main__" and value.__module__ in sys.modules:
                        found.by_value.add(value.__module__)
        return hit

    walk(function, getattr(function, "__name__", "the function"), 0)
    for argument in arguments:
        plain(argument, walk)
    owned = {
        id(t)
        for value in found.objects
        if isinstance(value, nn.Module)
        for t in (*value.parameters(), *value.buffers())
    }
    found.tensors = [(name, t) for name, t in found.tensors if id(t) not in owned]
    return found


def plain(argument: object, walk: Any) -> None:
    """Walk what in an argument is neither container, tensor, module nor optimizer."""
    if isinstance(argument, Mapping):
        for item in argument.values():
            plain(item, walk)
    elif isinstance(argument, list | tuple):
        if len(argument) <= _LONG:
            for item in argument:
                plain(item, walk)
    elif is_scheduler(argument) or not isinstance(
        argument, torch.Tensor | np.ndarray | nn.Module | Optimizer
    ):
        walk(argument, type(argument).__name__, 0)


def is_scheduler(value: object) -> bool:
    """Whether ``value`` changes an optimizer's groups, as torch's schedulers do."""
    return (
        hasattr(value, "load_state_dict")
        and isinstance(getattr(value, "optimizer", None), Optimizer)
        and not isinstance(value, nn.Module | Optimizer)
    )


@lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Names that a function, and functions inside it, may look up as globals."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(global_names(constant)))
    return tuple(names)


def names_used(function: object) -> frozenset[str]:
    """Names that a plain function looks up, those of attributes included."""
    code = getattr(function, "__code__", None)
    return frozenset(global_names(code)) if isinstance(code, CodeType) else frozenset()


_LIBRARIES = tuple(
    {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def _is_users(value: Any) -> bool:
    """Whether a class or function is the program's own, and not a library's."""
    return is_own_module(str(getattr(value, "__module__", None)))


@lru_cache(maxsize=4096)
def is_own_module(name: str) -> bool:
    """Whether a module is the program's own."""
    if name == "__main__":
        return True
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names or root == "autoshard":
        return False
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    return module is not None and path is not None and not path.startswith(_LIBRARIES)
