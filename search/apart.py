"""What of a backward makes gradients of weights only: the task W of zero-bubble schedules.

A value is *of weights* if no input of the model reaches it: parameters, and what is computed from
them and from constants. The gradient of a value of weights leads to gradients of parameters alone,
so nobody else waits for it (Qi et al. 2023, arXiv 2401.10241, figure 1). W makes these gradients,
and sends what they must send; B makes all the others. Until its W, a microbatch keeps what an
operator needs for them: the other operands and the gradient of its result.
"""

from __future__ import annotations

from autoshard.graph import ModelGraph, Node


def of_weights(graph: ModelGraph) -> frozenset[str]:
    """Values that no input of the model reaches; not constants and buffers."""
    out: set[str] = set()
    for node in graph.nodes:
        if node.op == "parameter":
            out.add(node.name)
        elif not node.is_leaf and node.operands:
            made_of = [graph.by_name[o] for o in node.operands]
            if all(o.op in ("constant", "buffer") or o.name in out for o in made_of):
                out.add(node.name)
    return frozenset(out)


def halves(
    graph: ModelGraph, node: Node, weights: frozenset[str]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """(operands whose gradients B makes, those whose gradients W makes).

    Args:
        graph: of the node.
        node: an operator.
        weights: see :func:`of_weights`.
    """
    wants = [node.differentiable and graph.by_name[o].differentiable for o in node.operands]
    own = [o in weights or node.name in weights for o in node.operands]
    return (
        tuple(want and not w for want, w in zip(wants, own, strict=True)),
        tuple(want and w for want, w in zip(wants, own, strict=True)),
    )
