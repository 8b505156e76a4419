"""What is sent to the service and what it answers: the only place that knows the JSON's shape."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)

from autoshard.plan import PlanDocument

VERSION = version("autoshard")
"""Of the installed distribution; plans of another version are other plans."""

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ENDED: tuple[State, ...] = ("succeeded", "failed", "cancelled")
Kind = Literal["plan", "estimate"]


class Body(BaseModel):
    """Base of all that is sent: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


LARGEST = 10**18 - 1
"""Largest integer that is taken: see ``reading.INTEGER_DIGITS``."""


def whole(value: Any) -> Any:
    """The integer that a float like 8.0 is; everything else as it came."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# 8.0 is an integer in JSON, and what some languages write.
Whole = Annotated[int, BeforeValidator(whole)]
_POSITIVE: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0, "maximum": 1e30}
Positive = Annotated[float, Field(gt=0, le=1e30)]
NotNegative = Annotated[float, Field(ge=0, le=1e6)]


# ---- requests -------------------------------------------------------------------------------


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
    devices: Whole | None = Field(
        None, ge=1, le=LARGEST, description="None: the preset's own number"
    )


class DeviceDocument(Body):
    """One device of a cluster document."""

    name: str = Field(max_length=200)
    kind: str = Field(max_length=40, description="`cuda`, `cpu`, ...")
    peak_flops_per_second: dict[str, Positive] = Field(
        description="by dtype; float32 at least",
        json_schema_extra={"required": ["float32"], "properties": {"float32": _POSITIVE}},
    )
    efficiency: Positive
    efficiencies: dict[Annotated[str, Field(max_length=40)], Positive] = Field(
        default_factory=dict, max_length=100, description="by dtype, where it is another"
    )
    memory_bytes: Whole = Field(ge=1, le=LARGEST)
    memory_bytes_per_second: Positive
    memory_efficiency: Positive
    launch_s: NotNegative
    kernels: dict[Annotated[str, Field(max_length=100)], NotNegative] = Field(
        default_factory=dict,
        max_length=100,
        description="how shapes change the rates, by name; what is left out has its default",
    )
    measured: MeasuredDocument | None = None


class FactorDocument(Body):
    """What an operator was measured to take, by what its bytes would."""

    forward: NotNegative
    backward: NotNegative = 0.0


class MeasuredDocument(Body):
    """Figures of a device that ``autoshard calibrate`` measured."""

    operators: dict[Annotated[str, Field(max_length=200)], FactorDocument] = Field(
        default_factory=dict, max_length=1000
    )
    edge: NotNegative = 0.0
    convolution: Positive = 1.0
    convolution_backward: Positive = 1.0
    update_launches: NotNegative = 0.0
    step_s: NotNegative = 0.0
    gradient_copies: NotNegative = 0.0
    contention: NotNegative = 0.0
    waiting: NotNegative = 0.0


class LibraryDocument(Body):
    """What a library makes of one kind of collective, by what the law of its algorithm says."""

    latency: NotNegative
    bytes: Positive


class ReductionDocument(Body):
    """Sums made by the switches of a tier."""

    bytes_per_second: Positive
    latency_s: NotNegative


class TierDocument(Body):
    """Links of one tier of a cluster document; a known link gives what is left out."""

    link: str = Field(max_length=200, description="a known link, or the tier's own name for it")
    devices: Whole | None = Field(
        None, ge=1, le=LARGEST, description="of one unit; the outermost tier may have no bound"
    )
    bytes_per_second: Positive | None = None
    latency_s: NotNegative | None = None
    bulk_latency_s: NotNegative | None = None
    short_share: Annotated[float, Field(gt=0, le=1)] | None = None
    devices_per_card: Whole = Field(1, ge=1, le=LARGEST)
    wires: Literal["switch", "mesh", "ring"] = "switch"
    reduction: ReductionDocument | None = None


class ReserveDocument(Body):
    """Memory that no tensor gets, in its parts: they add up to ``reserve_bytes``."""

    context_bytes: Whole = Field(ge=0, le=LARGEST)
    communication_bytes: Whole = Field(ge=0, le=LARGEST)
    fragmentation_bytes: Whole = Field(ge=0, le=LARGEST)


class _AnyClusterDocument(Body):
    """What every version has."""

    kind: Literal["autoshard.cluster"]
    name: str = Field(max_length=200)
    devices: Whole = Field(ge=1, le=LARGEST)
    devices_per_node: Whole = Field(ge=1, le=LARGEST)
    collective_s: NotNegative
    reserve_bytes: Whole = Field(ge=0, le=LARGEST)
    reserve: ReserveDocument | None = None
    device: DeviceDocument
    sources: dict[str, Annotated[str, Field(max_length=2000)]] = Field(default_factory=dict)


class ClusterDocument(_AnyClusterDocument):
    """A cluster, as ``Cluster.to_json`` writes it; ``GET /v1/clusters`` shows some."""

    schema_version: Literal[2]
    algorithms: list[Literal["ring", "tree", "hierarchical"]] = Field(min_length=1, max_length=3)
    tiers: dict[str, TierDocument] = Field(min_length=1, max_length=10)
    library: dict[Annotated[str, Field(max_length=100)], LibraryDocument] = Field(
        default_factory=dict, max_length=100, description="factors by collective"
    )


class OldTierDocument(Body):
    """Links of a cluster document of version 1."""

    name: str = Field(max_length=200)
    bytes_per_second: Positive
    latency_s: NotNegative
    devices_per_card: Whole = Field(1, ge=1, le=LARGEST)


class OldClusterDocument(_AnyClusterDocument):
    """A cluster of version 1, which is still read: links inside a node, and across nodes."""

    schema_version: Literal[1]
    inside: OldTierDocument
    across: OldTierDocument


def _which_cluster(value: Any) -> str | None:
    if isinstance(value, PresetCluster) or (isinstance(value, dict) and "preset" in value):
        return "preset"
    return "document" if isinstance(value, dict) else None


ClusterSpec = Annotated[
    Annotated[PresetCluster, Tag("preset")]
    | Annotated[
        dict[str, Any],
        WithJsonSchema({"$ref": "#/components/schemas/ClusterDocument"}),
        Tag("document"),
    ],
    Discriminator(
        _which_cluster,
        custom_error_type="cluster_source",
        custom_error_message='give {"preset": ..., "devices": ...} or a cluster document',
    ),
]


class Workload(Body):
    """What is trained."""

    global_batch: Whole | None = Field(
        None, ge=1, le=LARGEST, description="samples of a step, all devices"
    )
    seq_len: Whole | None = Field(None, ge=1, le=LARGEST, description="tokens of a sample")
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    optimizer: Literal["adamw", "adam", "sgd", "sgd-momentum"] = "adamw"


class Search(Body):
    """What is tried."""

    strategy: Literal["auto", "data", "fsdp", "tensor", "hybrid"] = "auto"
    mesh: dict[str, Whole] | None = Field(None, description="axis sizes to force")
    memory_limit_bytes: Whole | None = Field(None, ge=1, le=LARGEST, description="of one device")
    trials: Whole | None = Field(
        None, ge=1, le=LARGEST, description="most configurations that are priced"
    )
    seed: Whole = Field(0, ge=0, lt=2**32)


class PlanRequest(Body):
    """``POST /v1/plans``."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload = Field(default_factory=lambda: Workload())
    search: Search = Field(default_factory=lambda: Search())
    validation: Literal["none", "dry-run", "run"] = Field("none", alias="validate")


