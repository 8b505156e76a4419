"""Sweeps: asked for, listed, read as rows and as a report, cancelled."""

from __future__ import annotations

import json
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from autoshard.api.headers import DOCUMENT_POLICY
from autoshard.api.openapi import body_of, faults, links
from autoshard.api.problems import Conflict, NotFound, Unavailable
from autoshard.api.reading import read_json
from autoshard.api.routes.submitting import idempotency_key, refusals
from autoshard.api.routes.views import NO_STORE, send_json
from autoshard.api.service import Service, in_thread, owner_of, service_of
from autoshard.api.store import Job, Sweep
from autoshard.api.sweeps.answering import head_view, report_of, rows_of, sweep_view, unended
from autoshard.api.sweeps.asking import Reading, read_body
from autoshard.api.sweeps.wire import SweepList, SweepRequest, SweepView, row_schema
from autoshard.sweeps.export import csv_text

router = APIRouter(prefix="/v1", tags=["sweeps"])

LINKS = links("sweep", "/id")


@router.post(
    "/sweeps",
    operation_id="createSweep",
    summary="Plan or price many points",
    response_model=SweepView,
    responses={
        200: {"description": "All of its points are known already", "links": LINKS},
        202: {"model": SweepView, "description": "Its points are queued", "links": LINKS},
        **faults(400, 408, 413, 415, 422, 429, 503),
    },
    openapi_extra=body_of(SweepRequest, waiting=False),
)
async def create_sweep(request: Request) -> Response:
    """Each point is a job; one that is equal to a job of yours is that job, and is free.

    Taken as a whole or refused as a whole: 429 says how many new points there is room for.
    """
    service = service_of(request)
    owner = owner_of(request)
    assert owner is not None  # the gate lets nobody else post
    if service.draining:
        raise Unavailable("the service is about to stop; send the request again in a moment")
    key = idempotency_key(request)
    data = await service.bodies.receive(request)
    limits = service.settings.limits

    def prepare() -> Reading:
        return read_body(read_json(data, limits.json_depth), limits)

    reading = await anyio.to_thread.run_sync(prepare, limiter=service.bodies.parsing)
    sweep, new = await in_thread(_submit, service, owner, reading, key)
    for job in new:
        service.hub.follow(job)
    view = await in_thread(_view, service, sweep)
    headers = {"location": f"/v1/sweeps/{sweep.id}"}
    if not unended(sweep):
        return send_json(view, headers=headers)
    return send_json(view, 202, {**headers, "retry-after": "1"})


def _submit(
    service: Service, owner: str, reading: Reading, key: str | None
) -> tuple[Sweep, list[Job]]:
    limits = service.settings.limits
    with refusals():
        return service.store.submit_sweep(
            owner,
            reading.name,
            reading.description,
            reading.notes,
            reading.points,
            idempotency_key=key,
            queued_limit=limits.queued_jobs,
            owner_limit=limits.jobs_per_key,
            daily_limit=limits.jobs_per_day,
        )


def _view(service: Service, sweep: Sweep) -> dict[str, Any]:
    return sweep_view(sweep, service.store.sweep_points(sweep.id))


async def _own(request: Request, sweep_id: str) -> Sweep:
    """The sweep.

    Raises:
        NotFound: no such sweep, or another owner's; the answer does not say which.
    """
    sweep = await in_thread(service_of(request).store.sweep, sweep_id)
    if sweep is None or sweep.owner != owner_of(request):
        raise NotFound(f"there is no sweep {sweep_id[:100]!r}, or it is not yours")
    return sweep


@router.get(
    "/sweeps",
    operation_id="listSweeps",
    summary="Your sweeps, newest first",
    response_model=SweepList,
    responses={200: {"links": links("sweep", "/sweeps/0/id")}, **faults(422, 429, 503)},
)
async def list_sweeps(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    cursor: Annotated[str | None, Query(max_length=80, description="of the list before")] = None,
) -> Response:
    """A `Link` header and `next_cursor` lead to those before."""
    store, owner = service_of(request).store, owner_of(request) or ""

    def read() -> list[Sweep]:
        return list(store.sweeps(owner, limit=limit + 1, before=cursor))

    found = await in_thread(read)
    shown = found[:limit]
    following = shown[-1].id if len(found) > limit else None
    headers = {}
    if following:
        headers["link"] = f'</v1/sweeps?limit={limit}&cursor={following}>; rel="next"'
    body = {"sweeps": [head_view(sweep) for sweep in shown], "next_cursor": following}
    return send_json(body, headers=headers)


