"""What a validation found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from autoshard.plan import Categories
from autoshard.render.memory import beside_each_other
from autoshard.render.units import bytes_text

Kind = Literal["loss", "output", "gradient", "buffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCheck:
    """One tensor of the sharded step beside the unsharded one.

    Attributes:
        kind: what it is.
        name: of the parameter or buffer, or the output's path.
        deviation: largest difference over the tensor's largest magnitude.
    """

    kind: Kind
    name: str
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCheck:
    """Issued beside predicted collectives, as ordered lists, over all devices.

    Attributes:
        predicted: number predicted for one step, of the device at coordinate 0.
        issued: number that it issued.
        differences: places at which the lists differ, added up over all devices.
        first: the first of them in words; empty where there is none.
    """

    predicted: int
    issued: int
    differences: int
    first: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCheck:
    """The module itself, run eagerly, beside its captured graph, both on one device.

    Attributes:
        dtype: in which both ran.
        checks: loss, outputs and gradients.
        tolerance: what rounding alone may explain; different kernels, different order of sums.
        skipped: why it could not be done; empty where it was.
    """

    dtype: str
    checks: tuple[TensorCheck, ...] = ()
    tolerance: float = 0.0
    skipped: str = ""

    @property
    def worst(self) -> TensorCheck | None:
        """The tensor that is farthest off."""
        return max(self.checks, key=lambda c: c.deviation, default=None)

    @property
    def agrees(self) -> bool:
        """Whether module and graph agree, where that was checked."""
        return self.worst is None or self.worst.deviation <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """What a validation on real processes found.

    Attributes:
        devices: number of processes.
        mesh: ``data=2, model=2``.
        dtype: floating dtype of the numeric check.
        tolerance: largest allowed deviation.
        checks: every tensor that was compared.
        collectives: the collectives.
        capture: module and graph on one device.
        step_seconds: measured, median of a few steps of the slowest process; forward and backward,
            without the optimizer.
        predicted_step_seconds: what the plan said of the same, for its own cluster.
        peak_bytes: measured, of the fullest process, the optimizer's update included.
        predicted_peak_bytes: what the plan said, without the reserve.
        memory: measured at that moment, by category.
        predicted_memory: what the plan said.
        memory_method: how memory was measured.
        seconds: how long the validation took.
    """

    devices: int
    mesh: str
    dtype: str
    tolerance: float
    checks: tuple[TensorCheck, ...]
    collectives: CollectiveCheck
    capture: CaptureCheck
    step_seconds: float | None
    predicted_step_seconds: float | None
    peak_bytes: int | None
    predicted_peak_bytes: int | None
    memory: Categories | None
    predicted_memory: Categories | None
    memory_method: str
    seconds: float

    @property
    def worst(self) -> TensorCheck:
        """The tensor that is farthest off."""
        return max(self.checks, key=lambda c: c.deviation)

    @property
    def numbers_agree(self) -> bool:
        """Whether every tensor is within the tolerance."""
        return self.worst.deviation <= self.tolerance

    @property
    def passed(self) -> bool:
        """Whether numbers agree, the collectives are those predicted, and so is the module."""
        return self.numbers_agree and not self.collectives.differences and self.capture.agrees

    def deviation(self, kind: Kind) -> float:
        """The largest deviation of one kind of tensor."""
        return max((c.deviation for c in self.checks if c.kind == kind), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        kinds = {
            name: None if found is None else found.model_dump()
            for name, found in (
                ("memory", self.memory),
                ("predicted_memory", self.predicted_memory),
            )
        }
        return {"kind": "autoshard.validation", "passed": self.passed, **asdict(self), **kinds}

    def __str__(self) -> str:
        """A few lines for people."""
        counts = {
            k: sum(c.kind == k for c in self.checks) for k in ("output", "gradient", "buffer")
        }
        lines = [
            f"{'passed' if self.passed else 'FAILED'}: {self.devices} processes, {self.mesh}, "
            f"{self.dtype}, {self.seconds:.1f} s",
            f"numbers: loss {self.deviation('loss'):.1e}, {counts['output']} outputs "
            f"{self.deviation('output'):.1e}, {counts['gradient']} gradients "
            f"{self.deviation('gradient'):.1e}"
            + (
                f", {counts['buffer']} buffers {self.deviation('buffer'):.1e}"
                * bool(counts["buffer"])
            )
            + f" (largest difference over largest magnitude; allowed {self.tolerance:.0e})",
            f"collectives: {self.collectives.predicted} predicted, "
            f"{self.collectives.issued} issued, {self.collectives.differences} differences "
            "on all devices",
        ]
        if self.collectives.first:
            lines.append(f"  first: {self.collectives.first}")
        if self.step_seconds is not None:
            said = self.predicted_step_seconds
            beside = "" if said is None else f", predicted {said:.3g} s for the plan's cluster"
            lines.append(f"step: {self.step_seconds:.3g} s measured here{beside}")
        said_bytes = self.predicted_peak_bytes
        beside = "" if said_bytes is None else f", predicted {bytes_text(said_bytes)}"
        if self.peak_bytes is not None:
            lines.append(
                f"memory: {self.peak_bytes / 2**20:.1f} MiB measured{beside} ({self.memory_method})"
            )
            lines += [
                f"  {name}: {bytes_text(found)} measured, predicted {bytes_text(said)}"
                for name, said, found in beside_each_other(self.predicted_memory, self.memory)
            ]
        capture = self.capture
        if capture.skipped:
            lines.append(f"capture: not checked: {capture.skipped}")
        elif (worst := capture.worst) is not None:
            lines.append(
                f"capture: module and graph in {capture.dtype} "
                f"{'agree' if capture.agrees else 'DIFFER'}: at most {worst.deviation:.1e} "
                f"({worst.kind} {worst.name}; rounding allows {capture.tolerance:.0e})"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a plan costs beside what it said; fields as in :class:`ValidationReport`.

    Attributes:
        step_seconds_each: every timed step of the process whose median is ``step_seconds``.
    """

    collectives: CollectiveCheck
    step_seconds: float | None
    step_seconds_each: tuple[float, ...]
    predicted_step_seconds: float | None
    peak_bytes: int | None
    predicted_peak_bytes: int | None
    memory: Categories | None
    predicted_memory: Categories | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunReport:
    """What a dry run of one rank found.

    Attributes:
        devices: size of the world it played in.
        coordinate: which device it was.
        collectives: issued beside predicted.
        nodes: operators and leaves of the graph.
        seconds: how long it took.
    """

    devices: int
    coordinate: tuple[int, ...]
    collectives: CollectiveCheck
    nodes: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the collectives are those predicted, in order."""
        return not self.collectives.differences

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        return {"kind": "autoshard.dry_run", "passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        """A line or two for people."""
        text = (
            f"dry run of device {self.coordinate} of {self.devices:,}: "
            f"{self.collectives.predicted} collectives predicted, {self.collectives.issued} "
            f"issued, {self.collectives.differences} differences ({self.nodes:,} nodes, "
            f"{self.seconds:.1f} s)"
        )
        return text + (f"\n  first: {self.collectives.first}" if self.collectives.first else "")
