"""Which strategy an operator runs by, when nobody has planned: follow the data, take the cheapest.

On an axis where no operand is cut or partial the data says nothing, and only ``R`` (or ``RP``) is
offered: a replicated value could be cut for free, and the gather would come later. A parameter
that nobody has used yet becomes ``RP`` there if the axis cuts inputs, for its data will be cut too;
on an axis that cuts parameters only it stays ``R``, and so does the value. Elsewhere the cuts of
the operands are offered, gathering them, and what passes partial sums through; the least seconds
of messages (forward and backward) plus share of the operator's roofline win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autoshard.cluster import Cluster
from autoshard.sharding.collective import CollectiveSeconds
from autoshard.sharding.layout import RP, Cut, Layout, P, R, Shape, forward_half
from autoshard.sharding.registry import OpCall
from autoshard.sharding.reshard import Resharder
from autoshard.sharding.rule import Dims, Rule
from autoshard.sharding.strategy import Choice, Strategy, axis_choices, strategies


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand as it comes.

    Attributes:
        layout: its pair, or its forward half where it needs no gradient.
        differentiable: whether it needs a gradient.
        open: axes on which it may still become ``RP`` or ``R`` for nothing.
    """

    layout: Layout
    differentiable: bool
    open: tuple[int, ...] = ()

    def produced(self, taken: Layout) -> Layout:
        """Its layout if it is taken as ``taken``: open axes follow."""
        if not self.open:
            return self.layout
        return tuple(
            RP if axis in self.open and taken[axis] is not R else state
            for axis, state in enumerate(self.layout)
        )


def in_factor(rule: Rule, dims: Dims, cut: Cut) -> tuple[str, int, int] | None:
    """The factor that a cut of one of ``dims`` lies in, with (outer, n) inside that factor.

    A cut that runs beyond its factor is the whole rest of the factor.
    """
    before = 1
    for factor in dims[cut.dim]:
        size = rule.sizes[factor]
        if cut.outer < before * size:
            inside, rest = divmod(cut.outer, before)
            if rest or size % inside:
                return None
            room = size // inside
            if cut.n >= room:
                return (factor, inside, room) if cut.n % room == 0 else None
            return (factor, inside, cut.n) if room % cut.n == 0 else None
        before *= size
    return None


class Chooser:
    """Chooses strategies on one mesh with one price list.

    Args:
        mesh: axis sizes.
        seconds: price of a collective.
        cluster: for the roofline of operators.

    Attributes:
        data_axes: axes that cut inputs.
    """

    def __init__(
        self, mesh: Shape, seconds: CollectiveSeconds | None = None, cluster: Cluster | None = None
    ) -> None:
        self.mesh = mesh
        devices = prod(mesh)
        self.cluster = cluster or Cluster.preset("local", devices)
        self.resharder = Resharder(mesh, seconds or self.cluster.collective_seconds(mesh))
        self.seconds = self.resharder.seconds
        self.data_axes = tuple(range(len(mesh)))

    def choose(
        self,
        call: OpCall,
        rule: Rule | None,
        operands: Sequence[Operand],
        *,
        dtype: str,
        differentiable: bool,
    ) -> Strategy:
        """The strategy of one operator.

        Args:
            call: the operator.
            rule: its rule; None: it runs whole.
            operands: how they come.
            dtype: of the result.
            differentiable: whether the result needs a gradient.
        """
        whole: Layout = (R,) * len(self.mesh)
        if rule is None:
            return Strategy(
                (Choice(passes="R"),) * len(self.mesh), (whole,) * len(operands), whole, 1.0
            )
        if all(all(s is R for s in o.layout) and not o.open for o in operands):
            return Strategy(
                (Choice(passes="R"),) * len(self.mesh), (whole,) * len(operands), whole, 1.0
            )
        rows = [
            self._offered(rule, operands, axis, differentiable) for axis in range(len(self.mesh))
        ]
        grads = [o.differentiable and differentiable for o in operands]
        found = strategies(rule, rows, self.mesh, operand_grad=grads, result_grad=differentiable)
        work = self._seconds(call, rule, dtype)
        best: tuple[float, int] | None = None
        chosen: Strategy | None = None
        for strategy in found:
            cost, moved = strategy.work * work, 0
            for index, operand in enumerate(operands):
                taken = strategy.operands[index]
                edge = self.resharder.edge(
                    call.shapes[index],
                    call.operand_itemsizes[index],
                    operand.produced(taken),
                    taken,
                    grads[index],
                )
                cost += edge.forward_s + edge.backward_s
                moved += len(edge.forward) + len(edge.backward)
                if index in rule.mutates and edge.forward:
                    back, steps = self.resharder.path(
                        call.shapes[index],
                        call.operand_itemsizes[index],
                        forward_half(taken),
                        forward_half(operand.layout),
                    )
                    cost, moved = cost + back, moved + len(steps)
            cost += self._internal(rule, strategy)
            key = (round(cost, 12), moved)
            if best is None or key < best:
                best, chosen = key, strategy
        assert chosen is not None
        return chosen

    def _offered(
        self, rule: Rule, operands: Sequence[Operand], axis: int, differentiable: bool
    ) -> list[Choice]:
        states = [o.layout[axis] for o in operands]
        if not any(isinstance(s, Cut) or s is P for s in states):
            out = [Choice(passes="R")]
            if differentiable:
                passing = Choice(passes="RP")
                follow = self._all_follow(operands, axis)
                out = [passing, *out] if follow else [*out, passing]
            return out
        proposals: dict[str, set[tuple[int, int]]] = {}
        for operand, dims in zip(operands, rule.operands, strict=True):
            state = operand.layout[axis]
            if isinstance(state, Cut):
                hit = in_factor(rule, dims, state)
                if hit is not None:
                    proposals.setdefault(hit[0], set()).add(hit[1:])
        return axis_choices(rule, proposals, differentiable=differentiable)

    def _all_follow(self, operands: Sequence[Operand], axis: int) -> bool:
        """Whether on an axis where nothing is cut the gradients had best stay parts."""
        states = [o.layout[axis] for o in operands if o.differentiable]
        is_open = [axis in o.open for o in operands if o.differentiable]
        if axis not in self.data_axes and RP not in states:
            return False
        return bool(states) and all(s is RP or o for s, o in zip(states, is_open, strict=True))

    def _internal(self, rule: Rule, strategy: Strategy) -> float:
        total = 0.0
        for message in rule.internal:
            axes = tuple(a for a, c in enumerate(strategy.choices) if c.factor in message.when)
            if axes:
                elements = prod(rule.sizes[f] for f in message.elements) * message.count
                total += self.seconds("all_reduce", axes, elements * message.itemsize)
        return total

    def _seconds(self, call: OpCall, rule: Rule, dtype: str) -> float:
        """Roofline of the whole operator on one device."""
        named = {f for dim in rule.result for f in dim}
        flops = 0
        if any(f not in named for f in rule.sizes) and len(call.shapes) > 1 and rule.anchors:
            flops = 2 * prod(rule.sizes.values())
        num_bytes = prod(call.result) * call.itemsize + sum(
            prod(shape) * size
            for shape, size in zip(call.shapes, call.operand_itemsizes, strict=True)
        )
        return self.cluster.operator_seconds(flops, num_bytes, dtype)
