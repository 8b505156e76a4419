"""Rows and reports of sweeps, from what the store has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from autoshard.api.problems import PREFIX
from autoshard.api.store import Store, Sweep, SweepPoint
from autoshard.api.sweeps.wire import Counts, PointView, SweepHead, SweepLinks, SweepView
from autoshard.plan import PlanDocument
from autoshard.report import sweep_page
from autoshard.sweeps import Row
from autoshard.sweeps.figures import figures

KEPT = 4096
"""Plans whose figures are kept, of some kilobytes each: reading one takes milliseconds."""

ERRORS = {
    "infeasible": "InfeasibleError",
    "invalid-request": "RequestError",
    "validation-failed": "ValidationError",
}
"""What ``autoshard sweep`` calls these problems."""


def head_view(sweep: Sweep) -> dict[str, Any]:
    """A sweep as lists have it."""
    return _head(sweep).model_dump(mode="json")


def sweep_view(sweep: Sweep, points: Sequence[SweepPoint]) -> dict[str, Any]:
    """A sweep as it is sent."""
    return SweepView(
        **dict(_head(sweep)),
        notes=list(sweep.notes),
        points=[
            PointView(
                asked=p.asked,
                job_id=p.job_id,
                kind=p.kind,
                state=p.state,
                plan_id=p.plan_id,
                summary=p.summary,
                detail=None if p.problem is None else str(p.problem.get("detail")),
            )
            for p in points
        ],
    ).model_dump(mode="json")


def _head(sweep: Sweep) -> SweepHead:
    here = f"/v1/sweeps/{sweep.id}"
    return SweepHead(
        id=sweep.id,
        name=sweep.name,
        description=sweep.description,
        created_s=sweep.created_s,
        state="running" if unended(sweep) else "ended",
        counts=Counts(**sweep.counts),
        links=SweepLinks(self=here, rows=here + "/rows", report=here + "/report"),
    )


def unended(sweep: Sweep) -> int:
    """Points whose jobs have not come to their end."""
    return sweep.counts.get("queued", 0) + sweep.counts.get("running", 0)


def rows_of(store: Store, sweep_id: str, *, plans: bool = False) -> list[Row]:
    """The rows of a sweep, as ``autoshard sweep`` has them; reads the plans, so from a thread.

    Args:
        store: where they are.
        sweep_id: of a sweep.
        plans: whether to give along what a report says of plans: cluster and assumptions.
    """
    return [_row(store, point, plans=plans) for point in store.sweep_points(sweep_id)]


def report_of(store: Store, sweep: Sweep) -> bytes:
    """One HTML file; takes a moment, so call it from a thread."""
    rows = [row.to_json(plan=True) for row in rows_of(store, sweep.id, plans=True)]
    return sweep_page(rows, {"name": sweep.name, "notes": list(sweep.notes)}).encode()


def _row(store: Store, point: SweepPoint, *, plans: bool) -> Row:
    row = Row.from_json(point.asked)
    if point.started_s is not None and point.finished_s is not None:
        row = replace(row, seconds=max(0.0, point.finished_s - point.started_s))
    if point.state == "queued":
        return row
    if point.state == "running":
        return replace(row, status="running")
    if point.state == "cancelled":
        return replace(row, status="failed", error="Cancelled: its job was cancelled")
    if point.state == "failed":
        return replace(row, status="failed", error=_error(point.problem or {}))
    known, about = _figures(store, point.plan_id or "")
    return replace(row, status="done", **known, plan=about if plans else None)


def _error(problem: dict[str, Any]) -> str:
    kind = str(problem.get("type", "")).removeprefix(PREFIX)
    name = ERRORS.get(kind) or "".join(part.title() for part in kind.split("-")) or "Error"
    return f"{name}: {problem.get('detail', '')}"


@lru_cache(maxsize=KEPT)
def _figures(store: Store, plan_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns that a plan decides, and what a report says of it; plans never change."""
    plan = store.plan(plan_id)
    assert plan is not None, (
        f"job without its plan {plan_id}"
    )  # both are written in one transaction
    document = PlanDocument.from_json(plan.document)
    about = {"cluster": document.cluster, "assumptions": list(document.assumptions)}
    return figures(document), about
