"""What stands in the arguments of a call: modules, optimizers, tensors, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(slots=True)
class Objects:
    """Modules, optimizers and tensors of a call, each once, in order of appearance.

    ``tensors`` has tensors and NumPy arrays that are no parameter or buffer of a module. A module
    inside a wrapper object (a scheduler, a plain class) is found through its attributes only where
    the object is an optimizer's scheduler; other objects are passed as they are.
    """

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)


def objects_of(args: object, kwargs: Mapping[str, object]) -> Objects:
    """Walk the arguments: positional ones first, containers in order, then keywords as given."""
    found = Objects()
    seen: set[int] = set()
    candidates: list[Any] = []

    def walk(value: Any) -> None:
        if id(value) in seen:
            return
        if isinstance(value, (nn.Module, Optimizer, Tensor, np.ndarray)):
            seen.add(id(value))
            if isinstance(value, nn.Module):
                found.modules.append(value)
            elif isinstance(value, Optimizer):
                found.optimizers.append(value)
            else:
                candidates.append(value)
        elif isinstance(value, Mapping):
            seen.add(id(value))
            for item in value.values():
                walk(item)
        elif isinstance(value, (list, tuple, set, frozenset)):
            if not isinstance(value, tuple):
                seen.add(id(value))
            for item in value:
                walk(item)
        elif is_dataclass(value) and not isinstance(value, type):
            seen.add(id(value))
            for f in fields(value):
                walk(getattr(value, f.name, None))
        elif isinstance(getattr(value, "optimizer", None), Optimizer):  # a scheduler
            seen.add(id(value))
            walk(value.optimizer)

    walk(tuple(args) if isinstance(args, (list, tuple)) else args)
    for item in kwargs.values():
        walk(item)
    owned = {id(t) for module in found.modules for t in (*module.parameters(), *module.buffers())}
    found.tensors = [t for t in candidates if id(t) not in owned]
    return found


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to what stands in tuples, lists, mappings, dataclasses.

    ``change`` gets every object that is no container; containers are rebuilt only where something
    in them changed, so shared ones stay shared.
    """
    if isinstance(value, Mapping):
        items = {k: map_tensors(v, change) for k, v in value.items()}
        if all(items[k] is v for k, v in value.items()):
            return value
        if type(value) is dict:
            return items
        try:
            return type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(value, (list, tuple)):
        row = [map_tensors(v, change) for v in value]
        if all(a is b for a, b in zip(row, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*row)
        return type(value)(row) if type(value) in (list, tuple) else tuple(row)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for f in fields(value):
            if f.init and hasattr(value, f.name):
                old = getattr(value, f.name)
                new = map_tensors(old, change)
                if new is not old:
                    changed[f.name] = new
        return replace(value, **changed) if changed else value
    return change(value)
