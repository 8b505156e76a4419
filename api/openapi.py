"""The API's own description: what FastAPI finds, with bodies and problems as they really are."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from autoshard import __version__
from autoshard.api.problems import MEDIA_TYPE, PREFIX
from autoshard.api.wire import EstimateRequest, PlanRequest, Problem

REF = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (PlanRequest, EstimateRequest)

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
}


def faults(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses of an operation that are problems; 401, 403 and 500 can always come."""
    return {
        status: {"model": Problem, "description": REASONS[status]}
        for status in sorted({401, 403, 500, *statuses})
    }


def body_of(model: type[BaseModel], *, posting: bool) -> dict[str, Any]:
    """The description of an operation whose body is read by ``reading``."""
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
                "pattern": "^[!#-~]{1,255}$",
                "examples": ["8e03978e-40d5-43dd-bc93-6894a57f9324"],
            },
        },
    ]
    out: dict[str, Any] = {
        "requestBody": {"required": True, "content": {"application/json": media}}
    }
    return {**out, "parameters": headers} if posting else out


def describe(app: FastAPI, keys_required: bool) -> dict[str, Any]:
    """The OpenAPI document."""
    document = get_openapi(
        title="autoshard planning service",
        version=__version__,
        description="Finds how to shard a model over a cluster. Sizes are bytes, times seconds.",
        routes=app.routes,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    _, bodies = models_json_schema([(m, "validation") for m in BODIES], ref_template=REF)
    for name, schema in bodies["$defs"].items():
        schemas.setdefault(name, schema)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
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
