"""The API's own description: what FastAPI finds, with bodies and problems as they really are."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from autoshard.api.presets import cluster_presets, model_presets
from autoshard.api.problems import MEDIA_TYPE, PREFIX
from autoshard.api.settings import Limits, Settings
from autoshard.api.sweeps.wire import SweepRequest
from autoshard.api.wire import (
    ENDED,
    VERSION,
    ClusterDocument,
    EstimateRequest,
    PlanRequest,
    Problem,
)
from autoshard.cluster import ALIASES
from autoshard.graph import SCHEMA_VERSION
from autoshard.planner.request import ALL_AXES, SHORT_AXES

REF = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (
    PlanRequest,
    EstimateRequest,
    SweepRequest,
    ClusterDocument,
)

EVENT = {
    "description": "one event; `data` is JSON, of 'progress' as a job's `progress`",
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"enum": ["queued", "running", "progress", "cancelling", *ENDED]},
        "data": {"type": "string", "contentMediaType": "application/json"},
        "retry": {"type": "integer"},
    },
}
"""One server-sent event."""

REASONS = {
    400: "The body is not JSON, or not within the limits of what is read",
    401: "A valid API key is needed",
    403: "Asked by a web page of another origin, or under a foreign host name",
    404: "Nothing there, or not yours",
    408: "The body did not arrive in time",
    409: "The job is in another state",
    413: "The body is too large",
    415: "The body is not declared to be JSON",
    422: "The request is wrong; `errors` says where, by JSON pointer. Or nothing fits",
    429: "Too often, too many jobs, or too many wait; see Retry-After",
    500: "A mistake of the service, whose log knows the id in `instance`",
    503: "Not just now; see Retry-After",
    504: "The job took longer than a job may",
}

EXAMPLE: dict[str, Any] = {
    "model": {"preset": "llama-3-8b"},
    "cluster": {"preset": "h100", "devices": 8},
    "workload": {"global_batch": 64, "seq_len": 8192, "dtype": "bf16", "optimizer": "adamw"},
}
EXAMPLES = {
    "PlanRequest": EXAMPLE,
    "EstimateRequest": {**EXAMPLE, "search": {"mesh": {"data": 4, "model": 2}}},
    "SweepRequest": {
        "name": "sizes",
        "parameters": {
            "model": ["gpt2", "bert-base"],
            "cluster": ["a100-80", "h100"],
            "devices": [1, 2, 4, 8],
            "global_batch": 32,
        },
        "exclude": [{"model": "bert-base", "devices": 1}],
    },
}


def links(kind: str, at: str) -> dict[str, Any]:
    """Where an answer leads: operations that take the id in it.

    Args:
        kind: ``job``, ``plan`` or ``sweep``.
        at: JSON pointer of the id in the answer.
    """
    operations = {
        "job": ("readJob", "watchJob", "cancelJob"),
        "plan": ("readPlan", "readReport", "readTrace"),
        "sweep": ("readSweep", "readSweepRows", "readSweepReport", "cancelSweep"),
    }
    parameters = {f"{kind}_id": f"$response.body#{at}"}
    return {name: {"operationId": name, "parameters": parameters} for name in operations[kind]}


def faults(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses of an operation that are problems; 401, 403 and 500 can always come."""
    return {
        status: {"model": Problem, "description": REASONS[status]}
        for status in sorted({401, 403, 500, *statuses})
    }


def body_of(model: type[BaseModel], *, waiting: bool) -> dict[str, Any]:
    """The description of an operation whose body is read by ``reading``.

    Args:
        model: of the body.
        waiting: whether the caller may say how long to wait.
    """
    schema = {"$ref": REF.format(model=model.__name__)}
    media = {"schema": schema, "example": EXAMPLES[model.__name__]}
    headers = [
        {
            "name": "Prefer",
            "in": "header",
            "required": False,
            "description": "`wait=N`: wait up to N seconds for the plan (RFC 7240); "
            "`respond-async`: do not wait",
            "schema": {"type": "string", "examples": ["wait=30"]},
        },
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "description": "a name of this request: sent again, it is answered with the same job",
            "schema": {
                "type": "string",
                "pattern": "^[!-~]{1,255}$",
                "examples": ["8e03978e-40d5-43dd-bc93-6894a57f9324"],
            },
        },
    ]
    out: dict[str, Any] = {
        "requestBody": {"required": True, "content": {"application/json": media}}
    }
    return {**out, "parameters": headers if waiting else headers[1:]}


