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

PARTLY = ("selective", "pointwise")
"""Kinds of recomputation that leave some of a block kept."""

LIGHT = 256.0
"""FLOPs a byte of its result that a cheap operator takes at most: a product over 256 channels of 16
bits takes as many (so scores of heads are cheap), norms and activations a few."""


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


def cheap(nodes: Sequence[Node]) -> frozenset[str]:
    """Operators of a block that take few FLOPs for each byte they make, where that saves memory.

    Those alone whose operands are there: they enter the block, are kept for others anyway, or are
    computed again themselves.
    """
    by_name = {n.name: n for n in nodes}
    start: dict[str, str] = {}
    for node in nodes:
        view = node.op in ALIASES and node.operands[0] in start
        start[node.name] = start[node.operands[0]] if view else node.name
    operators = [n for n in nodes if not n.is_leaf]
    wanted = {v for n in operators if n.differentiable for v in listed(n)}
    saved = {start.get(v, v) for v in wanted}
    there: set[str] = set()
    made: set[str] = set()
    for node in operators:
        operands = {o for o in node.operands if o in by_name and not by_name[o].is_leaf}
        if node.flops_forward <= LIGHT * node.num_bytes and operands <= there | made:
            made.add(node.name)
        elif node.name in saved:
            there.add(node.name)
    wanted |= {n.name for n in operators if n.differentiable and n.saved_extra_bytes}
    again: set[str] = set()
    for node in reversed(operators):
        if node.name in made and node.name in wanted:
            again.add(node.name)
            wanted.update(node.operands)
    return frozenset(again)


def read_again(graph: ModelGraph, nodes: Sequence[Node], again: frozenset[str]) -> tuple[str, ...]:
    """Values that a block computes again from, and that no other operator of it lists.

    Made in it, or by the block before; what stands before all blocks is left out, as they share it.
    """
    made = [n for n in nodes if not n.is_leaf and n.name not in again]
    others = {base(graph, v) for n in made if n.differentiable for v in listed(n)}
    names = {n.name for n in made} | _before(graph, nodes)
    out: dict[str, str] = {}
    for node in nodes:
        for operand in node.operands if node.name in again else ():
            start = base(graph, operand)
            if operand in names and start not in others:
                out.setdefault(start, operand)
    return tuple(out.values())


def _before(graph: ModelGraph, nodes: Sequence[Node]) -> set[str]:
    """Operators of all blocks but this one."""
    inside = {n.name for n in nodes}
    return {
        n.name
        for repeat in graph.repeats
        for start in repeat.starts
        for n in graph.nodes[start : start + repeat.length]
        if not n.is_leaf and n.name not in inside
    }


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