class Priced(Body):
    """The one configuration that is priced."""

    strategy: Literal["auto", "data", "fsdp", "tensor", "hybrid"] = "auto"
    mesh: dict[str, Whole] = Field(description="axis sizes; their product is the number of devices")
    memory_limit_bytes: Whole | None = Field(None, ge=1, le=LARGEST, description="of one device")
    seed: Whole = Field(0, ge=0, lt=2**32)


class EstimateRequest(Body):
    """``POST /v1/estimates``: as a plan's request, with the mesh given."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload = Field(default_factory=lambda: Workload())
    search: Priced

    def as_plan(self) -> PlanRequest:
        """The same as a plan's request, which is what a worker is given."""
        return PlanRequest(
            model=self.model,
            cluster=self.cluster,
            workload=self.workload,
            search=Search(**self.search.model_dump()),
        )


def dumped(request: PlanRequest) -> dict[str, Any]:
    """The request as JSON, as jobs keep it."""
    return request.model_dump(mode="json", by_alias=True)


def digest(kind: Kind, request: dict[str, Any], version: str) -> str:
    """Names equal requests: the same digest, the same plan."""
    text = json.dumps([kind, version, request], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# ---- answers --------------------------------------------------------------------------------


class Answer(BaseModel):
    """Base of all that is answered."""

    model_config = ConfigDict(extra="forbid")


class Fault(Answer):
    """One thing that is wrong with a request."""

    pointer: str = Field(description="JSON pointer (RFC 6901) into the body; '' is all of it")
    detail: str
    parameter: str | None = Field(
        None, description="name of the query parameter or header, where it is one"
    )


class Problem(BaseModel):
    """Any error (RFC 9457), as ``application/problem+json``."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="'about:autoshard/' and the kind of problem")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str = Field(description="what was found, and what to do")
    instance: str | None = Field(None, description="id of the request, as in X-Request-ID")
    errors: list[Fault] = Field(default_factory=list)
    binding: str | None = Field(None, description="what binds, where nothing fits")
    nearest: list[str] | None = Field(None, description="changes that would make it fit")


class Progress(BaseModel):
    """How far a job is."""

    model_config = ConfigDict(extra="allow")

    message: str | None = None
    done: int | None = None
    total: int | None = None
    best_step_time_s: float | None = None
    best_label: str | None = None


class Subject(Answer):
    """What a job is about, for lists."""

    model: str
    cluster: str
    devices: int | None
    global_batch: int | None
    seq_len: int | None


class JobLinks(Answer):
    """Where to go on; relative to the service."""

    self: str
    events: str
    plan: str | None = None


class JobView(Answer):
    """A job."""

    id: str
    kind: Kind
    state: State
    subject: Subject
    created_s: float = Field(description="seconds since the epoch")
    started_s: float | None
    finished_s: float | None
    cancelling: bool = Field(description="it still runs, but was asked to stop")
    attempt: int = Field(description="how often it was begun")
    progress: Progress | None
    plan_id: str | None
    problem: Problem | None = Field(description="why it failed")
    links: JobLinks


class JobList(Answer):
    """Jobs, newest first."""

    jobs: list[JobView]
    next_cursor: str | None = Field(description="give it as 'cursor' for those before; null: none")


class PlanLinks(Answer):
    """Where to go on; relative to the service."""

    self: str
    report: str
    trace: str
    page: str = Field(description="the page with this plan: whoever has this link can read it")
    share: str = Field(description="the plan itself, for whoever has this link")


class PlanView(Answer):
    """A finished plan."""

    id: str
    created_s: float = Field(description="seconds since the epoch")
    summary: dict[str, Any] = Field(description="what a list shows")
    links: PlanLinks
    plan: PlanDocument


class ModelPreset(Answer):
    """A model preset with its numbers and where they come from."""

    name: str
    source: str
    parameter_count: int
    model_type: str
    architecture: str
    config: dict[str, Any]


class ModelList(Answer):
    """Model presets, by name."""

    models: list[ModelPreset]


class ClusterPreset(Answer):
    """A cluster preset: the document, each figure with its source."""

    name: str
    aliases: list[str]
    devices: int
    document: dict[str, Any]


class ClusterList(Answer):
    """Cluster presets, by name."""

    clusters: list[ClusterPreset]


class Version(Answer):
    """What runs here."""

    version: str
    plan_schema_version: int
    keys_required: bool


class Health(Answer):
    """Whether the service can be used."""

    status: Literal["ok"]
    workers: int | None = Field(None, description="workers alive, on all machines")
