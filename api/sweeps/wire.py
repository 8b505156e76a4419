"""What a sweep is asked with and answered with: the axes of ``autoshard sweep``'s file.

Models and clusters are presets or documents: no path, no factory, nothing that would be read or
run on the server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    TypeAdapter,
    WithJsonSchema,
)
from pydantic.annotated_handlers import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from autoshard.api.wire import LARGEST, Answer, Body, Kind, State, whole
from autoshard.sweeps.config import LONGEST_NAME
from autoshard.sweeps.rows import COLUMNS, Row

TAGS = frozenset({"[name]", "[config]", "[graph]", "[document]", "[text]", "[sizes]"})
"""Parts of pydantic's locations that name no field of the body."""


class _OneOrMany:
    """A list, or one value that stands for a list of it."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def listed(value: Any) -> Any:
            return value if isinstance(value, list) else [value]

        return core_schema.no_info_before_validator_function(listed, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [many["items"], many]}


class ConfigEntry(Body):
    """A model by its Hugging Face ``config.json``; none of its code is run."""

    name: str | None = Field(
        None, min_length=1, max_length=LONGEST_NAME, description="left out: its 'model_type'"
    )
    config: dict[str, Any]


class GraphEntry(Body):
    """A model as a graph, as ``autoshard analyze MODEL --out graph.json`` writes it."""

    name: str | None = Field(
        None, min_length=1, max_length=LONGEST_NAME, description="left out: the graph's own"
    )
    graph: dict[str, Any]


def _which_model(value: Any) -> str | None:
    if isinstance(value, str):
        return "[name]"
    keys = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return next((f"[{k}]" for k in ("config", "graph") if k in keys), None)


def _which_cluster(value: Any) -> str | None:
    return "[name]" if isinstance(value, str) else "[document]" if isinstance(value, dict) else None


def _which_mesh(value: Any) -> str | None:
    return "[text]" if isinstance(value, str) else "[sizes]" if isinstance(value, dict) else None


Size = Annotated[int, Field(ge=1, le=LARGEST), BeforeValidator(whole)]
Seed = Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(whole)]
Dtype = Literal["bf16", "fp16", "fp32", "fp64"]
Strategy = Literal["auto", "data", "fsdp", "tensor", "hybrid"]
Optimizer = Literal["adamw", "adam", "sgd", "sgd-momentum"]
Preset = Annotated[str, Field(max_length=100)]
ModelEntry = Annotated[
    Annotated[Preset, Tag("[name]")]
    | Annotated[ConfigEntry, Tag("[config]")]
    | Annotated[GraphEntry, Tag("[graph]")],
    Discriminator(
        _which_model,
        custom_error_type="model_source",
        custom_error_message='give the name of a preset, {"name": ..., "config": {...}} or '
        '{"name": ..., "graph": {...}}',
    ),
]
ClusterEntry = Annotated[
    Annotated[Preset, Tag("[name]")]
    | Annotated[
        dict[str, Any],
        WithJsonSchema({"$ref": "#/components/schemas/ClusterDocument"}),
        Tag("[document]"),
    ],
    Discriminator(
        _which_cluster,
        custom_error_type="cluster_source",
        custom_error_message="give the name of a preset or a cluster document",
    ),
]
MeshEntry = Annotated[
    Annotated[
        str,
        Field(max_length=100, pattern="^(every|[a-z]+=[0-9]{1,9}(,[a-z]+=[0-9]{1,9})*)$"),
        Tag("[text]"),
    ]
    | Annotated[dict[str, Size], Tag("[sizes]")],
    Discriminator(
        _which_mesh,
        custom_error_type="mesh",
        custom_error_message='write data=4,model=2, or {"data": 4, "model": 2}, or \'every\'',
    ),
]


class Sizes(Body):
    """Parameters that points and exclusions have in common: one value each, or a list."""

    seq_len: Annotated[list[Size], Field(min_length=1), _OneOrMany()] | None = None
    dtype: Annotated[list[Dtype], Field(min_length=1), _OneOrMany()] | None = None
    global_batch: Annotated[list[Size], Field(min_length=1), _OneOrMany()] | None = None
    devices: Annotated[list[Size], Field(min_length=1), _OneOrMany()] | None = None
    optimizer: Annotated[list[Optimizer], Field(min_length=1), _OneOrMany()] | None = None
    strategy: Annotated[list[Strategy], Field(min_length=1), _OneOrMany()] | None = None
    mesh: Annotated[list[MeshEntry], Field(min_length=1), _OneOrMany()] | None = Field(
        None, description="priced instead of planned; 'every': each data x model mesh"
    )
    memory_limit_bytes: Annotated[list[Size], Field(min_length=1), _OneOrMany()] | None = None
    trials: Annotated[list[Size], Field(min_length=1), _OneOrMany()] | None = None
    seed: Annotated[list[Seed], Field(min_length=1), _OneOrMany()] | None = None


class Parameters(Sizes):
    """One value each, or a list: every combination is a point."""

    model: Annotated[list[ModelEntry], Field(min_length=1), _OneOrMany()] | None = None
    cluster: Annotated[list[ClusterEntry], Field(min_length=1), _OneOrMany()] | None = None


class Excluded(Sizes):
    """Points that have one of the values of each of these are left out."""

    model: Annotated[list[Preset], Field(min_length=1), _OneOrMany()] | None = Field(
        None, description="by name"
    )
    cluster: Annotated[list[Preset], Field(min_length=1), _OneOrMany()] | None = Field(
        None, description="by name"
    )


class SweepRequest(Parameters):
    """``POST /v1/sweeps``: what a sweep's file says, without `measure`."""

    name: str = Field("sweep", min_length=1, max_length=LONGEST_NAME, description="for people")
    description: str = Field("", max_length=2000)
    method: Literal["grid"] = "grid"
    parameters: Parameters = Field(default_factory=lambda: Parameters())
    points: list[Parameters] = Field(
        default_factory=list,
        description="grids of their own; what one leaves out is taken from 'parameters' where "
        "that has one value",
    )
    exclude: list[Excluded] = Field(default_factory=list)


