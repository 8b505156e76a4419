"""Operators made with ``torch.library.custom_op``, taken along to other processes.

A process that did not run the caller's script does not know the operators it defined. Their
functions travel by cloudpickle (by reference where their module can be imported there, by value
from ``__main__``) and are registered again. ``OPDEFS`` and ``CustomOpDef`` are private to torch:
this file is the one place that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOperator:
    """One custom operator: its schema and its Python functions.

    Attributes:
        name: ``mylib::op``.
        schema: arguments and results, without the name.
        function: the implementation for every device.
        fake: gives the shape of the result.
        setup_context: keeps what backward needs.
        backward: the gradient formula.
    """

    name: str
    schema: str
    function: Callable[..., Any]
    fake: Callable[..., Any] | None
    setup_context: Callable[..., Any] | None
    backward: Callable[..., Any] | None


def custom_operators(families: Iterable[str] | None = None) -> tuple[CustomOperator, ...]:
    """The custom operators among ``families`` (``mylib.op``); all that are known where None.

    Operators registered in C++ or with a bare ``torch.library.Library``, and kernels registered
    for one kind of device, are not among them: the module that registers those must be imported in
    every process.
    """
    wanted = None if families is None else {f.replace(".", "::", 1) for f in families}
    return tuple(
        _taken_along(definition)
        for name, definition in OPDEFS.items()
        if wanted is None or name in wanted
    )


def _taken_along(definition: CustomOpDef) -> CustomOperator:
    return CustomOperator(
        name=definition._qualname,
        schema=definition._schema,
        function=definition._init_fn,
        fake=definition._abstract_fn,
        setup_context=definition._setup_context_fn,
        backward=definition._backward_fn,
    )


def define(operators: Iterable[CustomOperator], *, anew: bool = False) -> None:
    """Register operators that this process does not know yet; ``anew``: and replace others."""
    for operator in operators:
        if not anew and (operator.name in OPDEFS or _known(operator.name)):
            continue  # importing the module of its functions defined it
        made = torch.library.custom_op(
            operator.name,
            operator.function,
            mutates_args=_written(operator),
            schema=operator.schema,
        )
        if operator.fake is not None:
            made.register_fake(operator.fake)
        if operator.backward is not None:
            made.register_autograd(operator.backward, setup_context=operator.setup_context)


def _written(operator: CustomOperator) -> tuple[str, ...]:
    """Arguments that the operator changes, as its schema says."""
    schema = torch._C.parse_schema(f"{operator.name}{operator.schema}")
    return tuple(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )


def _known(name: str) -> bool:
    namespace, _, operator = name.partition("::")
    return hasattr(getattr(torch.ops, namespace), operator)
