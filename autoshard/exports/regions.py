"""Between the weights: which stretches of a model are computed on shards from end to end.

A column-parallel weight leaves a cut result and a row-parallel one takes a cut input. Tools that
work module by module can leave what lies between them cut (attention heads, the hidden values of a
perceptron) only if *all* of it is: every way in is a column, every way out a row, and the plan cuts
every operator on the way. Everywhere else results are gathered where they leave their module.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.graph import ModelGraph, Node
from autoshard.program import ALIASES, Program
from autoshard.sharding.layout import Cut


def origin(graph: ModelGraph, name: str) -> Node:
    """The value that identities and views hand on."""
    node = graph.by_name[name]
    while node.op in ALIASES:
        node = graph.by_name[node.operands[0]]
    return node


class Regions:
    """The stretches between weights, on one axis.

    Args:
        program: the plan's program.
        axis: index of a tensor axis.
        uses: (operator, index of its weight) of every product and look-up with a weight.
    """

    def __init__(self, program: Program, axis: int, uses: Sequence[tuple[Node, int]]) -> None:
        self.program, self.axis, self.graph = program, axis, program.graph
        self._heavy = {node.name: index for node, index in uses}
        self._owners = {
            str(origin(self.graph, node.operands[index]).attrs["fqn"]).rpartition(".")[0]
            for node, index in uses
        }
        self._parent: dict[str, str] = {}
        for node in self.graph.nodes:
            if not self._inside(node):
                continue
            for operand in node.operands:
                producer = self.graph.by_name[operand]
                if self._inside(producer) or producer.name in self._heavy:
                    self._join(
                        node.name,
                        f"{producer.name}>" * (producer.name in self._heavy) or producer.name,
                    )
        self._cut = self._find_cut()

    def gathers(self, node: Node) -> bool:
        """Whether the result of a column must be gathered where it leaves the module."""
        return not self._cut.get(self._root(f"{node.name}>"), False)

    def splits(self, node: Node, weight: int) -> bool:
        """Whether the input of a row arrives whole."""
        return not self._cut.get(self._root(self._source(node, weight)), False)

    def _inside(self, node: Node) -> bool:
        """Whether a node is part of a stretch: it computes on what depends on parameters."""
        return node.differentiable and not node.is_leaf and node.name not in self._heavy

    def _source(self, node: Node, weight: int) -> str:
        """What the activations of a product come from: a node, or ``name>`` of a product."""
        for index, operand in enumerate(node.operands):
            if index != weight:
                return f"{operand}>" if operand in self._heavy else operand
        return ""

    def _find_cut(self) -> dict[str, bool]:
        """For each stretch whether it is cut from end to end."""
        out: dict[str, bool] = {}
        exits: set[str] = set()
        strategies = self.program.strategies
        for node in self.graph.nodes:
            if not self._inside(node):
                continue
            root = self._root(node.name)
            cut = isinstance(strategies[node.name].result[self.axis], Cut)
            foreign = any(self._foreign(node, o) for o in node.operands)
            out[root] = out.get(root, True) and cut and not foreign
        for name, weight in self._heavy.items():
            node = self.graph.by_name[name]
            out_root = self._root(f"{name}>")
            column = self._cut_dim(node, weight) == "column" and node.family != "aten.embedding"
            out[out_root] = out.get(out_root, True) and column
            source = self._source(node, weight)
            if source:
                root = self._root(source)
                row = self._cut_dim(node, weight) == "row" and node.family != "aten.embedding"
                out[root] = out.get(root, True) and row
                if row:
                    exits.add(root)
        for _, name in self.graph.outputs:
            node = self.graph.by_name[name]
            root = self._root(f"{name}>" if name in self._heavy else name)
            if not node.is_leaf:
                out[root] = False
        return {root: cut and root in exits for root, cut in out.items()}

    def _foreign(self, node: Node, operand: str) -> bool:
        """Whether a node uses a parameter that is not its own module's bias beside a weight."""
        found = origin(self.graph, operand)
        if found.op != "parameter":
            return False
        owner = str(found.attrs["fqn"]).rpartition(".")[0]
        return owner != node.module or owner not in self._owners

    def _cut_dim(self, node: Node, weight: int) -> str:
        choice = self.program.strategies[node.name].choices[self.axis]
        rule = self.program.rules[node.name]
        if not choice.factor or not any(choice.factor in d for d in rule.operands[weight]):
            return ""
        return "column" if any(choice.factor in d for d in rule.result) else "row"

    def _root(self, name: str) -> str:
        while (parent := self._parent.get(name, name)) != name:
            self._parent[name] = self._parent.get(parent, parent)
            name = parent
        return name

    def _join(self, a: str, b: str) -> None:
        first, second = self._root(a), self._root(b)
        if first != second:
            self._parent[second] = first
