"""Jobs and plans as they are sent."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from autoshard.api.service import Ready
from autoshard.api.store import Job, StoredPlan
from autoshard.api.wire import JobLinks, JobView, PlanLinks, Problem, Progress, Subject

IMMUTABLE = "private, max-age=31536000, immutable"
ASK_AGAIN = "private, no-cache"
NO_STORE = "no-store"


def subject(request: dict[str, Any]) -> Subject:
    """What a job is about, from its request."""
    model, cluster, work = request["model"], request["cluster"], request.get("workload", {})
    config, graph = model.get("config", {}), model.get("graph", {})
    name = model.get("preset") or config.get("model_type") or graph.get("name") or "model"
    devices = cluster.get("devices")
    return Subject(
        model=str(name)[:200],
        cluster=str(cluster.get("preset") or cluster.get("name") or "cluster")[:200],
        devices=devices if type(devices) is int else None,
        global_batch=work.get("global_batch"),
        seq_len=work.get("seq_len"),
    )


def job_view(job: Job) -> dict[str, Any]:
    """A job as it is sent."""
    here = f"/v1/jobs/{job.id}"
    plan = f"/v1/plans/{job.plan_id}" if job.plan_id else None
    return JobView(
        id=job.id,
        kind=job.kind,
        state=job.state,
        cancelling=job.cancelling,
        subject=subject(job.request),
        created_s=job.created_s,
        started_s=job.started_s,
        finished_s=job.finished_s,
        attempt=job.attempt,
        progress=None if job.progress is None else Progress.model_validate(job.progress),
        plan_id=job.plan_id,
        problem=None if job.problem is None else Problem.model_validate(job.problem),
        links=JobLinks(self=here, events=here + "/events", plan=plan),
    ).model_dump(mode="json")


def job_bytes(job: Job) -> bytes:
    """The same as JSON."""
    return json.dumps(job_view(job)).encode()


def plan_bytes(plan: StoredPlan) -> bytes:
    """A plan as it is sent; its document goes out as the worker wrote it."""
    here = f"/v1/plans/{plan.id}"
    links = PlanLinks(
        self=here,
        report=here + "/report",
        trace=here + "/trace",
        page=f"/?plan={plan.id}&share={plan.share}",
        share=f"{here}?share={plan.share}",
    )
    head = {
        "id": plan.id,
        "created_s": plan.created_s,
        "summary": plan.summary,
        "links": links.model_dump(),
    }
    return json.dumps(head).encode()[:-1] + b', "plan": ' + plan.document + b"}"


def ready(owner: str, share: str, body: bytes, cache_control: str) -> Ready:
    """An answer that never changes, with its tag and headers."""
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"etag": etag, "cache-control": cache_control}
    whole = Response(body, media_type="application/json", headers=headers)
    return Ready(owner, share, body, etag, whole.raw_headers)


def unchanged(request: Request, etag: str) -> bool:
    """Whether the caller has this already."""
    asked = request.headers.get("if-none-match")
    if asked is None:
        return False
    return asked.strip() == "*" or etag in (t.strip().removeprefix("W/") for t in asked.split(","))


def send_ready(request: Request, found: Ready) -> Response:
    """The answer, or 304 where the caller has it."""
    if unchanged(request, found.etag):
        response = Response(status_code=304)
        kept = (b"etag", b"cache-control")
        response.raw_headers = [(n, v) for n, v in found.headers if n in kept]
        return response
    response = Response(found.body)
    response.raw_headers = list(found.headers)
    return response


def send_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON, not to be kept."""
    return Response(
        json.dumps(value).encode(),
        status_code=status,
        media_type="application/json",
        headers={"cache-control": NO_STORE, **(headers or {})},
    )
