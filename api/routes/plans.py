"""Plans: asked for, read, drawn."""

from __future__ import annotations

import gzip
import hmac
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from autoshard.api.headers import DOCUMENT_POLICY
from autoshard.api.openapi import body_of, faults, links
from autoshard.api.problems import NotFound
from autoshard.api.reports import report_of
from autoshard.api.routes.submitting import plan_ready, submit
from autoshard.api.routes.views import IMMUTABLE, send_ready, unchanged
from autoshard.api.service import Ready, in_thread, owner_of, service_of
from autoshard.api.wire import EstimateRequest, JobView, PlanRequest, PlanView

router = APIRouter(prefix="/v1", tags=["plans"])

Share = Annotated[
    str | None,
    Query(description="secret of a plan's link: reads this plan without a key", max_length=100),
]


@router.post(
    "/plans",
    operation_id="createPlan",
    summary="Find the fastest way to shard a model over a cluster",
    response_model=PlanView,
    responses={
        200: {"links": links("plan", "/id")},
        202: {
            "model": JobView,
            "description": "The job, at Location; the plan is not there yet",
            "links": links("job", "/id"),
        },
        **faults(400, 408, 409, 413, 415, 422, 429, 503),
    },
    openapi_extra=body_of(PlanRequest, waiting=True),
)
async def create_plan(request: Request) -> Response:
    """Answers 200 with the plan where it is known already or `Prefer: wait=N` suffices.

    Else 202 with the job. Equal requests of one owner are one job.
    """
    return await submit(request, "plan", PlanRequest, lambda body: body, 0.0)


@router.post(
    "/estimates",
    operation_id="createEstimate",
    summary="Price one given mesh",
    response_model=PlanView,
    responses={
        200: {"links": links("plan", "/id")},
        202: {
            "model": JobView,
            "description": "It took longer than the wait; the job",
            "links": links("job", "/id"),
        },
        **faults(400, 408, 409, 413, 415, 422, 429, 503),
    },
    openapi_extra=body_of(EstimateRequest, waiting=True),
)
async def create_estimate(request: Request) -> Response:
    """Waits for the answer, up to the service's limit; estimates go before plans.

    The plan comes back even where it does not fit: compare its memory with its limit.
    """
    longest_s = service_of(request).settings.limits.wait_s
    return await submit(request, "estimate", EstimateRequest, EstimateRequest.as_plan, longest_s)


async def _readable(request: Request, plan_id: str, share: str | None) -> Ready:
    """The plan, for its owner and for whoever has its link.

    Raises:
        NotFound: no such plan, or neither of these; the answer does not say which.
    """
    found = await plan_ready(service_of(request), plan_id)
    if found is not None:
        if found.owner == owner_of(request):
            return found
        if share and hmac.compare_digest(share.encode(), found.share.encode()):
            return found
    raise NotFound(f"there is no plan {plan_id[:100]!r}, or it is not yours")


@router.get(
    "/plans/{plan_id}",
    operation_id="readPlan",
    summary="A plan",
    response_model=PlanView,
    responses={304: {"description": "The caller has it"}, **faults(404, 422, 429, 503)},
)
async def read_plan(request: Request, plan_id: str, share: Share = None) -> Response:
    """Never changes; `share` reads it without a key."""
    found = await _readable(request, plan_id, share)
    return send_ready(request, found)


@router.get(
    "/plans/{plan_id}/report",
    operation_id="readReport",
    summary="A plan as one HTML page",
    response_class=Response,
    responses={
        200: {"content": {"text/html": {"schema": {"type": "string"}}}},
        304: {"description": "The caller has it"},
        **faults(404, 422, 429, 503),
    },
)
async def read_report(request: Request, plan_id: str, share: Share = None) -> Response:
    """Self-contained: it can be saved and opened from disk."""
    service = service_of(request)
    found = await _readable(request, plan_id, share)
    etag = found.etag[:-1] + '-report"'
    headers = {
        "etag": etag,
        "cache-control": IMMUTABLE,
        "content-security-policy": DOCUMENT_POLICY,
    }
    if unchanged(request, etag):
        return Response(status_code=304, headers=headers)
    page = await in_thread(report_of, service.store, plan_id)
    return Response(page, media_type="text/html", headers=headers)


@router.get(
    "/plans/{plan_id}/trace",
    operation_id="readTrace",
    summary="The predicted timeline of one step",
    response_class=Response,
    responses={
        200: {"content": {"application/json": {"schema": {"type": "object"}}}},
        304: {"description": "The caller has it"},
        **faults(404, 422, 429, 503),
    },
)
async def read_trace(request: Request, plan_id: str, share: Share = None) -> Response:
    """A Chrome trace: open it in Perfetto or chrome://tracing."""
    found = await _readable(request, plan_id, share)
    etag = found.etag[:-1] + '-trace"'
    headers = {"etag": etag, "cache-control": IMMUTABLE, "vary": "accept-encoding"}
    if unchanged(request, etag):
        return Response(status_code=304, headers=headers)
    packed = await in_thread(service_of(request).store.trace, plan_id)
    if packed is None:
        raise NotFound(f"the timeline of plan {plan_id[:100]!r} is no longer kept")
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(packed, media_type="application/json", headers=headers)
    return Response(
        await in_thread(gzip.decompress, packed), media_type="application/json", headers=headers
    )
