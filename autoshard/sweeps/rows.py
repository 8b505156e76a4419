"""One row a point: what was asked, what was predicted, and what was measured.

The columns are fixed here; the store, the exports (CSV, Parquet, JSON) and the reports all read
:class:`Row`. Times are seconds of one step, bytes are per device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from autoshard.errors import RequestError

Mode = Literal["plan", "estimate", "measure"]
Status = Literal["pending", "running", "done", "failed"]

MODES: tuple[Mode, ...] = ("plan", "estimate", "measure")
STATUSES: tuple[Status, ...] = ("pending", "running", "done", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point of a sweep and what is known of it.

    Figures are None until the point is done, and where it failed.

    Attributes:
        model: as the sweep calls it.
        cluster: preset, file, or the name of a cluster document.
        devices: how many.
        global_batch: samples of one step over all devices; None: not given and not planned yet.
        seq_len: tokens of a sample; None: the model's own.
        dtype: floating dtype; None: the model's own and not planned yet.
        optimizer: whose state is kept.
        strategy: what was asked for.
        mode: ``plan`` (searched), ``estimate`` (priced on a given mesh), ``measure`` (really run).
        status: ``pending``, ``running``, ``done`` or ``failed``.
        error: ``Type: message`` of a point that failed.
        label: what the plan amounts to, as ``hybrid: FSDP over data=4 x model=2``.
        mesh: the plan's mesh, ``data=4, model=2``.
        step_time_s: predicted seconds of one optimizer step.
        samples_per_s: predicted, over all devices.
        tokens_per_s: predicted, over all devices; None where a sample has no tokens.
        memory_bytes: predicted peak of the fullest device.
        memory_limit_bytes: what may be used of a device; None: no limit.
        fits: whether the prediction is within the limit.
        compute_s: predicted, operators forward and backward.
        communication_s: predicted, all messages, hidden or not.
        exposed_communication_s: predicted, the part that compute does not hide.
        forward_backward_s: predicted without the optimizer: stands beside ``measured_step_time_s``.
        comparable_memory_bytes: predicted without the reserve: stands beside
            ``measured_memory_bytes``.
        measured_step_time_s: median of the timed steps (forward and backward) of the slowest
            process.
        measured_low_s: the fastest of these steps.
        measured_high_s: the slowest of these steps.
        measured_memory_bytes: measured peak of the fullest process.
        seconds: what planning and measuring took; no part of equality.
        plan: the plan document, where it was read along; it stays out of CSV and Parquet.
    """

    model: str
    cluster: str
    devices: int
    global_batch: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    strategy: str = "auto"
    mode: Mode = "plan"
    status: Status = "pending"
    error: str | None = None
    label: str | None = None
    mesh: str | None = None
    step_time_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    fits: bool | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    exposed_communication_s: float | None = None
    forward_backward_s: float | None = None
    comparable_memory_bytes: int | None = None
    measured_step_time_s: float | None = None
    measured_low_s: float | None = None
    measured_high_s: float | None = None
    measured_memory_bytes: int | None = None
    seconds: float | None = field(default=None, compare=False)
    plan: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def error_type(self) -> str | None:
        """Class of the error of a point that failed, as ``InfeasibleError``."""
        return None if self.error is None else self.error.partition(":")[0]

    def to_json(self, *, plan: bool = False) -> dict[str, Any]:
        """The columns, in order; the plan document too where it is asked for."""
        document = asdict(self)
        if not plan:
            del document["plan"]
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Row:
        """The row that :meth:`to_json` wrote.

        Raises:
            RequestError: a column that is not one of a row.
        """
        if unknown := sorted(set(document) - {*COLUMNS, "plan"}):
            raise RequestError(f"not a row of a sweep: unknown column {', '.join(unknown)}")
        return cls(**document)


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Row) if f.name != "plan")
"""Names of the columns of CSV, Parquet and JSON, in order."""
