"""Fit the free constants of the cost model to published runs, and leave publishers out.

    python -m benchmarks.published.fit FILE.csv [--out] [--rounds N]

Least squares of log(predicted / measured) by Gauss-Newton, each source with the same weight, and
each constant drawn to its prior (:mod:`benchmarks.published.constants`). A row is priced once by
``autoshard.estimate``; its segments are then timed again with other constants by the very functions
that the estimate calls. Nothing is written: the values go into the presets by hand.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import AutoshardError
from autoshard.plan import Schedule
from autoshard.planner.predicted import model_of
from autoshard.program import Program
from autoshard.search.cost import CostModel
from autoshard.search.step import Measured, compose, measure, measured_step, retimed
from benchmarks.published.constants import FREE, with_constants
from benchmarks.published.pricing import Known, plan_of, spread
from benchmarks.published.rows import (
    Inexpressible,
    complete,
    is_full_precision,
    publisher,
    request,
    source,
)

OUTLIER = 0.15
"""Errors beyond this count less (Huber): rows at the edge of memory are slow for any model."""

PRIOR_WEIGHT = 0.02
"""How a constant that is one spread off its prior counts beside a source's mean square error of
which this is the root."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row whose segments are known."""

    row: Mapping[str, str]
    model: CostModel
    program: Program
    schedule: Schedule
    measured: Measured

    def seconds(self, values: Sequence[float]) -> float:
        """Seconds of a step with these constants."""
        model = self.model.on(with_constants(self.model.cluster.device, values))
        step = compose(model, self.program, self.schedule, retimed(model, self.measured))
        return step.step_time.total_s

    @property
    def applies(self) -> list[int]:
        """Constants that belong to the row's device."""
        name = self.model.cluster.device.name
        return [i for i, f in enumerate(FREE) if any(name.startswith(d) for d in f.devices)]


_KNOWN = Known()
"""What is known in this process: runs of rows have models in common."""


def rows_of(rows: Sequence[Mapping[str, str]]) -> list[Row | None]:
    """The rows with their segments; None where one cannot be priced."""
    out: list[Row | None] = []
    for row in rows:
        try:
            plan = plan_of(request(row), _KNOWN)
        except (Inexpressible, AutoshardError):
            out.append(None)
            continue
        program = plan.program()
        model = model_of(program, plan)
        found = measured_step(partial(measure, model, program), plan.schedule)
        out.append(Row(row, model, program, plan.schedule, found))
    return out


class Problem:
    """Residuals over rows, in this process and others."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.cache: dict[tuple[int, tuple[float, ...]], float] = {}

    def logs(self, values: Sequence[float]) -> NDArray[np.float64]:
        """log(predicted / measured) of each row."""
        return np.array([self._log(i, values) for i in range(len(self.rows))])

    def _log(self, i: int, values: Sequence[float]) -> float:
        row = self.rows[i]
        key = i, tuple(values[j] for j in row.applies)
        if key not in self.cache:
            self.cache[key] = float(np.log(row.seconds(values) / float(row.row["step_time_s"])))
        return self.cache[key]

    def jacobian(
        self, values: Sequence[float], base: NDArray[np.float64], step: float = 0.02
    ) -> NDArray[np.float64]:
        """Change of each row's log by that of each constant's log."""
        out = np.zeros((len(self.rows), len(values)))
        for j in range(len(values)):
            moved = list(values)
            moved[j] *= 1 + step
            for i, row in enumerate(self.rows):
                if j in row.applies:
                    out[i, j] = (self._log(i, moved) - base[i]) / np.log1p(step)
        return out


def weights(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Each source the same; full precision and below are sources of their own."""
    names = [(source(r.row), is_full_precision(r.row)) for r in rows]
    count = Counter(names)
    return np.array([1.0 / count[n] for n in names])


def fit(
    problem: Problem, used: NDArray[np.bool_], start: Sequence[float], rounds: int
) -> list[float]:
    """Constants that fit the used rows best."""
    prior = np.log([f.prior for f in FREE])
    pull = PRIOR_WEIGHT / np.log([f.spread for f in FREE])
    values = list(start)
    weight = weights([r for r, u in zip(problem.rows, used, strict=True) if u])
    for _ in range(rounds):
        base = problem.logs(values)
        slope = problem.jacobian(values, base)
        x = np.log(values)
        robust = np.minimum(1.0, OUTLIER / np.maximum(np.abs(base[used]), 1e-9))
        w = np.sqrt(weight * robust)
        left = np.vstack([slope[used] * w[:, None], np.diag(pull)])
        right = np.concatenate([-base[used] * w, pull * (prior - x)])
        change = np.linalg.lstsq(left, right, rcond=None)[0]
        change *= min(1.0, 0.5 / np.abs(change).max())
        values = [float(v) for v in np.exp(x + change)]
        if np.abs(change).max() < 0.004:
            break
    return values


def table(
    problem: Problem, logs: NDArray[np.float64], used: NDArray[np.bool_]
) -> list[tuple[str, int, float, float]]:
    """(source, rows, mean absolute error, bias) of the rows that ``used`` selects."""
    error = np.expm1(logs)
    names = [source(r.row) + ("" if is_full_precision(r.row) else " low") for r in problem.rows]
    out = []
    for name in sorted({n for n, u in zip(names, used, strict=True) if u}):
        own = np.array([n == name for n in names]) & used
        out.append(
            (name, int(own.sum()), float(np.abs(error[own]).mean()), float(error[own].mean()))
        )
    return out


def show(rows: Sequence[tuple[str, int, float, float]]) -> None:
    """The table, and the means over sources of each class."""
    for name, count, mape, bias in rows:
        print(f"  {name:16}{count:5d}{mape:8.1%}{bias:+8.1%}")
    for low in (False, True):
        own = [r for r in rows if r[0].endswith(" low") == low]
        if own:
            mean = sum(r[2] for r in own) / len(own)
            bias = sum(r[3] for r in own) / len(own)
            print(f"  mean of {'low' if low else 'full'} precision  {mean:.1%} {bias:+.1%}")


def load(path: str, processes: int) -> list[Row]:
    """The rows of a file."""
    with open(path, encoding="utf-8") as file:
        rows = [complete(r) for r in csv.DictReader(file)]
    return [r for r in spread(rows_of, rows, processes) if r is not None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, and show."""
    parser = argparse.ArgumentParser(description="fit of the cost model to published runs")
    parser.add_argument("file")
    parser.add_argument("--out", action="store_true", help="leave each publisher out, too")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args(arguments)
    problem = Problem(load(options.file, 2))
    everything = np.ones(len(problem.rows), dtype=bool)
    start = [f.prior for f in FREE]
    values = fit(problem, everything, start, options.rounds)
    print(f"{len(FREE)} free constants over {len(problem.rows)} rows:")
    for constant, value in zip(FREE, values, strict=True):
        print(f"  {constant.name:34}{value:9.3f}  prior {constant.prior:7.3f}  {constant.meaning}")
    show(table(problem, problem.logs(values), everything))
    if options.out:
        found = []
        for name in sorted({publisher(r.row) for r in problem.rows}):
            own = np.array([publisher(r.row) == name for r in problem.rows])
            without = fit(problem, ~own, values, options.rounds)
            found += table(problem, problem.logs(without), own)
        print("each publisher predicted from the others:")
        show(found)


if __name__ == "__main__":
    main()
