"""Whether objects are still what they were: the same containers with the very same contents.

Pickling a module says that too, and takes a hundred times as long. A snapshot holds every
container that can be reached from some objects (attributes of modules, tables of parameters and
hooks, closures, globals that functions use) and compares what is in them by identity, and tensors
by where their memory is and what they are; their values may have changed. What cannot be compared
so makes a snapshot impossible, never wrong.
"""

from __future__ import annotations

import enum
import re
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from operator import is_
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from autoshard.runtime.eager.tags import Meta
from autoshard.runtime.spmd.captured import global_names, is_own_module
from autoshard.runtime.spmd.shipment import is_plain

_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented)),
    *(range, CodeType, ModuleType, BuiltinFunctionType, GetSetDescriptorType),
    *(MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType),
    *(MemberDescriptorType, re.Pattern, enum.Enum, torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, torch.Size, np.dtype, np.ufunc, Meta),
)
_MISSING = object()
_UNREAD = {
    *("__dict__", "__weakref__", "__doc__", "__annotations__", "_abc_impl"),
    *("__dataclass_fields__", "__dataclass_params__"),
}


_PICKLING = ("__reduce_ex__", "__reduce__", "__getnewargs__", "__getnewargs_ex__")


def _own(cls: type, name: str) -> object:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


_GETSTATES = {_own(cls, "__getstate__") for cls in (nn.Module, Optimizer)}
"""What these give is a part of the attributes."""


class OpaqueError(Exception):
    """Something that cannot be compared."""