@router.get(
    "/sweeps/{sweep_id}",
    operation_id="readSweep",
    summary="A sweep, its points and their jobs",
    response_model=SweepView,
    responses={
        200: {"links": {**links("job", "/points/0/job_id"), **links("plan", "/points/0/plan_id")}},
        **faults(404, 422, 429, 503),
    },
)
async def read_sweep(request: Request, sweep_id: str) -> Response:
    """It is as far as its jobs are; it has ended when all of them have."""
    sweep = await _own(request, sweep_id)
    return send_json(await in_thread(_view, service_of(request), sweep))


@router.get(
    "/sweeps/{sweep_id}/rows",
    operation_id="readSweepRows",
    summary="A sweep's rows",
    response_class=Response,
    responses={
        200: {
            "content": {
                "application/json": {"schema": {"type": "array", "items": row_schema()}},
                "text/csv": {"schema": {"type": "string"}},
            }
        },
        **faults(404, 422, 429, 503),
    },
)
async def read_rows(request: Request, sweep_id: str) -> Response:
    """Finished or not, as `autoshard sweep` writes them; as CSV with `Accept: text/csv`."""
    sweep = await _own(request, sweep_id)
    csv = _prefers_csv(request.headers.get("accept", ""))
    service = service_of(request)

    def content() -> str:
        rows = rows_of(service.store, sweep.id)
        return csv_text(rows) if csv else json.dumps([row.to_json() for row in rows])

    headers = {"cache-control": NO_STORE, "vary": "accept"}
    # Starlette would name a charset for text/csv; the description has none.
    headers["content-type"] = "text/csv" if csv else "application/json"
    return Response((await in_thread(content)).encode(), headers=headers)


def _prefers_csv(accept: str) -> bool:
    """Whether CSV is named with more weight than JSON (RFC 9110)."""
    weights = {"text/csv": 0.0, "application/json": 0.0}
    for part in accept.split(","):
        kind, *parameters = (p.strip().lower() for p in part.split(";"))
        weight = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        if kind in weights:
            try:
                weights[kind] = float(weight)
            except ValueError:
                continue
    return weights["text/csv"] > weights["application/json"]


@router.get(
    "/sweeps/{sweep_id}/report",
    operation_id="readSweepReport",
    summary="A sweep as one HTML page",
    response_class=Response,
    responses={
        200: {"content": {"text/html": {"schema": {"type": "string"}}}},
        **faults(404, 422, 429, 503),
    },
)
async def read_sweep_report(request: Request, sweep_id: str) -> Response:
    """Self-contained: it can be saved and opened from disk. Of what is there by now."""
    sweep = await _own(request, sweep_id)
    page = await in_thread(report_of, service_of(request).store, sweep)
    headers = {"cache-control": NO_STORE, "content-security-policy": DOCUMENT_POLICY}
    return Response(page, media_type="text/html", headers=headers)


@router.delete(
    "/sweeps/{sweep_id}",
    operation_id="cancelSweep",
    summary="Cancel a sweep",
    response_model=SweepView,
    responses={
        202: {"model": SweepView, "description": "Some of its jobs run, and were asked to stop"},
        **faults(404, 409, 422, 429, 503),
    },
)
async def cancel_sweep(request: Request, sweep_id: str) -> Response:
    """Cancels the jobs that have not ended, also where another sweep has them as points."""
    sweep = await _own(request, sweep_id)
    service = service_of(request)
    if not unended(sweep) and not sweep.counts.get("cancelled"):
        raise Conflict(f"sweep {sweep.id} has ended already")
    await in_thread(service.store.cancel_sweep, sweep.id)
    sweep = await _own(request, sweep_id)
    view = await in_thread(_view, service, sweep)
    return send_json(view, 202 if unended(sweep) else 200)
