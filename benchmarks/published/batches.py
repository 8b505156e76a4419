"""A model's graph at any batch, from captures at two.

Every size in a graph (of a value, an attribute, a count of operations) is a constant plus a
multiple of the batch: the same nodes at two batches say both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autoshard.analyzer import Captured
from autoshard.graph import Constant, ModelGraph, Node

BATCHES = (2, 3)
"""Batches that are captured: small, and neither the 1 that broadcasts."""


class ByBatch:
    """Captures of one model.

    Args:
        capture: the model at a batch.
    """

    def __init__(self, capture: Callable[[int], Captured]) -> None:
        self.first, self.second = (capture(batch) for batch in BATCHES)

    def at(self, batch: int) -> Captured:
        """The model at ``batch``.

        Raises:
            ValueError: the two captures differ in more than sizes.
        """

        def number(a: int, b: int) -> int:
            return a + (b - a) // (BATCHES[1] - BATCHES[0]) * (batch - BATCHES[0])

        return merged(self.first, self.second, number)


Number = Callable[[int, int], int]
"""What is wanted of a number, from what two captures have of it, where they differ."""


def merged(first: Captured, second: Captured, number: Number) -> Captured:
    """Two captures with ``number`` of whatever they differ in; inputs are as the first has them.

    Raises:
        ValueError: they differ in more than numbers.
    """
    graph = _graph(first.graph, second.graph, number)
    return replace(first, graph=graph, module=None, source=None, call=None)


def _graph(one: ModelGraph, two: ModelGraph, number: Number) -> ModelGraph:
    if len(one.nodes) != len(two.nodes) or len(one.constants) != len(two.constants):
        raise ValueError(f"graph {one.name} has other nodes at other sizes")
    return replace(
        one,
        nodes=tuple(_item(a, b, number) for a, b in zip(one.nodes, two.nodes, strict=True)),
        constants=tuple(
            _item(a, b, number) for a, b in zip(one.constants, two.constants, strict=True)
        ),
        batch=_value(one.batch, two.batch, number),
    )


def _item(a: Any, b: Any, number: Number) -> Any:
    """A node or constant."""
    if a.name != b.name or a.op != b.op or a.operands != b.operands:
        raise ValueError(f"{a.name} is another operator at other sizes")
    changed: dict[str, Any] = {}
    if a.shape != b.shape:
        changed["shape"] = _value(a.shape, b.shape, number)
    if a.attrs != b.attrs:
        changed["attrs"] = {k: _value(v, b.attrs[k], number) for k, v in a.attrs.items()}
    if isinstance(a, Node):
        for name in ("flops_forward", "flops_backward", "saved_extra_bytes"):
            if getattr(a, name) != getattr(b, name):
                changed[name] = _number(getattr(a, name), getattr(b, name), number)
    else:
        assert isinstance(a, Constant)
    return replace(a, **changed) if changed else a


def _value(a: Any, b: Any, number: Number) -> Any:
    if a == b:
        return a
    if isinstance(a, tuple):
        return tuple(_value(x, y, number) for x, y in zip(a, b, strict=True))
    return _number(a, b, number)


def _number(a: int, b: int, number: Number) -> int:
    if type(a) is not int or type(b) is not int:
        raise ValueError(f"{a!r} becomes {b!r} at other sizes")
    return number(a, b)
