"""Whether the service lives, whether it can be used, and its figures."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from autoshard.api.openapi import faults
from autoshard.api.problems import Unavailable
from autoshard.api.routes.views import send_json
from autoshard.api.service import in_thread, service_of
from autoshard.api.wire import Health

router = APIRouter(tags=["operation"])


@router.get("/healthz", operation_id="isAlive", summary="Alive", response_model=Health)
async def healthz() -> Response:
    """The process answers; nothing else is looked at."""
    return send_json(Health(status="ok").model_dump())


@router.get(
    "/readyz",
    operation_id="isReady",
    summary="Ready",
    response_model=Health,
    responses=faults(503),
)
async def readyz(request: Request) -> Response:
    """The database answers and a worker lives; 503 while the service stops."""
    service = service_of(request)
    if service.draining:
        raise Unavailable("the service is about to stop")
    await in_thread(service.store.ping)
    workers = await in_thread(service.store.workers_alive)
    if not workers:
        raise Unavailable("no worker lives; one that was just started takes some seconds")
    return send_json(Health(status="ok", workers=workers).model_dump())


@router.get(
    "/metrics",
    operation_id="readMetrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **faults(429, 503),
    },
)
async def metrics(request: Request) -> Response:
    """Requests of this server; jobs and workers of the whole database."""
    text = await in_thread(service_of(request).metrics.text)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
