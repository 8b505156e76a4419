"""What predicted timelines have in common: prices as the plan had them, and the file."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from autoshard import chrome
from autoshard.cluster import Cluster
from autoshard.plan import PlanDocument
from autoshard.program import Program
from autoshard.search.cost import CostModel


def model_of(program: Program, plan: PlanDocument) -> CostModel:
    """The prices on the devices of one stage."""
    cluster = Cluster.from_json(plan.cluster)
    stages = plan.schedule.stages
    if stages > 1:
        cluster = cluster.part(stages)
    return CostModel.of(program, cluster, plan.optimizer, plan.schedule)


def trace_document(
    plan: PlanDocument, events: Sequence[dict[str, Any]], merged: str
) -> dict[str, Any]:
    """A predicted step as a Chrome trace document; ``merged`` says what became one event."""
    mesh = dict(zip(plan.mesh.axis_names, plan.mesh.sizes, strict=True))
    kind = plan.cluster.get("device", {}).get("kind")
    name = f"predicted step of {plan.model.name}"
    return chrome.document(
        events,
        world_size=prod(plan.mesh.sizes),
        backend="gloo" if kind == "cpu" else "nccl",
        about={
            "predicted": True,
            "merged": merged,
            "calls": [{"step": 0, "name": name, "mesh": mesh}],
        },
    )
