"""One point done: planned, priced or run, as a row and a plan document."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoshard.errors import RequestError
from autoshard.sweeps.figures import figures
from autoshard.sweeps.machine import computing
from autoshard.sweeps.points import Point, file_digest
from autoshard.sweeps.rows import Row

if TYPE_CHECKING:
    from autoshard.analyzer import Captured
    from autoshard.validation import Measured

MOST_CAPTURED = 4
"""Models that a worker keeps captured; points that share one are neighbours."""

MOST_ERROR = 4000
"""Characters that are kept of an error."""


class Bench:
    """Where a worker does its points, with the models that it captured last.

    Args:
        studies: URL of an Optuna storage that keeps the searches; None: nobody does.
    """

    def __init__(self, studies: str | None = None) -> None:
        self._studies = studies
        self._captured: OrderedDict[tuple[object, ...], Captured] = OrderedDict()

    def do(self, point: Point) -> tuple[Row, str | None]:
        """The finished row of a point, and its plan as JSON; what fails is written in the row."""
        started = time.monotonic()
        try:
            with computing(alone=point.measure):
                started = time.monotonic()  # waiting for others is no work
                row, plan = self._done(point)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()[:MOST_ERROR]
            row, plan = replace(point.row(), status="failed", error=text), None
        return replace(row, seconds=time.monotonic() - started), plan

    def _done(self, point: Point) -> tuple[Row, str]:
        from autoshard.planner import estimate, optimize

        captured = self._capture(point)
        shared: dict[str, Any] = {
            "cluster": point.cluster_document or point.cluster,
            "devices": point.devices,
            "global_batch": point.global_batch,
            "seq_len": point.seq_len,
            "dtype": point.dtype,
            "optimizer": point.optimizer,
            "strategy": point.strategy,
            "memory_limit_bytes": point.memory_limit_bytes,
            "seed": point.seed,
            "captured": captured,
            "progress": None,
        }
        model = point.model_config or point.model_source
        if point.mesh is None:
            plan = optimize(model, trials=point.trials, storage=self._studies, **shared)
        else:
            plan = estimate(model, mesh=point.mesh, **shared)
        source = plan.model.model_copy(update={"source": point.model_source})
        plan = plan.model_copy(update={"model": source})
        row = replace(point.row(), status="done", **figures(plan))
        if point.measure:
            from autoshard.planner.checking import measure_plan

            found = measure_plan(plan, captured, seed=point.seed, steps=point.steps)
            row = _measured(row, found)
        return row, plan.to_json()

    def _capture(self, point: Point) -> Captured:
        """The model of a point, captured once for neighbours that share it."""
        from autoshard.planner.capture import capture

        digest = point.model_digest
        if digest is not None and file_digest(point.model_source) != digest:
            raise RequestError(
                f"{point.model_source} is not the file that the sweep was entered with; give every "
                "machine the same one, or run the sweep again to enter its points anew"
            )
        devices = point.devices if point.global_batch is None else None
        config = None if point.model_config is None else repr(point.model_config)
        key = (
            *(point.model_source, config, point.model_digest),
            *(point.global_batch, devices, point.seq_len, point.dtype),
        )
        if key not in self._captured:
            while len(self._captured) >= MOST_CAPTURED:
                self._captured.popitem(last=False)
            self._captured[key] = capture(
                point.model_config or point.model_source,
                batch=point.global_batch,
                seq_len=point.seq_len,
                dtype=point.dtype,
                devices=point.devices,
            )
        self._captured.move_to_end(key)
        return self._captured[key]


def _measured(row: Row, found: Measured) -> Row:
    return replace(
        row,
        measured_step_time_s=found.step_seconds,
        measured_low_s=min(found.step_seconds_each),
        measured_high_s=max(found.step_seconds_each),
        measured_memory_bytes=found.peak_bytes,
    )
