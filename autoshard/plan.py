"""A plan: how to shard one model over one cluster, what that costs, and what else was tried.

A plain, frozen, versioned value that round-trips through JSON. ``choices`` name for every
operator what it does on each axis; with the model's graph they give the whole program back
(:func:`autoshard.assemble.program_of`), so a plan holds no second copy of anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoshard.errors import RequestError

PLAN_VERSION: Literal[1] = 1


class Document(BaseModel):
    """Base of everything in a plan: frozen, nothing extra allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MeshDocument(Document):
    """Named axes and sizes; devices in row-major order, the last axis nearest."""

    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def active(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and sizes of the axes larger than 1: the ones that layouts speak of."""
        pairs = [(n, s) for n, s in zip(self.axis_names, self.sizes, strict=True) if s > 1]
        return tuple(n for n, _ in pairs), tuple(s for _, s in pairs)

    @property
    def stage(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The active axes of one stage: all but the pipeline's."""
        names, sizes = self.active
        pairs = [(n, s) for n, s in zip(names, sizes, strict=True) if n != "pipeline"]
        return tuple(n for n, _ in pairs), tuple(s for _, s in pairs)

    def __str__(self) -> str:
        return ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.sizes, strict=True))


class TensorDocument(Document):
    """How one tensor is stored.

    Attributes:
        shape: global shape.
        dtype: as torch prints it, without ``torch.``.
        partition_spec: for each dim, the axes that cut it, outermost first; None where none does.
        layout: state on each active axis: ``R``, ``P``, ``S(dim)``, ``S(dim, outer, n)``.
        local_bytes: bytes of the largest shard, per device.
    """

    shape: tuple[int, ...]
    dtype: str
    partition_spec: tuple[str | tuple[str, ...] | None, ...]
    layout: dict[str, str]
    local_bytes: int


class Schedule(Document):
    """How a step is carried out beside the sharding.

    Attributes:
        microbatches: that a step's samples are cut into; the graph is of one.
        stages: of the pipeline; 1: none.
        virtual_stages: chunks of the model on each stage.
        order: of the pipeline's tasks, see ``autoshard.search.pipeline``.
        recompute: what backward computes again of each repeated block: nothing, attention scores,
            norms, activations and what else is cheap, what it needs (torch's checkpoint), or
            everything (a reentrant one).
        style: how operators between products are run.
        optimizer_shards: devices that share the optimizer's work and state (ZeRO 1); 1: none.
        overlapped: axes whose messages run beside the computing of the same block: prefetched
            gathers of FSDP (``data``), ring attention (``context``), products in pieces
            (``model``). The bundled runtime waits for each of these messages.
        products: what products of weights of blocks run in, where not in their own dtype; ``tf32``
            is of all products of float32.
        blocks: how many repeated blocks the model has, where the graph has fewer of the same kind;
            None: as many as the graph.
        recomputed_blocks: how many of them are recomputed, the first of each chunk; None: all.
        stage_blocks: how many blocks each chunk has, in the order of the model; None: equally many,
            or with both ends as a block each, or else such that the slowest is as fast as can be.
    """

    microbatches: int = Field(1, ge=1)
    stages: int = Field(1, ge=1)
    virtual_stages: int = Field(1, ge=1)
    order: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    recompute: Literal["none", "selective", "pointwise", "full", "reentrant"] = "none"
    style: Literal["eager", "autocast", "fused"] = "eager"
    optimizer_shards: int = Field(1, ge=1)
    overlapped: tuple[str, ...] = ()
    products: Literal["native", "tf32", "fp8", "mxfp8", "nvfp4"] = "native"
    blocks: int | None = Field(None, ge=1)
    recomputed_blocks: int | None = Field(None, ge=0)
    stage_blocks: tuple[int, ...] | None = None

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are a task of their own."""
        return self.order == "zero-bubble" and self.stages > 1

    @property
    def is_plain(self) -> bool:
        """Whether a step is one pass over all samples: what the bundled runtime runs."""
        return self == Schedule(style=self.style)


def blocks_text(stage_blocks: Sequence[int]) -> str:
    """``9+9+8+6``; of equal ones in a row ``9x2+8+6``."""
    runs = [(n, len(list(same))) for n, same in groupby(stage_blocks)]
    return "+".join(f"{n}x{times}" if times > 1 else f"{n}" for n, times in runs)


class StepTime(Document):
    """Predicted seconds of one optimizer step of the slowest device."""

    total_s: float
    compute_s: float = Field(description="operators, forward and backward")
    optimizer_s: float
    communication_s: float = Field(description="all messages, hidden or not")
    exposed_communication_s: float = Field(description="the part that compute does not hide")
    forward_s: float
    backward_s: float

    @property
    def waiting_s(self) -> float:
        """Seconds that a device of an average stage waits for other stages."""
        busy = self.compute_s + self.optimizer_s + self.exposed_communication_s
        return max(0.0, self.total_s - busy)


class Categories(Document):
    """Bytes of one device at its fullest moment, by what they are for."""

    parameters_bytes: int = Field(description="parameters, buffers and constants")
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int = Field(description="kept for backward; inputs and outputs too")
    kv_cache_bytes: int = Field(default=0, description="keys and values of earlier tokens")
    gathered_bytes: int = Field(description="gathered parameters kept for backward")
    temporary_bytes: int = Field(description="everything else, messages included")

    @property
    def allocated_bytes(self) -> int:
        """Sum of the categories: what tensors take."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.kv_cache_bytes
            + self.gathered_bytes
            + self.temporary_bytes
        )


class ReserveParts(Document):
    """Memory of a device that no tensor gets."""

    context_bytes: int = Field(description="driver, context and loaded kernels")
    communication_bytes: int = Field(description="buffers of the library of collectives")
    fragmentation_bytes: int = Field(description="what lies between tensors, and rounding")


