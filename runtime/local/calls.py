"""From a call as a value to a Python callable: arguments are placed once, not at every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from autoshard.errors import UnknownNameError
from autoshard.runtime.local.site import ADAPTORS, Local, Reducer, Site
from autoshard.sharding.layout import Layout, Shape
from autoshard.sharding.registry import AttrValue, OpCall


def local_call(
    call: OpCall,
    operand_layouts: Sequence[Layout],
    result_layout: Layout,
    mesh: Shape,
    coordinate: Sequence[int],
    *,
    reducer: Reducer | None = None,
    value: str = "",
    device: torch.device | None = None,
) -> Local:
    """What the device at ``coordinate`` runs for ``call`` under a strategy's layouts.

    The callable takes the device's shards of the operands, in order, and gives its shard of the
    result. It is the plain torch operator wherever local shapes need nothing else.

    Args:
        call: the operator, with global shapes.
        operand_layouts: ``Strategy.operands``.
        result_layout: ``Strategy.result``.
        mesh: axis sizes.
        coordinate: the device's place on each axis.
        reducer: issues the collectives that ``Rule.internal`` lists; needed only where it lists
            some for these cuts.
        value: name of the result, for the reducer.
        device: where an operator without operands makes its result; torch's default if None.

    Raises:
        UnknownNameError: torch has no such operator.
    """
    site = Site(
        call=call,
        operands=tuple(operand_layouts),
        result=result_layout,
        mesh=mesh,
        coordinate=tuple(coordinate),
        reducer=reducer,
        value=value,
        device=device,
    )
    adaptor = ADAPTORS.get(call.family)
    return generic_call(call.op, call.roles, call.attrs) if adaptor is None else adaptor(site)


def call_op(
    op: str,
    roles: Sequence[str],
    attrs: Mapping[str, AttrValue],
    tensors: Sequence[Tensor],
    *,
    result: Shape | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Run an operator on whole tensors.

    Args:
        op: with overload, ``aten.linear.default``, or one of ours.
        roles: argument name of each tensor.
        attrs: the other arguments.
        tensors: the operands.
        result: shape of the result, for operators whose attributes do not tell it
            (``aten.reshape``, ``aten.expand``, ``aten.rand``); else None.
        device: where an operator without operands makes its result.
    """
    shapes = tuple(tuple(t.shape) for t in tensors)
    if result is None:
        if not op.startswith("autoshard."):
            return generic_call(op, roles, attrs)(*tensors)
        result = _own_result(op, attrs, shapes)
    call = OpCall(
        op=op,
        shapes=shapes,
        roles=tuple(roles),
        attrs=attrs,
        result=result,
        operand_itemsizes=tuple(t.element_size() for t in tensors),
    )
    return local_call(call, ((),) * len(tensors), (), (), (), device=device)(*tensors)


def _own_result(op: str, attrs: Mapping[str, AttrValue], shapes: tuple[Shape, ...]) -> Shape:
    """Shape of the result of one of our own operators."""
    name = op.removeprefix("autoshard.").removesuffix(".default")
    if name in ("nll_sum", "count_valid"):
        return ()
    if name == "experts":
        return (shapes[0][0], shapes[4][1])
    if name == "repeat_kv":
        batch, heads, *rest = shapes[0]
        return (batch, heads * cast("int", attrs["n"]), *rest)
    return shapes[0]


def find_operator(op: str) -> Any:
    """The torch operator called ``op``: ``aten.add.Tensor``.

    Raises:
        UnknownNameError: there is none.
    """
    found: Any = torch.ops
    parts = op.split(".")
    try:
        for part in parts if len(parts) > 2 else (*parts, "default"):
            found = getattr(found, part)
    except AttributeError:
        near = dir(getattr(torch.ops, parts[0]))
        raise UnknownNameError("operator", op, [f"{parts[0]}.{n}" for n in near]) from None
    return found


TORCH_VALUED = frozenset({"dtype", "out_dtype", "layout", "memory_format"})
"""Arguments whose value is a torch constant, written as its name."""


def python_value(name: str, value: AttrValue) -> Any:
    """An attribute as torch takes it: ``"float32"`` as a dtype, tuples as lists."""
    if name in TORCH_VALUED and isinstance(value, str):
        return getattr(torch, value.removeprefix("torch."))
    return list(value) if isinstance(value, tuple) else value


def generic_call(
    op: str, roles: Sequence[str], attrs: Mapping[str, AttrValue], **changed: AttrValue
) -> Local:
    """The operator as it is, its arguments placed by name; ``changed`` attributes win.

    Operands with roles ``tensors.0``, ``tensors.1`` are regrouped in a list. An attribute
    ``output`` that the operator does not know chooses one of several results.
    """
    operator = find_operator(op)
    arguments = [a.name for a in operator._schema.arguments]
    fixed = {k: python_value(k, v) for k, v in {**attrs, **changed}.items()}
    given = {role.partition(".")[0] for role in roles} | fixed.keys()
    for argument in operator._schema.arguments:
        if argument.name not in given and not argument.has_default_value():
            fixed[argument.name] = None  # an optional one without a default: bias of a convolution
    output = None if "output" in arguments else fixed.pop("output", None)
    run = _placed(operator, arguments, tuple(roles), fixed)
    if output is None:
        return run

    def chosen(*tensors: Tensor) -> Tensor:
        return run(*tensors)[output]

    return chosen


def _placed(
    operator: Any, arguments: list[str], roles: tuple[str, ...], fixed: dict[str, Any]
) -> Local:
    if roles == tuple(arguments[: len(roles)]):
        return partial(operator, **fixed) if fixed else cast("Local", operator)
    lists: dict[str, list[int | None]] = {}
    single: dict[str, int] = {}
    for index, role in enumerate(roles):
        name, _, place = role.rpartition(".")
        if name:
            slots = lists.setdefault(name, [])
            slots += [None] * (int(place) + 1 - len(slots))
            slots[int(place)] = index
        else:
            single[role] = index
    if not single and list(lists) == arguments[:1] and None not in lists[arguments[0]]:
        return lambda *tensors: operator(tensors, **fixed)

    def run(*tensors: Tensor) -> Tensor:
        named: dict[str, Any] = {name: tensors[i] for name, i in single.items()}
        for name, slots in lists.items():
            named[name] = [None if i is None else tensors[i] for i in slots]
        return cast("Tensor", operator(**named, **fixed))

    return run
