"""Tables of W: what makes gradients of weights only, where that is a task of its own.

An operator's W is what its backward does for operands of weights (:mod:`autoshard.search.apart`),
an edge's what its gradient is sent with where the producer is of weights. Each half of a backward
launches its kernels and reads what it needs, so both may take more than an undivided one.

Until its W, a microbatch keeps what the operator kept and the gradient of its result. The tables
have no more of that than there surely is: what the operator itself lists, and of gradients that may
be one and the same memory only one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.graph import ModelGraph, Node
from autoshard.kernels import Style
from autoshard.search.apart import halves, of_weights
from autoshard.search.cost import CostModel, Tables
from autoshard.search.eliminate import Array
from autoshard.search.walk import PERMUTES, RESHAPES, SAME, SUMS
from autoshard.search.work import NORMS, PRODUCTS
from autoshard.sharding.layout import gradient_half
from autoshard.sharding.strategy import Strategy

HANDS_ON = SAME | RESHAPES | PERMUTES | SUMS | {"aten.cat"}
"""Families whose gradient may go on to an operand as it is, in the same memory."""


@dataclass(frozen=True, slots=True)
class Later:
    """W of an operator, by strategy.

    Attributes:
        seconds: of it, with messages of its own.
        computing: the part of that which is computing.
        more: seconds that its backward takes more where it is divided.
        waiting: bytes that are kept for it, of one microbatch.
    """

    seconds: Array
    computing: Array
    more: Array
    waiting: Array


class LaterTables:
    """W of each variable of a problem; equal ones are found once.

    Args:
        model: costs.
        tables: of the same graph.
    """

    def __init__(self, model: CostModel, tables: Tables) -> None:
        self.model, self.tables = model, tables
        self.weights = of_weights(model.graph)
        self._counted = gradients_apart(model.graph, self.weights)
        self._known: dict[object, Later] = {}
        self.of = tuple(map(self._of, tables.variables))

    def is_sent(self, producer: int) -> bool:
        """Whether messages of the gradient of a variable belong to W."""
        return self.tables.variables[producer] in self.weights

    def _of(self, name: str) -> Later | None:
        """None where it has no W."""
        node = self.model.graph.by_name[name]
        if node.is_leaf or not node.differentiable:
            return None
        number = self.tables.unary[self.tables.place[name]]
        now, later = halves(self.model.graph, node, self.weights)
        is_of_weights = name in self.weights
        if not is_of_weights and not any(later):
            return None
        key = number, now, later, is_of_weights, name in self._counted
        if key not in self._known:
            if is_of_weights:
                table = self.tables.unary_tables[number]
                none = np.zeros_like(table.seconds)
                whole = table.seconds - table.forward
                self._known[key] = Later(whole, table.backward, none, none)
            else:
                self._known[key] = self._divided(node, number, now, later)
        return self._known[key]

    def _divided(
        self, node: Node, number: int, now: tuple[bool, ...], later: tuple[bool, ...]
    ) -> Later:
        model, table = self.model, self.tables.unary_tables[number]
        rows = self.tables.lists[self.tables.place[node.name]]
        known: dict[object, tuple[float, float]] = {}
        pairs = np.empty((len(rows), 2))
        for i, strategy in enumerate(rows):
            key = self._local(node, strategy)
            if key not in known:
                both = (model.works(node, strategy, wants)[1] for wants in (now, later))
                known[key] = tuple(map(model.seconds, both))  # type: ignore[assignment]
            pairs[i] = known[key]
        own, apart = pairs.T
        waiting = np.zeros(len(rows))
        if keeps_apart(node, model.style):
            waiting += table.num_bytes
        if node.name in self._counted:
            waiting += [model.local_bytes(node, gradient_half(s.result)) for s in rows]
        return Later(apart, apart, own + apart - table.backward, waiting)

    def _local(self, node: Node, strategy: Strategy) -> object:
        """What the seconds of its backward depend on, of all that strategies differ in."""
        by_name = self.model.graph.by_name
        return (
            self.model.is_parted(node, strategy),
            strategy.work,
            self.model.local_shape(node, strategy.result),
            *(
                self.model.local_shape(by_name[o], layout)
                for o, layout in zip(node.operands, strategy.operands, strict=True)
            ),
        )


def keeps_apart(node: Node, style: Style) -> bool:
    """Whether an operator with a W keeps for it what it lists; fused ones compute it again."""
    return style != "fused" or node.family in PRODUCTS or node.family in NORMS


def gradients_apart(graph: ModelGraph, weights: frozenset[str]) -> frozenset[str]:
    """Operators with a W of which no two may be given their gradient in the same memory.

    Args:
        graph: of the operators.
        weights: see :func:`autoshard.search.apart.of_weights`.
    """
    root: dict[str, str | None] = {}
    first: dict[str, str] = {}
    for node in reversed(graph.nodes):
        if node.is_leaf or not node.differentiable:
            continue
        users = [graph.by_name[u] for u, _ in graph.uses[node.name]]
        users = [u for u in users if u.differentiable]
        only = users[0] if len(users) == 1 else None
        if any(u.family == "aten.sum" for u in users):
            root[node.name] = None  # one number, seen from everywhere
        elif only is not None and only.family in HANDS_ON:
            root[node.name] = root[only.name]
        else:
            root[node.name] = node.name
        has_w = node.name not in weights and any(halves(graph, node, weights)[1])
        if has_w and (group := root[node.name]) is not None:
            first.setdefault(group, node.name)
    return frozenset(first.values())
