"""Which operator is wrong, where a sharded step gives other numbers than one device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autoshard.graph import Node
from autoshard.program import Edge, Program
from autoshard.sharding.layout import Layout, forward_half, gradient_half
from autoshard.validation.compare import Coordinate, deviation, magnitude
from autoshard.validation.reference import Place, Step


def first_wrong_operator(
    program: Program, parts: Mapping[Coordinate, Step], right: Step, tolerance: float
) -> str:
    """What is wrong first, in words; empty where all watched values agree.

    Forward values are compared in the order they are computed. Where they all agree, gradients
    are, in the order backward computes them. An operator is to blame when what it took is right
    and what it gave is not.

    Args:
        program: what was executed.
        parts: what each device watched.
        right: what one device watched.
        tolerance: largest allowed deviation.
    """
    forward = _Search(program, parts, right, tolerance)
    return forward.forward() or forward.backward()


class _Search:
    def __init__(
        self, program: Program, parts: Mapping[Coordinate, Step], right: Step, tolerance: float
    ) -> None:
        self.program, self.parts, self.right, self.tolerance = program, parts, right, tolerance
        gradients = right.backward.values()
        self.floor = 1e-3 * max((magnitude(g) for g in gradients), default=0.0)

    def _off(self, place: Place, layout: Layout, *, backward: bool) -> float:
        whole = (self.right.backward if backward else self.right.forward).get(place)
        if whole is None:
            return 0.0
        found: dict[Coordinate, Tensor | None] = {
            at: (step.backward if backward else step.forward).get(place)
            for at, step in self.parts.items()
        }
        half = gradient_half(layout) if backward else forward_half(layout)
        return deviation(found, half, whole, self.program.sizes, self.floor if backward else 0.0)

    def forward(self) -> str:
        for node in self.program.graph.nodes:
            if node.is_leaf:
                continue
            for index in range(len(node.operands)):
                edge = self.program.edges[node.name, index]
                off = self._off((node.name, index), edge.taken, backward=False)
                if off > self.tolerance:
                    return self._edge(edge, off, "value")
            layout = self.program.strategies[node.name].result
            off = self._off((node.name, -1), layout, backward=False)
            if off > self.tolerance:
                return self._operator(node, off, "result")
        return ""

    def backward(self) -> str:
        for node in reversed(self.program.graph.nodes):
            if node.is_leaf or not node.differentiable:
                continue
            layout = self.program.strategies[node.name].result
            off = self._off((node.name, -1), layout, backward=True)
            if off > self.tolerance:
                for name, index in self.program.graph.uses[node.name]:
                    return self._edge(self.program.edges[name, index], off, "gradient")
                return self._operator(node, off, "gradient of its result")
            for index in reversed(range(len(node.operands))):
                edge = self.program.edges[node.name, index]
                off = self._off((node.name, index), edge.taken, backward=True)
                if off > self.tolerance:
                    role = node.roles[index] if index < len(node.roles) else str(index)
                    return self._operator(node, off, f"gradient for operand {role!r}")
        return ""

    def _operator(self, node: Node, off: float, what: str) -> str:
        strategy = self.program.strategies[node.name]
        choices = ", ".join(
            f"{axis}: {choice}"
            for axis, choice in zip(self.program.axis_names, strategy.choices, strict=False)
        )
        where = f" in module {node.module}" if node.module else ""
        return (
            f"the first operator that differs is {node.op} ({node.name}{where}): "
            f"its {what} is off by {off:.1e} of its largest magnitude, with operands that are "
            f"right.\nits rule is {self.program.rules[node.name]}; "
            f"it was cut as {choices or 'not at all'}: "
            f"operands {list(strategy.operands)} -> {strategy.result}.\n"
            "If you gave this operator a sharding_rule, it is wrong."
        )

    def _edge(self, edge: Edge, off: float, what: str) -> str:
        node = self.program.graph.by_name[edge.consumer]
        steps = edge.reshard.forward if what == "value" else edge.reshard.backward
        kinds = ", ".join(s.kind for s in steps) or "no step"
        return (
            f"the {what} of {edge.producer} on its way to {node.op} ({node.name}) is the first "
            f"that differs, by {off:.1e} of its largest magnitude: from {edge.produced} "
            f"to {edge.taken} ({kinds}). This is a fault of autoshard, please report it."
        )
