"""What is sent to the service and what it answers: the only place that knows the JSON's shape."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ENDED: tuple[State, ...] = ("succeeded", "failed", "cancelled")
Kind = Literal["plan", "estimate"]


class Body(BaseModel):
    """Base of all that is sent: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class PresetModel(Body):
    """A model by the name of a preset; ``GET /v1/models`` lists them."""

    preset: str = Field(max_length=100)


class ConfigModel(Body):
    """A model by its Hugging Face ``config.json``; none of its code is run."""

    config: dict[str, Any]


class GraphModel(Body):
    """A model as a graph, as ``autoshard analyze MODEL --out graph.json`` writes it."""

    graph: dict[str, Any]


def _which_model(value: Any) -> str | None:
    keys = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return next((k for k in ("preset", "config", "graph") if k in keys), None)


ModelSpec = Annotated[
    Annotated[PresetModel, Tag("preset")]
    | Annotated[ConfigModel, Tag("config")]
    | Annotated[GraphModel, Tag("graph")],
    Discriminator(
        _which_model,
        custom_error_type="model_source",
        custom_error_message='give one of {"preset": ...}, {"config": ...}, {"graph": ...}',
    ),
]


class PresetCluster(Body):
    """A cluster by the name of a preset; ``GET /v1/clusters`` lists them."""

    preset: str = Field(max_length=100)
    devices: int | None = Field(None, ge=1, description="None: the preset's own number")


class Workload(Body):
    """What is trained."""

    global_batch: int | None = Field(None, ge=1, description="samples of a step, all devices")
    seq_len: int | None = Field(None, ge=1, description="tokens of a sample")
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    optimizer: Literal["adamw", "adam", "sgd", "sgd-momentum"] = "adamw"


class Search(Body):
    """What is tried."""

    strategy: Literal["auto", "data", "fsdp", "tensor", "hybrid"] = "auto"
    mesh: dict[str, int] | None = Field(None, description="axis sizes to force")
    memory_limit_bytes: int | None = Field(None, ge=1, description="of one device")
    trials: int | None = Field(None, ge=1, description="most configurations that are priced")
    seed: int = Field(0, ge=0, lt=2**32)


class PlanRequest(Body):
    """``POST /v1/plans``."""

    model: ModelSpec
    cluster: PresetCluster | dict[str, Any]
    workload: Workload = Field(default_factory=lambda: Workload())
    search: Search = Field(default_factory=lambda: Search())
    validation: Literal["none", "dry-run", "run"] = Field("none", alias="validate")


def digest(kind: Kind, request: dict[str, Any], version: str) -> str:
    """Names equal requests: the same digest, the same plan."""
    text = json.dumps([kind, version, request], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
