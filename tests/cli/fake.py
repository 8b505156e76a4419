"""A planner that plans nothing: it remembers what it was asked and returns samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from autoshard.answers import Outcome
from autoshard.errors import ValidationError
from autoshard.plan import MeshDocument
from autoshard.planner.altered import WhatIf
from autoshard.validation.report import (
    CaptureCheck,
    CollectiveCheck,
    TensorCheck,
    ValidationReport,
)
from tests.plan.samples import sample_graph, sample_plan


def sample_report(off: float) -> ValidationReport:
    return ValidationReport(
        devices=4,
        mesh="data=4",
        dtype="float64",
        tolerance=1e-9,
        checks=(TensorCheck(kind="loss", name="loss", deviation=off),),
        collectives=CollectiveCheck(predicted=4, issued=4, differences=0),
        capture=CaptureCheck(dtype="float32", skipped="the graph was loaded without its model"),
        step_seconds=0.6,
        predicted_step_seconds=0.5,
        peak_bytes=10**9,
        predicted_peak_bytes=None,
        memory=None,
        predicted_memory=None,
        memory_method="counted",
        seconds=3.0,
    )


def sample_what_if() -> WhatIf:
    best = Outcome(
        change="",
        devices=8,
        label="data parallel over data=8",
        mesh=MeshDocument(axis_names=("data", "model"), sizes=(8, 1)),
        step_time_s=0.5,
        samples_per_second=128.0,
        memory_bytes=30 * 2**30,
        limit_bytes=80 * 10**9,
        gain=1.0,
    )
    faster = best.model_copy(update={"change": "link=2x", "step_time_s": 0.4, "gain": 1.25})
    none = Outcome(
        change="memory=0.2x,nodes=+1",
        devices=16,
        limit_bytes=16 * 10**9,
        binding="activations 10 GB (then parameters 9 GB); 20 GB of 16 GB, 4 GB too much",
    )
    return WhatIf(model="gpt2", cluster="h100", outcomes=(best, faster, none))


@dataclass
class FakePlanner:
    error: BaseException | None = None
    ok: bool = True
    limit: int = 72 * 2**30
    noise: str = ""
    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def _ask(self, name: str, model: str, options: dict[str, Any]) -> None:
        progress = options.pop("progress")
        progress("loading the model")
        for done in range(3):
            progress("pricing", done, 3)
        print(self.noise, end="")
        self.asked.append((name, model, options))
        if self.error is not None:
            raise self.error

    def optimize(self, model: str, **options: Any) -> Any:
        self._ask("optimize", model, options)
        return sample_plan()

    def smallest(self, model: str, **options: Any) -> Any:
        self._ask("smallest", model, options)
        return sample_plan()

    def what_if(self, model: str, changes: list[str], **options: Any) -> Any:
        self._ask("what_if", model, {"changes": changes, **options})
        return sample_what_if()

    def estimate(self, model: str, **options: Any) -> Any:
        self._ask("estimate", model, options)
        return sample_plan(limit=self.limit)

    def analyze(self, model: str, **options: Any) -> Any:
        self._ask("analyze", model, options)
        return SimpleNamespace(graph=sample_graph())

    def validate(self, model: str, **options: Any) -> Any:
        self._ask("validate", model, options)
        report = sample_report(1e-15 if self.ok else 1e-3)
        if not self.ok:
            raise ValidationError("gradient 'fc.weight' differs", report=report)
        return report
