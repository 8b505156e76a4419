"""Problems and answers that several tests share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autoshard.candidates import AxisUse, Candidates
from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.search.cost import CostModel, build_tables
from autoshard.search.inner import Prepared
from autoshard.search.memory import optimizer_of
from autoshard.search.problem import Problem
from autoshard.sharding.strategy import Passing


def problem_of(
    graph: ModelGraph,
    sizes: tuple[int, ...],
    uses: Sequence[AxisUse] | None = None,
    *,
    cluster: Cluster | None = None,
    optimizer: str = "adamw",
    passing: Passing = "star",
    fold: bool = True,
) -> tuple[CostModel, Problem]:
    """Cost model and tables of a graph on a mesh."""
    prepared = Prepared(graph)
    cluster = cluster or Cluster.preset("h100", prod(sizes))
    model = CostModel(graph, cluster, sizes, prepared.rules, optimizer_of(optimizer))
    candidates = Candidates(
        graph,
        sizes,
        uses=uses,
        passing=passing,
        rules=prepared.rules,
        proposals=prepared.proposals,
        batch=prepared.batch,
    )
    return model, Problem(graph, build_tables(model, candidates), fold=fold)