class Snapshot:
    """What can be reached from some objects.

    Args:
        roots: the objects; modules and optimizers among them are held weakly.

    Raises:
        OpaqueError: it reaches something that cannot be compared.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._seen: dict[int, object] = {}  # and what keeps it, so that no number is used again
        self._roots: list[weakref.ref[Any]] = []
        self._containers: list[Any] = []  # with their sizes
        self._sizes: list[int] = []
        self._views: list[Iterable[Any]] = []  # of their contents, one after another
        self._contents: list[Any] = []
        self._sets: list[tuple[Any, frozenset[Any]]] = []
        self._scopes: list[tuple[Mapping[str, Any], tuple[str, ...], list[Any]]] = []
        self._cells: list[tuple[Any, object]] = []
        self._functions: list[tuple[Any, tuple[object, ...]]] = []
        self._classes: list[tuple[Any, type]] = []
        self._tensors: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
        for root in roots:
            if isinstance(root, nn.Module | Optimizer):
                self._roots.append(weakref.ref(root))
            self._walk(root, is_root=True)

    def holds(self) -> bool:
        """Whether all is as it was."""
        for reference in self._roots:
            if reference() is None:
                return False
        if list(map(len, self._containers)) != self._sizes:
            return False
        if not all(map(is_, chain.from_iterable(self._views), self._contents)):
            return False
        for tensor, state in self._tensors:
            if _state(tensor) != state:
                return False
        for scope, names, values in self._scopes:
            if any(scope.get(n, _MISSING) is not v for n, v in zip(names, values, strict=True)):
                return False
        for value, cls in self._classes:
            if value.__class__ is not cls:
                return False
        for cell, value in self._cells:
            if _inside(cell) is not value:
                return False
        for function, parts in self._functions:
            if any(a is not b for a, b in zip(_parts(function), parts, strict=True)):
                return False
        return all(now == before for now, before in self._sets)

    def reaches(self, values: Iterable[object]) -> bool:
        """Whether it holds one of these objects."""
        return any(id(value) in self._seen for value in values)

    # ---- taking it --------------------------------------------------------------------------

    def _walk(self, value: Any, *, is_root: bool = False) -> None:
        if isinstance(value, _ATOMS):
            return
        if id(value) in self._seen:
            return
        weak = is_root and isinstance(value, nn.Module | Optimizer)
        self._seen[id(value)] = None if weak else value
        cls = type(value)
        if cls in (torch.Tensor, nn.Parameter):
            self._walk_tensor(value)
        elif cls in (dict, OrderedDict, defaultdict):
            self._walk_table(value)
            if cls is defaultdict:
                self._walk(value.default_factory)
        elif cls is list:
            self._see(value, value)
            for item in value:
                self._walk(item)
        elif cls is tuple:
            for item in value:
                self._walk(item)
        elif cls in (set, frozenset):
            if not all(isinstance(item, _ATOMS) for item in value):
                raise OpaqueError
            if cls is set and not value:
                self._see(value)
            elif cls is set:
                self._sets.append((value, frozenset(value)))
        elif cls is FunctionType:
            self._walk_function(value)
        elif cls is MethodType:
            self._walk(value.__func__)
            self._walk(value.__self__)
        elif isinstance(value, type):
            self._walk_class(value)
        elif cls is partial:
            self._walk((value.func, value.args, value.keywords, value.__dict__))
        elif cls in (classmethod, staticmethod):
            self._walk(value.__func__)
        elif cls is property:
            self._walk((value.fget, value.fset, value.fdel))
        else:
            self._walk_object(value, cls)

    def _walk_tensor(self, value: torch.Tensor) -> None:
        if not is_plain(value) or value.grad is not None:
            raise OpaqueError
        self._tensors.append((value, _state(value)))
        self._walk(value.__dict__)

    def _see(self, container: Any, *views: Iterable[Any]) -> None:
        """Take down the size of a container and what is in it, as these (live) views show it."""
        self._containers.append(container)
        self._sizes.append(len(container))
        for view in views if container else ():
            self._views.append(view)
            self._contents += view

    def _walk_table(self, value: Any) -> None:
        self._see(value, value.keys(), value.values())
        for key, item in value.items():
            self._walk(key)
            self._walk(item)

    def _walk_function(self, value: FunctionType) -> None:
        local = "<locals>" in value.__qualname__ or "<lambda>" in value.__qualname__
        if not local and not is_own_module(value.__module__):
            return
        parts = _parts(value)
        self._functions.append((value, parts))
        names = tuple(global_names(value.__code__))
        scope = value.__globals__
        self._scopes.append((scope, names, [scope.get(n, _MISSING) for n in names]))
        for part in parts[1:]:
            self._walk(part)
        for cell in value.__closure__ or ():
            inside = _inside(cell)
            self._cells.append((cell, inside))
            self._walk(inside)
        for name in names:
            self._walk(scope.get(name))

    def _walk_class(self, value: type) -> None:
        local = "<locals>" in value.__qualname__
        if not local and not is_own_module(value.__module__):
            return
        for base in value.__mro__[1:]:
            self._walk(base)
        members = vars(value)
        self._see(members, members.keys(), members.values())
        for name, item in members.items():
            if name not in _UNREAD:
                self._walk(item)

    def _walk_object(self, value: Any, cls: type) -> None:
        if (
            any(_own(cls, name) is not _own(object, name) for name in _PICKLING)
            or _own(cls, "__getstate__") not in {*_GETSTATES, _own(object, "__getstate__")}
            or not hasattr(value, "__dict__")
            or any(base.__dict__.get("__slots__") for base in cls.__mro__)
            or isinstance(value, int | float | complex | str | bytes | tuple | list | dict | set)
        ):
            raise OpaqueError
        self._classes.append((_proxy(value), cls))
        self._walk(cls)
        self._walk_table(value.__dict__)


def _proxy(value: Any) -> Any:
    """Something with the class of ``value`` that does not keep it, where it can be."""
    return weakref.proxy(value) if isinstance(value, nn.Module | Optimizer) else value


def _parts(function: Any) -> tuple[object, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__, function.__dict__


def _inside(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is, but for its values."""
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.grad is None,
        tensor.grad_fn is None,
        bool(tensor._backward_hooks),
        len(tensor._post_accumulate_grad_hooks or ()),
        tensor.untyped_storage().nbytes(),
    )


__all__ = ["OpaqueError", "Snapshot"]
