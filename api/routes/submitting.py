"""From a request to a job, and from a job to its answer where that comes soon enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio.to_thread
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from autoshard.api.limits import check_request
from autoshard.api.problems import (
    Conflict,
    Fault,
    Invalid,
    JobProblem,
    NotFound,
    TooMany,
    Unavailable,
)
from autoshard.api.reading import read_json, validated
from autoshard.api.routes.views import (
    IMMUTABLE,
    job_view,
    plan_bytes,
    ready,
    send_json,
    send_ready,
)
from autoshard.api.service import Ready, Service, in_thread, owner_of, service_of
from autoshard.api.store import IdempotencyConflict, Job, QueueFull, QuotaReached
from autoshard.api.wire import ENDED, VERSION, Kind, PlanRequest, digest, dumped

QUEUE_RETRY_S = 5.0
QUOTA_RETRY_S = 30.0
_KEY = re.compile(r"[!-~]{1,255}")
_WAIT = re.compile(r'wait\s*=\s*"?(\d{1,9})"?')

B = TypeVar("B", bound=BaseModel)


async def submit(
    request: Request,
    kind: Kind,
    model: type[B],
    as_plan: Callable[[B], PlanRequest],
    wait_s: float,
) -> Response:
    """Answer with the plan where it is there in time, else with the job.

    Args:
        request: with the body.
        kind: of job.
        model: what the body must be.
        as_plan: what the worker is given.
        wait_s: how long to wait where the caller does not say.
    """
    service = service_of(request)
    owner = owner_of(request)
    assert owner is not None  # the gate lets nobody else post
    if service.draining:
        raise Unavailable("the service is about to stop; send the request again in a moment")
    key = idempotency_key(request)
    wait_s, applied = _preferred(request, wait_s, service.settings.limits.wait_s)
    data = await service.bodies.receive(request)

    def prepare() -> tuple[dict[str, object], str]:
        value = read_json(data, service.settings.limits.json_depth)
        checked = check_request(as_plan(validated(model, value)), service.settings.limits)
        document = dumped(checked)
        return document, digest(kind, document, VERSION)

    document, name = await anyio.to_thread.run_sync(prepare, limiter=service.bodies.parsing)
    job = await in_thread(_submit, service, owner, kind, document, name, key)
    service.hub.follow(job)
    job = await _wait(service, job, wait_s)
    headers = {"preference-applied": applied} if applied else {}
    if job.state == "succeeded":
        response = await send_plan_of(request, service, job)
        response.headers.update(headers)
        return response
    if job.state == "failed" and job.problem is not None:
        raise JobProblem({**job.problem, "job_id": job.id})
    if job.state == "cancelled":
        raise Conflict(f"job {job.id} was cancelled while this request waited for it")
    here = f"/v1/jobs/{job.id}"
    return send_json(job_view(job), 202, {"location": here, "retry-after": "1", **headers})


def _submit(
    service: Service,
    owner: str,
    kind: Kind,
    document: dict[str, object],
    name: str,
    key: str | None,
) -> Job:
    limits = service.settings.limits
    with refusals():
        job, _ = service.store.submit(
            owner,
            kind,
            document,
            name,
            idempotency_key=key,
            queued_limit=limits.queued_jobs,
            owner_limit=limits.jobs_per_key,
            daily_limit=limits.jobs_per_day,
        )
    return job


@contextmanager
def refusals() -> Iterator[None]:
    """What the store refuses to take, as problems."""
    try:
        yield
    except IdempotencyConflict as error:
        raise Invalid([Fault("", str(error), "Idempotency-Key")]) from error
    except QueueFull as error:
        raise TooMany(str(error), QUEUE_RETRY_S) from error
    except QuotaReached as error:
        raise TooMany(str(error), QUOTA_RETRY_S) from error


async def _wait(service: Service, job: Job, wait_s: float) -> Job:
    if job.state in ENDED or wait_s <= 0:
        return job
    loop_end = anyio.current_time() + wait_s
    with service.hub.watch(job) as watch:
        while job.state not in ENDED:
            left_s = loop_end - anyio.current_time()
            newer = await watch.beyond(job.revision, left_s, service.hub.closing)
            if newer is None:
                break
            job = newer
    return job


async def plan_ready(service: Service, plan_id: str) -> Ready | None:
    """A plan, ready to be sent."""
    if (found := service.ready_plans.get(plan_id)) is not None:
        return found
    plan = await in_thread(service.store.plan, plan_id)
    if plan is None:
        return None
    found = ready(plan.owner, plan.share, plan_bytes(plan), IMMUTABLE)
    service.ready_plans.keep(plan_id, found)
    return found


async def send_plan_of(request: Request, service: Service, job: Job) -> Response:
    """The plan that a job made."""
    found = await plan_ready(service, job.plan_id or "")
    if found is None:
        raise NotFound(f"the plan of job {job.id} is no longer kept; send the request again")
    response = send_ready(request, found)
    response.headers["cache-control"] = "no-store"  # of this address another plan may come
    response.headers["content-location"] = f"/v1/plans/{job.plan_id}"
    return response


def idempotency_key(request: Request) -> str | None:
    """The Idempotency-Key, where one is sent.

    Raises:
        Invalid: it is not of the form of one.
    """
    value = request.headers.get("idempotency-key")
    if value is None:
        return None
    if not _KEY.fullmatch(value):
        detail = "a key has 1 to 255 visible ASCII characters; a fresh UUID is a good one"
        raise Invalid([Fault("", detail, "Idempotency-Key")])
    return value


def _preferred(request: Request, wait_s: float, most_s: float) -> tuple[float, str]:
    """Seconds to wait, and what to say of it (RFC 7240: what cannot be read is passed over)."""
    for part in ",".join(request.headers.getlist("prefer")).split(","):
        text = part.strip().lower()
        if text.partition(";")[0].strip() == "respond-async":
            return 0.0, "respond-async"
        if found := _WAIT.fullmatch(text.partition(";")[0].strip()):
            seconds = min(float(found[1]), most_s)
            return seconds, f"wait={seconds:g}"
    return min(wait_s, most_s), ""
