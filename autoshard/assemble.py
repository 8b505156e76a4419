"""From a plan and its graph back to the program that a device executes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from autoshard.candidates import Rules
from autoshard.cluster import Cluster
from autoshard.errors import RequestError
from autoshard.graph import ModelGraph, Node
from autoshard.plan import PlanDocument
from autoshard.program import Program
from autoshard.sharding.layout import R, Shape
from autoshard.sharding.reshard import Resharder
from autoshard.sharding.rule import Rule
from autoshard.sharding.strategy import Choice, Strategy, build, leaf_rule


def program_of(graph: ModelGraph, plan: PlanDocument) -> Program:
    """The program that ``plan`` stands for, on the mesh's axes that are larger than 1.

    Raises:
        RequestError: the plan was made for another graph; the message says how they differ.
    """
    if graph.fingerprint != plan.model.fingerprint:
        raise RequestError(
            f"the plan is for model {plan.model.name} ({plan.model.fingerprint}), "
            f"the graph is {graph.name} ({graph.fingerprint}); plan again, or load the graph it "
            "was made from (same sizes, batch, sequence and dtype)"
        )
    names, sizes = plan.mesh.stage
    rules = Rules(graph)
    cluster = Cluster.from_json(plan.cluster)
    if plan.schedule.stages > 1:
        cluster = cluster.with_devices(prod(sizes))
    return Program(
        graph,
        names,
        sizes,
        strategies_of(graph, rules, sizes, plan.choices),
        Resharder(sizes, cluster.collective_seconds(sizes)),
        regather=frozenset(plan.regather),
        bucket_bytes=plan.bucket_bytes,
        rules=rules,
    )


def strategies_of(
    graph: ModelGraph, rules: Rules, sizes: Shape, choices: Mapping[str, tuple[str, ...]]
) -> dict[str, Strategy]:
    """The strategy of every node, from what a plan says each chooses on each axis.

    Raises:
        RequestError: a node has no choice, or one that its rule does not allow.
    """
    out: dict[str, Strategy] = {}
    shared: dict[object, Strategy] = {}
    for node in graph.nodes:
        if node.op == "constant":
            out[node.name] = Strategy((), (), (R,) * len(sizes), 1.0)
            continue
        texts = choices.get(node.name)
        if texts is None or len(texts) != len(sizes):
            raise RequestError(f"the plan says nothing (or not {len(sizes)} axes) of {node.name}")
        grads = tuple(
            graph.by_name[o].differentiable and node.differentiable for o in node.operands
        )
        rule = leaf_rule(node.shape) if node.is_leaf else rules[node.name]
        key = (id(rule) if not node.is_leaf else node.shape, texts, grads, node.differentiable)
        if key not in shared:
            shared[key] = _strategy(node, rule, texts, sizes, grads)
        out[node.name] = shared[key]
    return out


def _strategy(
    node: Node, rule: Rule, texts: tuple[str, ...], sizes: Shape, grads: tuple[bool, ...]
) -> Strategy:
    try:
        parsed = tuple(Choice.parse(t) for t in texts)
        if unknown := [c.factor for c in parsed if c.factor and c.factor not in rule.sizes]:
            raise ValueError(f"no factor {unknown} in rule {rule}")
        strategy = build(
            rule,
            parsed,
            sizes,
            grads,
            node.differentiable or node.is_leaf,
        )
        if strategy is None:
            raise ValueError("two cuts of one dim collide")
    except ValueError as error:
        raise RequestError(
            f"the plan's choice {texts} for {node.name} ({node.op}): {error}"
        ) from error
    return strategy
