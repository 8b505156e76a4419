"""Step time against memory: the plans than which none is both faster and smaller.

The limit of memory is swept. Under a limit the search gives its fastest plan; the next limit is a
little below what that plan takes. So no plan that was priced is faster than a point of the front
and takes no more memory than it; between two points there may be others, which save less than
``spacing`` of the memory. A limit that binds leaves the gap between price and bound that any plan
of a search has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.plan import Memory, MeshDocument, StepTime
from autoshard.search.feasible import SURE, Asked
from autoshard.search.inner import InnerSearch, Prepared, inner_search
from autoshard.search.outer import Configuration, pinned
from autoshard.search.scheduled import Scheduled
from autoshard.search.space import Arrangement
from autoshard.search.whole import Problems, search_whole

TRIALS = 100
"""Trials of a sampler, where no number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan of the front.

    Attributes:
        label: of its configuration or arrangement.
        mesh: its mesh.
        step_time: its seconds.
        memory: its bytes; the limit is the one that it was found under.
    """

    label: str
    mesh: MeshDocument
    step_time: StepTime
    memory: Memory


def sweep(best: Callable[[int], Point | None], limit: int, spacing: float) -> list[Point]:
    """The front, by falling memory.

    Args:
        best: the fastest plan within so many bytes; None where nothing fits.
        limit: bytes of a device that may be used.
        spacing: share of a point's memory that the next one saves at least.
    """
    out: list[Point] = []
    while (point := best(limit)) is not None:
        out.append(point)
        limit = min(limit - 1, int(point.memory.total_bytes * (1 - spacing)))
    return undominated(out)


def undominated(points: Sequence[Point]) -> list[Point]:
    """Those than which none is as fast and smaller, or faster and as small, by falling memory."""
    out: list[Point] = []
    for point in sorted(points, key=lambda p: (p.memory.total_bytes, p.step_time.total_s)):
        if not out or point.step_time.total_s < out[-1].step_time.total_s:
            out.append(point)
    return out[::-1]


class PlainSpace:
    """Configurations of the plain space under any limit; tables are built once."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.limit = asked.limit
        self.prepared = asked.prepared or Prepared(asked.graph)
        self.candidates: dict[tuple[tuple[str, Any], ...], Configuration] = {
            (("mesh", c.text), ("strategy", c.strategy)): c for c in asked.space
        }
        self._inner: dict[Configuration, InnerSearch] = {}
        self._last: dict[Configuration, Point] = {}
        self._seen: list[Point] = []

    def best(self, limit: int) -> Point | None:
        """The fastest within so many bytes; limits must fall from call to call."""
        for c in self.candidates.values():
            last = self._last.get(c)
            # The fastest under a looser limit is the fastest under this one if it fits.
            if last is None or last.memory.total_bytes > limit:
                self._last[c] = self.one(c, limit)
                self._seen.append(self._last[c])
        found = [p for p in self._seen if p.memory.total_bytes <= limit]
        return min(found, key=lambda p: p.step_time.total_s, default=None)

    def one(self, candidate: Configuration, limit: int) -> Point:
        """A configuration's fastest within so many bytes, else its leanest."""
        search = self._search(candidate)
        search.limit = limit
        if search.least_bytes > SURE * limit:
            _, priced = search.leanest()
        else:
            _, priced, _ = search.run()
        return Point(
            label=candidate.label,
            mesh=candidate.mesh,
            step_time=priced.step_time,
            memory=priced.memory,
        )

    def least_bytes(self) -> float:
        """Bytes that no plan goes below, about."""
        return min(self._search(c).least_bytes for c in self.candidates.values())

    def _search(self, c: Configuration) -> InnerSearch:
        if c not in self._inner:
            asked = self.asked
            self._inner[c] = inner_search(
                asked.graph,
                asked.cluster,
                c.sizes,
                c.axis_names,
                c.uses,
                optimizer=asked.optimizer,
                memory_limit=asked.limit,
                pins=pinned(c, asked.pins),
                prepared=self.prepared,
            )
        return self._inner[c]


class FullSpace:
    """Arrangements of the full space under any limit; tables are built once."""

    def __init__(self, points: Sequence[Arrangement], problems: Problems) -> None:
        self.points, self.problems, self.limit = points, problems, problems.limit
        problems.prepare(points)
        self.candidates = {tuple(sorted(a.params.items())): a for a in points}

    def best(self, limit: int) -> Point | None:
        """The fastest within so many bytes."""
        result = search_whole(self.points, self.problems.under(limit))
        if not result.found.fits:
            return None
        step = result.found.step
        return _point(result.arrangement, step.step_time, step.memory)

    def one(self, candidate: Arrangement, limit: int) -> Point:
        """An arrangement's fastest within so many bytes, else its leanest."""
        problems = self.problems
        schedule = problems.schedule(candidate)
        step = Scheduled(problems.folded(candidate), schedule, limit).solve().step
        return _point(candidate, step.step_time, step.memory)

    def least_bytes(self) -> float:
        """Bytes that no plan goes below, about."""
        return min(self.problems.least_bytes(a) for a in self.points)


def _point(a: Arrangement, step_time: StepTime, memory: Memory) -> Point:
    return Point(label=a.label, mesh=a.mesh, step_time=step_time, memory=memory)


Space = PlainSpace | FullSpace


def sampled(
    space: Space,
    *,
    sampler: str,
    trials: int | None,
    seed: int,
    storage: str | None,
    name: str,
) -> list[Point]:
    """What an Optuna study of two objectives, seconds and bytes, finds; no proof.

    A trial is a configuration (or arrangement) and a limit of memory; its plan is solved exactly.

    Args:
        space: what is searched.
        sampler: ``nsga``, ``tpe``, ``gp`` or ``random``.
        trials: how many; None: 100.
        seed: of the sampler.
        storage: URL of an Optuna storage, whose finished trials count; None: in memory.
        name: of the study there.
    """
    import optuna

    from autoshard.search.sampler import sampler_of

    keys = list(space.candidates)
    choices = {n: sorted({dict(k)[n] for k in keys}, key=str) for n, _ in keys[0]}
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            directions=["minimize", "minimize"],
            sampler=sampler_of(sampler, seed, None),
            storage=storage,
            study_name=name if storage else None,
            load_if_exists=True,
        )
        low = min(space.least_bytes() / space.limit, 1.0)
        done = len(study.get_trials(deepcopy=False))
        for _ in range(done, trials or TRIALS):
            trial = study.ask()
            params = {n: trial.suggest_categorical(n, values) for n, values in choices.items()}
            limit = int(trial.suggest_float("memory", low, 1.0) * space.limit)
            candidate: Any = space.candidates.get(tuple(sorted(params.items())))
            if candidate is None:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                continue
            point = space.one(candidate, limit)
            if point.memory.total_bytes > space.limit:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                continue
            trial.set_user_attr("point", _attributes(point))
            study.tell(trial, [point.step_time.total_s, point.memory.total_bytes])
        found = [_read(t.user_attrs["point"]) for t in study.best_trials]
    finally:
        optuna.logging.set_verbosity(verbosity)
    return undominated(found)


def _attributes(point: Point) -> dict[str, Any]:
    return {
        "label": point.label,
        "mesh": point.mesh.model_dump(),
        "step_time": point.step_time.model_dump(),
        "memory": point.memory.model_dump(),
    }


def _read(attributes: Mapping[str, Any]) -> Point:
    return Point(
        label=attributes["label"],
        mesh=MeshDocument.model_validate(attributes["mesh"]),
        step_time=StepTime.model_validate(attributes["step_time"]),
        memory=Memory.model_validate(attributes["memory"]),
    )
