"""Prices of reshards: whole tables against single paths, single paths against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations, product
from math import prod
from typing import get_args

import numpy as np
import pytest

from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.sharding.collective import CollectiveOp
from autoshard.sharding.layout import Cut, Layout, P, R, State, canonical, compatible
from autoshard.sharding.reshard import Resharder, Step, StepKind, path, step_bytes
from tests.search.model_graphs import llama, mlp
from tests.search.problems import problem_of

UNEVEN = llama(1, vocab=501, batch=6, heads=6, kv_heads=3, width=192)
TABLES = [
    *product([mlp(), llama(1), UNEVEN], [(4,), (2, 4), (8, 8), (3, 2)]),
    (mlp(layers=1), (2, 2, 2)),
]


@pytest.mark.parametrize(("graph", "sizes"), TABLES, ids=lambda v: getattr(v, "name", str(v)))
def test_every_entry_of_every_table_is_the_cheapest_path(
    graph: ModelGraph, sizes: tuple[int, ...]
) -> None:
    cluster = Cluster.preset("h100", prod(sizes))
    model, problem = problem_of(graph, sizes, cluster=cluster)
    tables = problem.tables
    rng = np.random.default_rng(0)
    seen: set[int] = set()
    for u, v, index, number in tables.edges:
        if number in seen:
            continue
        seen.add(number)
        table = tables.edge_tables[number]
        producer = graph.by_name[tables.variables[u]]
        consumer = graph.by_name[tables.variables[v]]
        pairs = list(product(range(len(tables.lists[u])), range(len(tables.lists[v]))))
        for at in rng.permutation(len(pairs))[: 240 // len(sizes) ** 3]:
            i, j = pairs[at]
            reshard = model.resharder.edge(
                producer.shape,
                producer.itemsize,
                tables.lists[u][i].result,
                tables.lists[v][j].operands[index],
                producer.differentiable and consumer.differentiable,
                deferrable=producer.op == "parameter",
            )
            deferred = table.deferred is not None and table.deferred[i, j] > 0
            expected = reshard.forward_s + (0.0 if deferred else reshard.backward_s)
            assert table.seconds[i, j] == pytest.approx(expected, rel=1e-12, abs=1e-15)
            gathers = any(s.kind == "all_gather" for s in reshard.forward)
            if table.gathered is not None and table.gathered[i, j] > 0:
                assert gathers
            if deferred:
                assert [s.kind for s in reshard.backward] == ["all_reduce"]


# ---- brute force: every sequence of steps up to a length, from the table in the design ----------

SHAPE = (8, 12)
FREE = {("R", "S"): "slice", ("R", "P"): "mask", ("S", "P"): "embed"}
PAID = {("S", "R"): "all_gather", ("P", "R"): "all_reduce", ("P", "S"): "reduce_scatter"}


def letter(state: State) -> str:
    return "S" if isinstance(state, Cut) else repr(state)


def steps_from(layout: Layout, target: Layout, mesh: tuple[int, ...]) -> Iterator[Step]:
    """Every step that moves some axes to ``R`` or to their target."""
    axes = range(len(mesh))
    for size in range(1, len(mesh) + 1):
        for group in combinations(axes, size):
            for goals in product(*({target[a], R} for a in group)):
                kinds = set()
                for a, goal in zip(group, goals, strict=True):
                    kinds.add(kind_of(layout[a], goal, mesh[a]))
                if len(kinds) != 1 or None in kinds:
                    continue
                kind = kinds.pop()
                if size > 1 and kind not in PAID.values():
                    continue
                after = list(layout)
                for a, goal in zip(group, goals, strict=True):
                    after[a] = goal
                if compatible(tuple(after)):
                    assert kind in get_args(StepKind)
                    yield Step(kind, group, layout, tuple(after))  # type: ignore[arg-type]


def kind_of(source: State, goal: State, size: int) -> str | None:
    if source == goal:
        return None
    if isinstance(source, Cut) and isinstance(goal, Cut):
        even = source.n % size == 0 and goal.n % size == 0
        return "all_to_all" if source.dim != goal.dim and even else None
    pair = letter(source), letter(goal)
    return FREE.get(pair) or PAID.get(pair)


def cheapest(
    source: Layout, target: Layout, mesh: tuple[int, ...], prices: object, length: int
) -> float:
    best = float("inf")
    origin = (0,) * len(mesh)

    def go(layout: Layout, spent: float, left: int) -> None:
        nonlocal best
        if layout == target:
            best = min(best, spent)
        if left == 0 or spent >= best:
            return
        for step in steps_from(layout, target, mesh):
            cost = 0.0
            if step.is_message:
                cost = prices(step.kind, step.axes, step_bytes(step, SHAPE, 4, mesh, origin))  # type: ignore[operator]
            go(step.after, spent + cost, left - 1)

    go(source, 0.0, length)
    return best


def layouts(mesh: tuple[int, ...]) -> list[Layout]:
    options: list[list[State]] = [
        [R, P, *(canonical(c, size) for c in (Cut(0, 1, 8), Cut(1, 1, 12), Cut(1, 3, 4)))]
        for size in mesh
    ]
    return [row for row in product(*options) if compatible(row)]


@pytest.mark.parametrize("mesh", [(2,), (5,), (2, 4), (3, 2)])
def test_paths_are_as_cheap_as_any_sequence_of_steps(mesh: tuple[int, ...]) -> None:
    prices = Cluster.preset("a100", prod(mesh)).collective_seconds(mesh)
    every = layouts(mesh)
    rng = np.random.default_rng(1)
    pairs = list(product(every, every))
    for at in rng.permutation(len(pairs))[:150]:
        source, target = pairs[at]
        found, steps = path(SHAPE, 4, source, target, mesh, prices)
        assert found == pytest.approx(cheapest(source, target, mesh, prices, 5), rel=1e-12)
        layout = source
        for step in steps:
            assert step.before == layout
            layout = step.after
        assert layout == target


def flat(op: CollectiveOp, axes: tuple[int, ...], num_bytes: int) -> float:
    """A price that knows the axes only by their number."""
    return 1.0 * len(axes) + 0.001 * num_bytes * (2 if op == "all_reduce" else 1)


def test_the_names_of_axes_and_dims_do_not_matter() -> None:
    mesh = (2, 2)
    for source, target in product(layouts(mesh), layouts(mesh)):
        cost = path(SHAPE, 4, source, target, mesh, flat)[0]
        for order in permutations(range(2)):
            moved = path(
                SHAPE,
                4,
                tuple(source[a] for a in order),
                tuple(target[a] for a in order),
                mesh,
                flat,
            )[0]
            assert moved == pytest.approx(cost, rel=1e-12)

        def turned(layout: Layout) -> Layout:
            return tuple(Cut(1 - s.dim, s.outer, s.n) if isinstance(s, Cut) else s for s in layout)

        swapped = path(SHAPE[::-1], 4, turned(source), turned(target), mesh, flat)[0]
        assert swapped == pytest.approx(cost, rel=1e-12)


def test_larger_values_never_cost_less() -> None:
    mesh = (2, 4)
    prices = Cluster.preset("a100", 8).collective_seconds(mesh)
    for source, target in product(layouts(mesh), layouts(mesh)):
        small = path(SHAPE, 2, source, target, mesh, prices)[0]
        assert small <= path(SHAPE, 4, source, target, mesh, prices)[0]


def test_an_edge_is_found_once() -> None:
    resharder = Resharder((4,), Cluster.preset("a100", 4).collective_seconds((4,)))
    one = resharder.edge((8, 8), 4, (R,), (P,), True)
    assert resharder.edge((8, 8), 4, (R,), (P,), True) is one


def test_a_gradient_that_waits_is_summed_over_all_axes_at_once() -> None:
    from autoshard.sharding.layout import RP

    def halving(op: CollectiveOp, axes: tuple[int, ...], num_bytes: int) -> float:
        return 1.0 if len(axes) == 1 else 10.0

    resharder = Resharder((2, 2), halving)
    apart = resharder.edge((8,), 4, (R, R), (RP, RP), True)
    together = resharder.edge((8,), 4, (R, R), (RP, RP), True, deferrable=True)
    assert [s.axes for s in apart.backward] == [(0,), (1,)]
    assert [s.axes for s in together.backward] == [(0, 1)]
    assert together.backward_s == 10.0
