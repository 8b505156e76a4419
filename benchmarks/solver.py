"""How long the inner search takes, and how that compares with a mixed-integer program.

``python -m benchmarks.solver``: elimination against HiGHS on the same tables, in one run, so the
ratios mean something on any machine; then whole solves of large models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod

from autoshard.analyzer import analyze
from autoshard.candidates import AxisUse, Candidates
from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.search.cost import CostModel, build_tables
from autoshard.search.inner import Prepared, solve
from autoshard.search.memory import optimizer_of
from autoshard.search.problem import Problem


def seconds(call: Callable[[], object], repeat: int = 3) -> float:
    """Least wall time of a few calls."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def parts(
    graph: ModelGraph, sizes: tuple[int, ...], uses: tuple[AxisUse, ...] | None = None
) -> tuple[Problem, dict[str, float]]:
    """The problem of a graph on a mesh, and what each part of it takes."""
    prepared = Prepared(graph)
    model = CostModel(
        graph,
        Cluster.preset("h100", prod(sizes)),
        sizes,
        prepared.rules,
        optimizer_of("adamw"),
    )

    def lists() -> Candidates:
        return Candidates(
            graph,
            sizes,
            uses=uses,
            rules=prepared.rules,
            proposals=prepared.proposals,
            batch=prepared.batch,
        )

    candidates = lists()
    tables = build_tables(model, candidates)
    problem = Problem(graph, tables)
    return problem, {
        "lists": seconds(lists),
        "tables": seconds(lambda: build_tables(model, candidates)),
        "order": seconds(lambda: Problem(graph, tables)),
        "elimination": seconds(lambda: problem.minimum(1.0, 0.0)),
    }


def against_milp() -> None:
    """Elimination and HiGHS on the same tables: the same optimum, how much faster."""
    from tests.search.model_graphs import llama
    from tests.search.referee import optimum

    print("elimination against a mixed-integer program (HiGHS), the same tables")
    cases: list[tuple[int, tuple[int, ...], tuple[AxisUse, ...] | None]] = [
        (1, (4,), None),
        (4, (4,), None),
        (1, (2, 4), ("batch", "tensor")),
        (1, (2, 2), None),
        (4, (2, 2), None),
    ]
    for layers, sizes, uses in cases:
        graph = llama(layers, 8, 2048, 4096, 32, 8, 14336, 32000)
        problem, took = parts(graph, sizes, uses)
        start = time.perf_counter()
        try:
            best = optimum(problem, 1.0, seconds=300.0)
        except AssertionError as error:
            print(f"  {layers} layers on {sizes}: HiGHS did not end: {error}")
            continue
        milp_s = time.perf_counter() - start
        value, _ = problem.minimum(1.0, 0.0)
        ours = took["elimination"]
        print(
            f"  {layers} layers on {sizes} {uses or ''}: {ours * 1e3:.1f} ms against "
            f"{milp_s:.2f} s, {milp_s / ours:.0f} times; "
            f"optimum the same to {abs(best / value - 1):.0e}"
        )


def large() -> None:
    """Whole solves of large models on two axes."""
    print("whole solves, two axes, every strategy")
    for name, settings in (
        ("gpt2", {"batch": 64, "seq_len": 1024}),
        ("llama-3-8b", {"batch": 64, "seq_len": 4096}),
        ("llama-3-405b", {"batch": 64, "seq_len": 4096}),
        ("t5-small", {"batch": 64, "seq_len": 128}),
    ):
        graph = analyze(name, **settings).graph  # type: ignore[arg-type]
        prepared = Prepared(graph)
        cluster = Cluster.preset("h100", 64)
        _, took = parts(graph, (8, 8))

        def whole(
            graph: ModelGraph = graph, cluster: Cluster = cluster, prepared: Prepared = prepared
        ) -> object:
            return solve(graph, cluster, (8, 8), ("data", "model"), prepared=prepared)

        inside = ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in took.items())
        print(f"  {name}, {len(graph.nodes)} nodes on 8x8: {seconds(whole):.2f} s ({inside})")


def main() -> None:
    """Everything."""
    against_milp()
    large()


if __name__ == "__main__":
    main()
