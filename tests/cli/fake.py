"""A planner that plans nothing: it remembers what it was asked and returns samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.plan.samples import sample_graph, sample_plan


class Report(SimpleNamespace):
    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "numbers": [list(n) for n in self.numbers]}


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

    def estimate(self, model: str, **options: Any) -> Any:
        self._ask("estimate", model, options)
        return sample_plan(limit=self.limit)

    def analyze(self, model: str, **options: Any) -> Any:
        self._ask("analyze", model, options)
        return SimpleNamespace(graph=sample_graph())

    def validate(self, model: str, **options: Any) -> Any:
        self._ask("validate", model, options)
        return Report(
            ok=self.ok,
            plan=sample_plan(),
            numbers=[("loss", "output", 1e-15), ("fc.weight", "gradient", 2e-15)],
            collectives=SimpleNamespace(predicted=4, issued=4, differences=()),
            step_time=(0.5, 0.6),
            memory=(None, None),
            warnings=("gloo: all_to_all falls back to all_gather",),
        )
