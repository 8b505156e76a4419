"""The plan that is fastest when it is really run: the best by prediction, on processes of here.

An Optuna study holds the runs: a trial is a plan of the priced space, its value the measured
seconds of a step. The best by prediction are enqueued, so with Optuna's default sampler (TPE) they
are what is run; a sampler that is named chooses all but the first itself. With a storage, runs of
an interrupted study are not repeated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.errors import AutoshardError, UnknownNameError, ValidationError
from autoshard.plan import RealRun
from autoshard.planner.plan import Plan
from autoshard.render.units import seconds_text

if TYPE_CHECKING:
    import optuna

    from autoshard.analyzer import Captured
    from autoshard.search import Configuration, SearchResult

DEFAULT = "tpe"
SAMPLERS = (DEFAULT, "nsga", "gp", "random")
ATTEMPTS = 8
"""Proposals of a sampler for each run; it may propose what was run already."""

Run = Callable[["Configuration"], float]
"""Runs a configuration's plan; measured seconds of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the runs say.

    Attributes:
        best: the configuration that ran fastest.
        runs: all that was run, fastest first, what failed last.
    """

    best: Configuration
    runs: tuple[RealRun, ...]


def candidates(result: SearchResult) -> list[Configuration]:
    """Configurations whose plans fit and differ, fastest by prediction first."""
    fitting = {c: s for c, s in result.priced.items() if s.fits}
    order = sorted(fitting, key=lambda c: (c != result.configuration, fitting[c].step_time.total_s))
    seen: set[object] = set()
    out = []
    for c in order:
        solution = fitting[c]
        choices = tuple((name, str(s.choices)) for name, s in sorted(solution.strategies.items()))
        sizes = tuple(s for s in solution.sizes if s > 1)
        if (key := (sizes, choices, tuple(sorted(solution.regather)))) not in seen:
            seen.add(key)
            out.append(c)
    return out


def pick(
    result: SearchResult,
    count: int,
    run: Run,
    *,
    sampler: str | None = None,
    seed: int = 0,
    storage: str | None = None,
    name: str = "",
    say: Callable[[str], None],
) -> Choice:
    """Run ``count`` plans and pick the fastest.

    Args:
        result: what the search priced.
        count: how many are run, at most as many as there are.
        run: see :data:`Run`; what it raises is kept with the run.
        sampler: one of :data:`SAMPLERS`, which proposes all but the first; None: the best by
            prediction.
        seed: of the sampler.
        storage: URL of an Optuna storage; None: in memory.
        name: of what is measured, for the storage.
        say: told of each run.

    Raises:
        UnknownNameError: no such sampler.
        ValidationError: no plan ran; says what the first one met.
    """
    import optuna

    from autoshard.search.sampler import sampler_of

    if sampler is not None and sampler not in SAMPLERS:
        raise UnknownNameError("sampler of real runs", sampler, SAMPLERS)
    order = candidates(result)
    labels = {c.label: c for c in order}
    count = min(count, len(order))
    predicted = {c.label: result.priced[c].step_time.total_s for c in order}
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            direction="minimize",
            sampler=sampler_of(sampler or DEFAULT, seed, None),
            storage=storage,
            study_name=_study_name(name, predicted) if storage else None,
            load_if_exists=True,
        )
        runs = _finished(study, predicted)
        for c in order[: count if sampler is None else 1]:
            if c.label not in runs:
                study.enqueue_trial({"plan": c.label}, skip_if_exists=True)
        attempts = 0
        while len(runs) < count:
            if attempts == ATTEMPTS * count:  # the sampler comes back to what it knows
                study.enqueue_trial({"plan": next(n for n in labels if n not in runs)})
                attempts -= 1
            attempts += 1
            trial = study.ask()
            label = trial.suggest_categorical("plan", list(labels))
            if label in runs:
                known = runs[label].measured_step_s
                if known is None:
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                else:
                    study.tell(trial, known)
                continue
            say(f"running {len(runs) + 1}/{count}: {label}")
            runs[label] = _run(label, labels[label], predicted[label], run)
            trial.set_user_attr("run", runs[label].model_dump())
            if runs[label].measured_step_s is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, runs[label].measured_step_s)
    finally:
        optuna.logging.set_verbosity(verbosity)
    found = sorted(runs.values(), key=_rank)
    if found[0].measured_step_s is None:
        raise ValidationError(
            f"none of {len(found)} plans ran; {found[0].label}: {found[0].error}; plan without "
            "measuring, or run one with autoshard validate to see more"
        )
    return Choice(best=labels[found[0].label], runs=tuple(found))


def chosen(plan: Plan, choice: Choice) -> Plan:
    """The plan with what was run beside it."""
    measured = {run.label: run for run in choice.runs}
    others = []
    for other in plan.alternatives:
        run = measured.get(other.label)
        no_slower = other.step_time_s is not None and other.step_time_s <= plan.predicted_step_s
        if no_slower and other.fits:
            seconds = None if run is None else run.measured_step_s
            why = (
                "predicted no slower; not run"
                if run is None
                else f"predicted no slower, and failed: {run.error}"
                if seconds is None
                else f"predicted no slower, but ran in {seconds_text(seconds)}"
            )
            other = other.model_copy(update={"why": why})
        others.append(other)
    return plan.model_copy(update={"alternatives": tuple(others), "real_runs": choice.runs})


def fastest_run(
    result: SearchResult,
    planned: Callable[[Configuration], Plan],
    captured: Captured,
    count: int,
    *,
    sampler: str | None,
    seed: int,
    storage: str | None,
    say: Callable[[str], None],
) -> Plan:
    """The plan that ran fastest of ``count``, each on processes of its own.

    Args:
        result: see :func:`pick`, as for all that is not explained here.
        planned: the plan of a configuration.
        captured: the model.
        count: see there.
        sampler: see there.
        seed: see there; of parameters and inputs too.
        storage: see there.
        say: see there.

    Raises:
        ValidationError: no plan ran.
    """
    from autoshard.planner.checking import measure_plan
    from autoshard.runtime.processes import Pool

    def run(configuration: Configuration) -> float:
        plan = planned(configuration)
        with Pool(plan.devices) as pool:
            found = measure_plan(plan, captured, seed=seed, pool=pool)
        assert found.step_seconds is not None  # steps are timed
        return found.step_seconds

    first = planned(result.configuration)
    name = f"{first.model.name} {first.model.fingerprint} on {first.devices} processes"
    choice = pick(
        result, count, run, sampler=sampler, seed=seed, storage=storage, name=name, say=say
    )
    return chosen(planned(choice.best), choice).attach(captured)


def _run(label: str, configuration: Configuration, predicted: float, run: Run) -> RealRun:
    try:
        seconds = run(configuration)
    except AutoshardError as error:
        first = next(
            (line for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        return RealRun(
            label=label, predicted_step_s=predicted, measured_step_s=None, error=first.strip()
        )
    return RealRun(label=label, predicted_step_s=predicted, measured_step_s=seconds)


def _finished(study: optuna.Study, predicted: Mapping[str, float]) -> dict[str, RealRun]:
    """Runs of an earlier search with the same storage."""
    out = {}
    for trial in study.get_trials(deepcopy=False):
        if "run" in trial.user_attrs and trial.state.is_finished():
            run = RealRun.model_validate(trial.user_attrs["run"])
            if run.label in predicted:
                out[run.label] = run
    return out


def _rank(run: RealRun) -> tuple[bool, float]:
    seconds = run.measured_step_s
    return seconds is None, run.predicted_step_s if seconds is None else seconds


def _study_name(name: str, predicted: Mapping[str, float]) -> str:
    labels: Sequence[str] = sorted(predicted)
    digest = hashlib.sha256(json.dumps(labels).encode()).hexdigest()[:8]
    return f"{name}, measured, {digest}"