def describe(app: FastAPI, settings: Settings) -> dict[str, Any]:
    """The OpenAPI document."""
    document = get_openapi(
        title="autoshard planning service",
        version=VERSION,
        description="Finds how to shard a model over a cluster. Sizes are bytes, times seconds.",
        routes=app.routes,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    _, bodies = models_json_schema([(m, "validation") for m in BODIES], ref_template=REF)
    for name, schema in bodies["$defs"].items():
        schemas.setdefault(name, schema)
    _narrow(schemas, settings.limits)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    keys_required = settings.keys_required
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _problems(operation)
            if keys_required and (path.startswith("/v1/") or path == "/metrics"):
                operation["security"] = [{"key": []}]
    if keys_required:
        document["components"]["securitySchemes"] = {
            "key": {
                "type": "http",
                "scheme": "bearer",
                "description": "`ask_...`, made by `autoshard keys create`; a plan's link, with "
                "`share=`, needs none",
            }
        }
    return document


def _narrow(schemas: dict[str, Any], limits: Limits) -> None:
    """What is known only once the presets and the limits are read."""
    schemas["PresetModel"]["properties"]["preset"]["enum"] = sorted(model_presets())
    names = sorted({*cluster_presets(), *ALIASES})
    schemas["PresetCluster"]["properties"]["preset"]["enum"] = names
    config = schemas["ConfigModel"]["properties"]["config"]
    config["required"] = ["model_type"]
    config["properties"] = {"model_type": {"type": "string", "examples": ["llama"]}}
    most = {
        "PresetCluster": {"devices": limits.devices},
        "ClusterDocument": {"devices": limits.devices, "devices_per_node": limits.devices},
        "Workload": {"global_batch": limits.global_batch, "seq_len": limits.seq_len},
        "Search": {"trials": limits.trials},
    }
    for name, fields in most.items():
        for field, value in fields.items():
            schema = schemas[name]["properties"][field]
            for part in (schema, *schema.get("anyOf", ())):
                if part.get("type") == "integer":
                    part["maximum"] = value
    for name in ("Search", "Priced"):
        schema = schemas[name]["properties"]["mesh"]
        for part in (schema, *schema.get("anyOf", ())):
            if part.get("type") == "object":
                part["propertyNames"] = {"enum": [*ALL_AXES, *SHORT_AXES]}
                part["additionalProperties"] |= {"minimum": 1, "maximum": limits.devices}
    graph = schemas["GraphModel"]["properties"]["graph"]
    graph["required"] = ["kind", "schema_version", "name", "batch", "loss", "nodes"]
    graph["properties"] = {
        "kind": {"const": "autoshard.graph"},
        "schema_version": {"const": SCHEMA_VERSION},
    }


def _problems(operation: dict[str, Any]) -> None:
    for status, response in operation["responses"].items():
        if int(status) < 400:
            continue
        response["description"] = REASONS[int(status)]
        response["content"] = {
            MEDIA_TYPE: {
                "schema": {"$ref": REF.format(model="Problem")},
                "example": {
                    "type": PREFIX + "not-found",
                    "title": "There is nothing here",
                    "status": int(status),
                    "detail": REASONS[int(status)],
                    "instance": "5f1d7a0c9b3e4a62",
                },
            }
        }
        if int(status) in (429, 503):
            response["headers"] = {
                "Retry-After": {
                    "description": "seconds",
                    "schema": {"type": "integer", "minimum": 1},
                }
            }
