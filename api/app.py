"""The application: routes, the gate before them, and what starts and stops with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio.to_thread
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from autoshard.api import openapi, problems
from autoshard.api.gate import Gate
from autoshard.api.memory import FromMemory
from autoshard.api.problems import BadRequest, Fault, Invalid, MethodNotAllowed, NotFound, Problem
from autoshard.api.routes import health, jobs, page, plans, presets, sweeps
from autoshard.api.service import Service, context_of
from autoshard.api.settings import Settings
from autoshard.api.store import Store
from autoshard.api.wire import VERSION
from autoshard.api.worker.supervisor import Supervisor

ROUTERS = (
    plans.router,
    jobs.router,
    sweeps.router,
    presets.router,
    health.router,
    page.router,
)


def create_app(settings: Settings, store: Store | None = None) -> FastAPI:
    """The service as an ASGI application.

    Args:
        settings: limits and defaults.
        store: where jobs and plans are; None: it opens the one that the settings name. Workers
            are started beside it, as many as the settings say.

    Raises:
        StoreError: the database cannot be used.
    """
    opened = Store.open(settings.database) if store is None else store
    service = Service(settings, opened)
    supervisor = Supervisor(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        supervisor.start()
        watching = asyncio.create_task(service.hub.run())
        try:
            yield
        finally:
            service.drain()
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await anyio.to_thread.run_sync(supervisor.stop, settings.drain_s)
            if store is None:
                opened.close()

    app = FastAPI(
        title="autoshard planning service",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False},
    )
    app.state.service, app.state.supervisor = service, supervisor
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(FromMemory, service=service)
    app.add_middleware(Gate, service=service)  # the last one is the outermost
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_exception_handler(RequestValidationError, _invalid)
    described = openapi.describe(app, settings)
    app.openapi = lambda: described  # type: ignore[method-assign]  # FastAPI's documented way
    return app


async def _unrouted(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    problem: Problem
    if error.status_code == 405:
        allowed = _allowed(request)
        problem = MethodNotAllowed(
            f"{request.method[:20]} is not allowed here; allowed: {', '.join(allowed)}",
            headers={"allow": ", ".join(allowed)},
        )
    elif error.status_code == 404:
        problem = NotFound(f"there is no address {request.url.path[:200]!r}; /docs lists them all")
    else:
        problem = BadRequest(str(error.detail))
    return problems.answer(problem, context_of(request).request_id)


def _allowed(request: Request) -> list[str]:
    """Methods of every route with this path: Starlette names those of the first alone."""
    found: set[str] = set()
    for router in ROUTERS:
        for route in router.routes:
            match, _ = route.matches(request.scope)
            if match is not Match.NONE:
                found |= getattr(route, "methods", None) or set()
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


async def _invalid(request: Request, error: Exception) -> Response:
    """Parameters that FastAPI found wrong."""
    assert isinstance(error, RequestValidationError)
    faults = [
        Fault(
            "",
            str(e["msg"]),
            str(e["loc"][-1]).replace("_", "-") if e["loc"][0] == "header" else str(e["loc"][-1]),
        )
        for e in error.errors()
    ]
    return problems.answer(Invalid(faults), context_of(request).request_id)
