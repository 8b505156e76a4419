"""Operators and sharding rules that the caller's program made, taken along with every call.

A rank that was started earlier, or did not run the caller's script, knows neither. They go along as
bytes, made once for each operator, and are registered where a rank has not seen them.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef

from autoshard.runtime.custom_ops import custom_operators, define
from autoshard.sharding.registry import (
    RuleText,
    forget_rule,
    sharding_rule,
    user_rule_texts,
)

_packed: dict[str, tuple[object, bytes | None]] = {}
_seen: dict[str, bytes] = {}
_rules_seen: dict[str, RuleText] = {}


class Customs:
    """Stands for what this process has; when it is unpickled, the other process has it too."""

    def __reduce__(self) -> tuple[Callable[..., Customs], tuple[Any, ...]]:
        return received, (_operators(), user_rule_texts())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Customs)

    def __hash__(self) -> int:
        return 0


def _operators() -> tuple[tuple[str, bytes], ...]:
    """Every operator that the program made and that can be sent."""
    for name, definition in OPDEFS.items():
        module = getattr(definition._init_fn, "__module__", "")
        if module.startswith("torch.") or _packed.get(name, (None,))[0] is definition:
            continue
        _packed[name] = definition, None  # its functions may name it
        (operator,) = custom_operators({name.replace("::", ".", 1)})
        try:
            data = cloudpickle.dumps(operator)
        except Exception:  # a body that uses it is told by torch that there is no such operator
            data = None
        _packed[name] = definition, data
    return tuple(
        (name, data) for name, (_, data) in _packed.items() if data is not None and name in OPDEFS
    )


def _receive(name: str, data: bytes) -> None:
    from autoshard.runtime.eager.engine import forget_plans

    mine = _packed.get(name, (None, None))[1] if name in OPDEFS else None
    if data not in (_seen.get(name), mine):
        define([cloudpickle.loads(data)], anew=name in _seen)
        _seen[name] = data
        forget_plans()


def _definition(name: str, data: bytes | None) -> CustomOpDef:
    """The operator itself, which a function may name."""
    if data is not None:
        _receive(name, data)
    found: CustomOpDef = OPDEFS[name]
    return found


def _of_definition(operator: CustomOpDef) -> tuple[Any, ...]:
    name = operator._qualname
    return _definition, (name, dict(_operators()).get(name))


def received(operators: tuple[tuple[str, bytes], ...], rules: dict[str, RuleText]) -> Customs:
    """Register what is new here."""
    for name, data in operators:
        _receive(name, data)
    if rules != _rules_seen:
        have = user_rule_texts()
        for family in _rules_seen.keys() - rules.keys():
            if family in have:
                forget_rule(family)
        for family, (text, whole, linear) in rules.items():
            if have.get(family) != (text, whole, linear):
                sharding_rule(family, text, whole=whole, linear=linear)
        _rules_seen.clear()
        _rules_seen.update(rules)
    return Customs()


# cloudpickle takes ``torch.ops`` in a function of the script for a module, and would copy it.
_ops: Any = torch.ops
copyreg.pickle(type(_ops), lambda _: (getattr, (torch, "ops")))
copyreg.pickle(type(_ops.aten), lambda namespace: (getattr, (torch.ops, namespace.name)))
copyreg.pickle(CustomOpDef, _of_definition)
