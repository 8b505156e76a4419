"""Jobs: listed, read, watched, cancelled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from autoshard.api.openapi import EVENT, faults, links
from autoshard.api.problems import Conflict, NotFound, TooMany
from autoshard.api.routes.views import (
    ASK_AGAIN,
    NO_STORE,
    job_bytes,
    job_view,
    ready,
    send_json,
    send_ready,
)
from autoshard.api.service import Service, context_of, in_thread, owner_of, service_of
from autoshard.api.store import Event, Job
from autoshard.api.wire import ENDED, JobList, JobView

router = APIRouter(prefix="/v1", tags=["jobs"])

HEARTBEAT_S = 15.0
"""A stream that has nothing to say says so, so that proxies keep it and a dead one is noticed."""

EVENTS_AT_A_TIME = 200


async def _own(request: Request, job_id: str) -> Job:
    """The job.

    Raises:
        NotFound: no such job, or another owner's; the answer does not say which.
    """
    job = await in_thread(service_of(request).store.job, job_id)
    if job is None or job.owner != owner_of(request):
        raise NotFound(f"there is no job {job_id[:100]!r}, or it is not yours")
    return job


@router.get(
    "/jobs",
    operation_id="listJobs",
    summary="Your jobs, newest first",
    response_model=JobList,
    responses={200: {"links": links("job", "/jobs/0/id")}, **faults(422, 429, 503)},
)
async def list_jobs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    cursor: Annotated[str | None, Query(max_length=80, description="of the list before")] = None,
) -> Response:
    """A `Link` header and `next_cursor` lead to those before."""
    store, owner = service_of(request).store, owner_of(request) or ""

    def read() -> list[Job]:
        return list(store.jobs(owner, limit=limit + 1, before=cursor))

    found = await in_thread(read)
    shown = found[:limit]
    following = shown[-1].id if len(found) > limit else None
    headers = {}
    if following:
        headers["link"] = f'</v1/jobs?limit={limit}&cursor={following}>; rel="next"'
    body = {"jobs": [job_view(job) for job in shown], "next_cursor": following}
    return send_json(body, headers=headers)


@router.get(
    "/jobs/{job_id}",
    operation_id="readJob",
    summary="A job",
    response_model=JobView,
    responses={
        200: {"links": links("plan", "/plan_id")},
        304: {"description": "The caller has it"},
        **faults(404, 422, 429, 503),
    },
)
async def read_job(request: Request, job_id: str) -> Response:
    """Once it has ended it never changes."""
    service = service_of(request)
    if (found := service.ready_jobs.get(job_id)) is None:
        job = await _own(request, job_id)
        found = ready(job.owner, "", job_bytes(job), ASK_AGAIN)
        if job.state in ENDED:
            service.ready_jobs.keep(job_id, found)
    elif found.owner != owner_of(request):
        raise NotFound(f"there is no job {job_id[:100]!r}, or it is not yours")
    return send_ready(request, found)


@router.delete(
    "/jobs/{job_id}",
    operation_id="cancelJob",
    summary="Cancel a job",
    response_model=JobView,
    responses={
        202: {"model": JobView, "description": "It runs, and was asked to stop"},
        **faults(404, 409, 422, 429, 503),
    },
)
async def cancel_job(request: Request, job_id: str) -> Response:
    """One that waits ends at once, one that runs in a moment; both stay readable."""
    await _own(request, job_id)
    job = await in_thread(service_of(request).store.cancel, job_id)
    if job is None:
        raise NotFound(f"there is no job {job_id[:100]!r}, or it is not yours")
    if job.state in ("succeeded", "failed"):
        raise Conflict(f"job {job.id} has {job.state} already")
    return send_json(job_view(job), 200 if job.state == "cancelled" else 202)


@router.get(
    "/jobs/{job_id}/events",
    operation_id="watchJob",
    summary="What happens to a job, as it happens",
    response_class=Response,
    responses={
        200: {"content": {"text/event-stream": {"schema": EVENT}}},
        204: {"description": "It has ended, and the caller has heard of that"},
        **faults(404, 422, 429, 503),
    },
)
async def watch_job(
    request: Request,
    job_id: str,
    last_event_id: Annotated[
        int | None,
        Header(ge=0, le=2**31 - 1, description="`id` of the last event heard; those after it come"),
    ] = None,
) -> Response:
    """Server-sent events, `id` counting 1, 2, ...; ends with succeeded, failed or cancelled."""
    service = service_of(request)
    job = await _own(request, job_id)
    after = min(last_event_id or 0, job.revision)
    if job.state in ENDED and after == job.revision:
        return Response(status_code=204, headers={"cache-control": NO_STORE})
    if service.streams >= service.settings.limits.streams:
        raise TooMany("too many streams are open; read the job instead, or come back", 5.0)
    if context_of(request).head:
        return Response(media_type="text/event-stream", headers={"cache-control": NO_STORE})
    return StreamingResponse(
        _stream(service, job, after),
        media_type="text/event-stream",
        # The last is for nginx, which otherwise gathers answers before it passes them on.
        headers={"cache-control": NO_STORE, "x-accel-buffering": "no"},
    )


async def _stream(service: Service, job: Job, after: int) -> AsyncIterator[bytes]:
    service.streams += 1
    try:
        yield b"retry: 1000\n\n"
        with service.hub.watch(job) as watch:
            while True:
                while events := await in_thread(_events, service, job.id, after):
                    for event in events:
                        after = event.seq
                        yield _frame(event)
                        if event.kind in ENDED:
                            return
                    if len(events) < EVENTS_AT_A_TIME:
                        break
                if service.hub.closing.is_set():
                    return
                if watch.job.state in ENDED and watch.job.revision <= after:
                    return
                newer = await watch.beyond(after, HEARTBEAT_S, service.hub.closing)
                if newer is None and not service.hub.closing.is_set():
                    yield b": still here\n\n"
    finally:
        service.streams -= 1


def _events(service: Service, job_id: str, after: int) -> list[Event]:
    return list(service.store.events(job_id, after=after, limit=EVENTS_AT_A_TIME))


def _frame(event: Event) -> bytes:
    data = json.dumps({**event.data, "at_s": event.at_s})
    return f"id: {event.seq}\nevent: {event.kind}\ndata: {data}\n\n".encode()
