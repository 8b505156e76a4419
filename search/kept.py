"""What a block keeps for backward where a part of it, and not all, is computed again.

The part is computed again from what it reads: values made outside of it stay, what its operators
make goes. A value counts once, under the first operator that lists it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.graph import ModelGraph, Node
from autoshard.kernels import Style
from autoshard.program import ALIASES
from autoshard.search.work import ATTENTION, NORMS, PRODUCTS

PARTLY = "selective"
"""The recomputation that leaves some of a block kept."""


def base(graph: ModelGraph, name: str) -> str:
    """The value whose storage a value shows: what it is a view of, or itself."""
    node = graph.by_name[name]
    while node.op in ALIASES:
        node = graph.by_name[node.operands[0]]
    return node.name


def listed(node: Node) -> list[str]:
    """Values that an operator keeps for backward."""
    return [
        node.name if role == "result" else node.operands[node.roles.index(role)]
        for role in node.saved
    ]


def read_again(graph: ModelGraph, nodes: Sequence[Node], again: frozenset[str]) -> tuple[str, ...]:
    """Values of a block that what is computed again reads, and that no other operator lists."""
    made = [n for n in nodes if not n.is_leaf and n.name not in again]
    others = {base(graph, v) for n in made if n.differentiable for v in listed(n)}
    names = {n.name for n in made}
    out: dict[str, str] = {}
    for node in nodes:
        for operand in node.operands if node.name in again else ():
            start = base(graph, operand)
            if operand in names and start not in others:
                out.setdefault(start, operand)
    return tuple(out.values())


def in_kernels(graph: ModelGraph, nodes: Sequence[Node], style: Style) -> frozenset[str]:
    """Values of a block that nobody keeps: fused kernels compute again what lies inside them."""
    if style != "fused":
        return frozenset()
    return frozenset(
        node.name
        for node in nodes
        if not node.is_leaf
        and node.op not in ALIASES
        and (users := users_of(graph, node.name))
        and all(_is_fused(n) for n in (node, *users))
    )


def users_of(graph: ModelGraph, name: str) -> list[Node]:
    """Operators that use a value, also through views of it."""
    out: list[Node] = []
    for user, _ in graph.uses[name]:
        node = graph.by_name[user]
        out += users_of(graph, user) if node.op in ALIASES else [node]
    return out


def _is_fused(node: Node) -> bool:
    """Whether a fused program has no kernel of its own for an operator."""
    return node.family not in (*PRODUCTS, *NORMS, ATTENTION)
