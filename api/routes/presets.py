"""The presets, with their numbers and sources, and what runs here."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from autoshard.api import presets
from autoshard.api.openapi import faults
from autoshard.api.problems import NotFound
from autoshard.api.routes.views import ready, send_json, send_ready
from autoshard.api.service import Ready, service_of
from autoshard.api.wire import (
    VERSION,
    ClusterList,
    ClusterPreset,
    ModelList,
    ModelPreset,
    Version,
)
from autoshard.errors import UnknownNameError
from autoshard.plan import PLAN_VERSION

router = APIRouter(prefix="/v1", tags=["presets"])

CACHE = "private, max-age=300"
SAME: dict[int | str, dict[str, Any]] = {304: {"description": "The caller has it"}}


@cache
def _models() -> Ready:
    listed = ModelList(models=list(presets.model_presets().values()))
    return ready("", "", listed.model_dump_json().encode(), CACHE)


@cache
def _clusters() -> Ready:
    listed = ClusterList(clusters=list(presets.cluster_presets().values()))
    return ready("", "", listed.model_dump_json().encode(), CACHE)


@router.get(
    "/models",
    operation_id="listModels",
    summary="Model presets",
    response_model=ModelList,
    responses={**SAME, **faults(429, 503)},
)
async def list_models(request: Request) -> Response:
    """Each with its config, number of parameters and source."""
    return send_ready(request, _models())


@router.get(
    "/models/{name}",
    operation_id="readModel",
    summary="A model preset",
    response_model=ModelPreset,
    responses={**SAME, **faults(404, 422, 429, 503)},
)
async def read_model(request: Request, name: str) -> Response:
    """Its config, number of parameters and source."""
    try:
        found = presets.model_preset(name[:100])
    except UnknownNameError as error:
        raise NotFound(str(error)) from error
    return send_ready(request, ready("", "", found.model_dump_json().encode(), CACHE))


@router.get(
    "/clusters",
    operation_id="listClusters",
    summary="Cluster presets",
    response_model=ClusterList,
    responses={**SAME, **faults(429, 503)},
)
async def list_clusters(request: Request) -> Response:
    """Each with its figures and where each of them comes from."""
    return send_ready(request, _clusters())


@router.get(
    "/clusters/{name}",
    operation_id="readCluster",
    summary="A cluster preset",
    response_model=ClusterPreset,
    responses={**SAME, **faults(404, 422, 429, 503)},
)
async def read_cluster(request: Request, name: str) -> Response:
    """Its figures and where each of them comes from."""
    try:
        found = presets.cluster_preset(name[:100])
    except UnknownNameError as error:
        raise NotFound(str(error)) from error
    return send_ready(request, ready("", "", found.model_dump_json().encode(), CACHE))


@router.get(
    "/version",
    operation_id="readVersion",
    summary="What runs here",
    response_model=Version,
    responses=faults(429, 503),
)
async def read_version(request: Request) -> Response:
    """The program's version and that of the plans it makes."""
    keys = service_of(request).settings.keys_required
    found = Version(version=VERSION, plan_schema_version=PLAN_VERSION, keys_required=keys)
    return send_json(found.model_dump())