# ---- answers --------------------------------------------------------------------------------


class Counts(Answer):
    """Points by the state of their jobs."""

    queued: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0


class SweepLinks(Answer):
    """Where to go on; relative to the service."""

    self: str
    rows: str
    report: str


class SweepHead(Answer):
    """A sweep, for lists."""

    id: str
    name: str
    description: str
    created_s: float = Field(description="seconds since the epoch")
    state: Literal["running", "ended"]
    counts: Counts
    links: SweepLinks


class SweepList(Answer):
    """Sweeps, newest first."""

    sweeps: list[SweepHead]
    next_cursor: str | None = Field(description="give it as 'cursor' for those before; null: none")


class PointView(Answer):
    """A point and its job."""

    asked: dict[str, Any] = Field(description="columns of its row that were asked for")
    job_id: str
    kind: Kind
    state: State
    plan_id: str | None
    summary: dict[str, Any] | None = Field(description="of its plan, once it is there")
    detail: str | None = Field(description="why it failed")


class SweepView(SweepHead):
    """A sweep with its points, in their order."""

    notes: list[str] = Field(description="what was noticed while reading it")
    points: list[PointView]


def row_schema() -> dict[str, Any]:
    """JSON schema of a row: every column of :data:`autoshard.sweeps.rows.COLUMNS` is there."""
    found = TypeAdapter(Row).json_schema(mode="serialization")["properties"]
    properties = {c: {k: v for k, v in found[c].items() if k != "title"} for c in COLUMNS}
    return {
        "type": "object",
        "description": "what a column means: autoshard.sweeps.rows.Row",
        "properties": properties,
        "required": list(COLUMNS),
        "additionalProperties": False,
    }