class Memory(Categories):
    """Predicted peak bytes of the fullest device, by category."""

    reserve_bytes: int = Field(description="context, communication buffers, fragmentation")
    limit_bytes: int | None = Field(
        description="memory of the device that may be used; None: no limit"
    )
    reserve: ReserveParts | None = Field(
        default=None, description="the reserve in its parts, where the cluster tells them"
    )
    stages: tuple[Categories, ...] = Field(
        default=(), description="of each stage of a pipeline, the fullest of which is above"
    )

    @property
    def categories(self) -> Categories:
        """What tensors take, without the reserve and the limit."""
        return Categories(**{name: getattr(self, name) for name in Categories.model_fields})

    @property
    def total_bytes(self) -> int:
        """Sum of the categories and the reserve."""
        return self.allocated_bytes + self.reserve_bytes

    @property
    def fits(self) -> bool:
        """Whether the total is within the limit."""
        return self.limit_bytes is None or self.total_bytes <= self.limit_bytes


class CollectiveGroup(Document):
    """Predicted collectives of one step that are alike, as the first device issues them."""

    op: str
    axes: tuple[str, ...]
    phase: Literal["forward", "backward"]
    count: int
    total_bytes: int
    seconds: float


class Alternative(Document):
    """Another configuration that was priced, and why it lost."""

    label: str
    mesh: MeshDocument
    step_time_s: float | None
    memory_bytes: int | None
    fits: bool
    why: str


class Measurement(Document):
    """What a validation measured; it stands beside the prediction wherever both exist."""

    devices: str
    step_time_s: float
    predicted_step_time_s: float
    peak_memory_bytes: int | None = None
    predicted_memory_bytes: int | None = None
    memory: Categories | None = Field(default=None, description="of the fullest process")
    predicted_memory: Categories | None = Field(
        default=None, description="of the fullest device, without the reserve"
    )


class RealRun(Document):
    """A plan that was really run, to pick by measurement."""

    label: str = Field(description="configuration, as among the alternatives")
    predicted_step_s: float
    measured_step_s: float | None = Field(description="median of its steps; None where it failed")
    error: str = Field(default="", description="what the first process that failed said")


class ModelDocument(Document):
    """The model that the plan is for."""

    name: str
    fingerprint: str
    parameter_count: int
    source: str | None = Field(
        default=None, description="preset, config path or package.module:factory it came from"
    )


class PlanDocument(Document):
    """See the module's docstring. All bytes are per device unless a name says otherwise."""

    schema_version: Literal[1] = PLAN_VERSION
    kind: Literal["autoshard.plan"] = "autoshard.plan"
    model: ModelDocument
    cluster: dict[str, Any] = Field(description="the cluster document that was planned for")
    mesh: MeshDocument
    label: str = Field(
        description="what the plan amounts to, e.g. 'hybrid: FSDP over data=4 x model=2'"
    )
    strategy: str = Field(description="what was asked for: auto, data, fsdp, tensor or hybrid")
    mode: Literal["train", "prefill", "decode"] = Field(
        default="train",
        description="what a step is of: training, or inference: reading whole prompts, or adding "
        "one token to each sequence",
    )
    objective: Literal["latency", "throughput"] = Field(
        default="latency",
        description="what was sought: the shortest step, or over all batches the most tokens a "
        "second",
    )
    global_batch: int
    seq_len: int | None = None
    context: int | None = Field(
        default=None,
        description="to decode: tokens that the new one attends to, itself included",
    )
    dtype: str
    optimizer: str
    seed: int = 0
    parameters: dict[str, TensorDocument]
    inputs: dict[str, TensorDocument]
    outputs: dict[str, TensorDocument]
    activations: dict[str, TensorDocument] = Field(
        default_factory=dict, description="values at block boundaries"
    )
    choices: dict[str, tuple[str, ...]] = Field(
        description="node of the graph -> its choice on each active axis"
    )
    regather: tuple[tuple[str, int], ...] = Field(
        default=(),
        description="(operator, operand) whose gathered value is gathered again in backward",
    )
    bucket_bytes: int
    schedule: Schedule = Field(default_factory=lambda: Schedule())
    step_time: StepTime
    memory: Memory
    collectives: tuple[CollectiveGroup, ...]
    alternatives: tuple[Alternative, ...] = ()
    lower_bound_s: float | None = None
    measurements: tuple[Measurement, ...] = ()
    real_runs: tuple[RealRun, ...] = Field(
        default=(), description="plans that were run to pick this one, fastest first"
    )
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """How many devices the plan is for."""
        return prod(self.mesh.sizes)

    @property
    def tokens(self) -> int | None:
        """Tokens of one step, all sequences; None where a sample is none of tokens."""
        if self.mode == "decode":
            return self.global_batch
        return None if self.seq_len is None else self.global_batch * self.seq_len

    @property
    def predicted_step_s(self) -> float:
        """Predicted seconds of one optimizer step."""
        return self.step_time.total_s

    def to_json(self) -> str:
        """The plan as a JSON text."""
        return self.model_dump_json(indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The plan that ``to_json`` wrote.

        Raises:
            RequestError: not a plan, or of another version; the message names the field.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = "/".join(str(p) for p in first["loc"]) or "the document"
            raise RequestError(
                f"not a plan of version {PLAN_VERSION}: {where}: {first['msg']}"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that :meth:`save` wrote.

        Raises:
            RequestError: no such file, or not a plan.
        """
        try:
            return cls.from_json(Path(path).read_bytes())
        except OSError as error:
            raise RequestError(f"cannot read plan {path}: {error.strerror}") from error

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of a plan document."""
        return json.loads(json.dumps(cls.model_json_schema()))  # type: ignore[no-any-return]
