"""The search of the whole space, with a certificate.

Every arrangement (:mod:`autoshard.search.space`) gets a bound in steps, each taken only where the
one before does not rule it out: work and bytes divided by the devices; what the axes cost that
share a sample, at the largest microbatch and at its own, with the messages of parameters that do
not fit whole; the least sum of its tables, within the memory; the same along what one choice waits
for; the exact price of its best strategies. The lowest bounds are always looked at next, some side
by side, and what is solved is a trial of an Optuna study; when they are above the best price, that
price is the optimum of the space, up to the gap between bounds and prices of what was solved: the
certificate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from autoshard.candidates import AxisUse
from autoshard.cluster import Cluster
from autoshard.errors import RequestError
from autoshard.graph import ModelGraph
from autoshard.kernels import Products, Style
from autoshard.plan import Alternative, Memory, Schedule, StepTime
from autoshard.search.alone import Alone, Least
from autoshard.search.cost import CostModel
from autoshard.search.feasible import SURE
from autoshard.search.floors import Floors
from autoshard.search.folded import Folded
from autoshard.search.inner import Prepared
from autoshard.search.lowest import FIRST, LEVELS, BestFirst, Question
from autoshard.search.memory import optimizer_of
from autoshard.search.pins import stored
from autoshard.search.preference import preference
from autoshard.search.scheduled import Found, Scheduled
from autoshard.search.space import USES, Arrangement, active
from autoshard.sharding.spec import PartitionSpec

if TYPE_CHECKING:
    from optuna import Study, Trial

Graphs = Callable[[int], ModelGraph]
"""The model's graph, of a few blocks, at a number of samples."""

Mesh = tuple[int, tuple[int, ...]]
"""Samples of a microbatch, and sizes of the axes: what tables depend on."""

BUBBLE = 0.15
"""Stages less one, as a share of the microbatches, up to which the work alone bounds forward and
backward of zero-bubble without gradients of weights: they count for little beside the rest."""

SECONDS = "seconds"
"""What bounds of a share ask of tables: no bytes."""

TRIALS = 100
"""Trials of a sampler that does not know when it has found the optimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How good a plan is, and how that is known.

    Attributes:
        step_time_s: of the best arrangement.
        lower_bound_s: no arrangement of the space, with blocks alike, is faster.
        arrangements: how many the space has.
        bounded: how many got a bound from their tables.
        solved: how many were solved and priced.
    """

    step_time_s: float
    lower_bound_s: float
    arrangements: int
    bounded: int
    solved: int

    @property
    def gap(self) -> float:
        """By how much the best may be slower than the bound, as a share of the bound."""
        return self.step_time_s / self.lower_bound_s - 1.0 if self.lower_bound_s else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a search of the whole space found; ``found.fits`` is False where nothing does.

    Attributes:
        arrangement: the best one.
        found: its strategies and figures.
        folded: the problem they solve.
        certificate: how good it is.
        alternatives: other arrangements that were priced, fastest first.
        study: the Optuna study.
    """

    arrangement: Arrangement
    found: Found
    folded: Folded
    certificate: Certificate
    alternatives: tuple[Alternative, ...]
    study: Study


@dataclass(frozen=True, slots=True)
class _Price:
    """What a trial says of an arrangement."""

    step_time: StepTime
    memory: Memory
    bound: float

    @property
    def rank(self) -> tuple[bool, float]:
        return preference(self.step_time, self.memory)


class Problems:
    """The inner problems of a space: each mesh and microbatch is built once, schedules share it.

    Args:
        graphs: see :data:`Graphs`.
        blocks: how many blocks the whole model has.
        cluster: all of its devices are used.
        optimizer: see ``search.memory.OPTIMIZERS``.
        limit: bytes of a device that may be used.
        style: how operators between products are run.
        pins: how parameters are stored, as ``search.pins.resolve`` has it; None: as is fastest.
        uses: what each axis of a stage is used for.
        overlapped: axes whose messages run beside computing, see ``Schedule.overlapped``.
        products: what products of weights of blocks run in, see ``Schedule.products``.
    """

    def __init__(
        self,
        graphs: Graphs,
        blocks: int,
        cluster: Cluster,
        optimizer: str = "adamw",
        limit: int | None = None,
        style: Style = "eager",
        pins: Mapping[str, PartitionSpec] | None = None,
        uses: Mapping[str, AxisUse] = USES,
        overlapped: tuple[str, ...] = (),
        products: Products = "native",
    ) -> None:
        self.graphs, self.blocks, self.cluster = graphs, blocks, cluster
        self.optimizer, self.style, self.pins, self.uses = optimizer, style, pins or {}, uses
        self.overlapped, self.products = overlapped, products
        self.limit = cluster.device.memory_bytes if limit is None else limit
        self._prepared: dict[int, Prepared] = {}
        self._folded: dict[Mesh, Folded] = {}
        self._scheduled: dict[Arrangement, Scheduled] = {}
        self._found: dict[Arrangement, Found] = {}
        self._alone: dict[Mesh, Alone] = {}
        self._leasts: dict[tuple[Mesh, str, str], Least] = {}
        self._floors: Floors | None = None
        self.bounded = self.solved = 0

    @property
    def asked(
        self,
    ) -> tuple[
        Graphs,
        int,
        Cluster,
        str,
        int,
        Style,
        Mapping[str, PartitionSpec],
        Mapping[str, AxisUse],
        tuple[str, ...],
        Products,
    ]:
        """What it was made of."""
        model = self.graphs, self.blocks, self.cluster
        how = self.style, self.pins, self.uses, self.overlapped, self.products
        return *model, self.optimizer, self.limit, *how

    def __reduce__(self) -> tuple[object, ...]:
        """Without tables: they are built where they are needed."""
        return type(self), self.asked

    @property
    def built(self) -> int:
        """How many sets of tables were built."""
        return len(self._folded)

    def under(self, limit: int) -> Problems:
        """The same problems under another limit; tables are shared."""
        other = Problems(
            self.graphs,
            self.blocks,
            self.cluster,
            self.optimizer,
            limit,
            self.style,
            self.pins,
            self.uses,
            self.overlapped,
            self.products,
        )
        other._prepared, other._folded = self._prepared, self._folded
        other._alone, other._leasts = self._alone, self._leasts
        return other

    def prepare(self, space: Sequence[Arrangement]) -> None:
        """Make ready for bounds.

        Raises:
            RequestError: an arrangement cannot be searched so, see :meth:`schedule`.
        """
        for a in space if self.overlapped else ():
            self.schedule(a)
        self.sized(max(a.micro_batch for a in space), max(a.batch for a in space))

    def sized(self, micro_batch: int, batch: int) -> None:
        """Make ready for bounds of arrangements whose microbatches have at most so many samples.

        Args:
            micro_batch: on one device.
            batch: over all devices of a stage.
        """
        self._most = micro_batch
        self._floors = Floors(
            self.graphs(batch),
            self.blocks,
            self.cluster,
            optimizer_of(self.optimizer),
            SURE * self.limit,
            self.style,
            self.overlapped,
            self.products,
        )

    @property
    def floors(self) -> Floors:
        """The first bounds."""
        assert self._floors is not None  # prepared
        return self._floors

    def least_bytes(self, a: Arrangement) -> float:
        """What a device of the fuller end keeps where all of its stage is cut over all of them."""
        return SURE * self.limit - self.floors.room(a)

    def by_share(self, a: Arrangement) -> float:
        """The second bound: ``expert`` and ``model`` alone, a share of what the most samples take.

        n samples take no less than the share n / m of what m take, nor do the tokens of one device
        along ``context`` take less than their share.
        """
        shares = -(-self._most // a.micro_batch) * a.context
        return self._bound_alone(a, self._least("by_share", a), shares)

    def by_axes(self, a: Arrangement) -> float:
        """The third bound: the axes that share a sample alone, with the samples of one device.

        Devices along ``data`` compute what one does with its samples; storing parameters in parts
        there saves no computing but the optimizer's, which is left out, and costs messages: the
        least that the memory asks for.
        """
        return self._bound_alone(a, self._least("by_axes", a), 1)

    def rooms(self, a: Arrangement) -> list[float]:
        """Bytes left on the first stage and on the last one, as :meth:`by_axes` counts them."""
        return self._rooms(a, self._least("by_axes", a))

    def _rooms(self, a: Arrangement, least: Sequence[Least]) -> list[float]:
        if not least[0].kept:
            return self.floors.rooms(a)
        kept = [held for each in least for held in each.kept]
        waiting = [held for each in least for held in each.waiting]
        return self.floors.rooms(a, kept, waiting, max(each.passing for each in least))

    def least(self, asked: tuple[Arrangement, str, str]) -> Least:
        """What the segments of an arrangement's mesh and microbatch take at least.

        ``asked``: the arrangement, a kind of recomputation, and what of it (see :func:`_apart`).
        """
        a, kind, what = asked
        alone = self.alone(a)
        if what == SECONDS:
            return Least(alone.seconds(kind))
        # Bytes first: with them seconds are found.
        kept, passing = alone.kept(kind), alone.passing(kind)
        waiting = alone.waiting() if what else ()
        halves = alone.halves(kind) if what == "halves" else ()
        return Least(alone.seconds(kind), kept, halves, waiting, passing)

    def alone(self, a: Arrangement) -> Alone:
        """The segments of an arrangement's mesh and microbatch, each alone."""
        key = _mesh(a)
        if key not in self._alone:
            self._alone[key] = Alone(self.folded(a))
        return self._alone[key]

    def _least(self, level: str, a: Arrangement) -> list[Least]:
        """What a bound asks of :meth:`least`, for each kind of recomputation."""
        for key, asked in self.needed(level, a):
            self._leasts[key] = self.least(asked)
        return [self._leasts[key] for key in self._keys(level, a)]

    def needed(
        self, level: str, a: Arrangement
    ) -> Iterator[tuple[tuple[Mesh, str, str], tuple[Arrangement, str, str]]]:
        """What a bound asks of :meth:`least`, by what that depends on; not what is known."""
        for key in self._keys(level, a) if level in LEVELS[:FIRST] else ():
            if key not in self._leasts:
                (samples, (stages, _, _, expert, context, model)), kind, what = key
                alone = Arrangement(
                    pipeline=stages,
                    replica=1,
                    data=1,
                    expert=expert,
                    context=context,
                    model=model,
                    micro_batch=samples // expert,
                    microbatches=1,
                    virtual_stages=1,
                    recompute="none",
                )
                yield key, (alone, kind, what)

    def _keys(self, level: str, a: Arrangement) -> list[tuple[Mesh, str, str]]:
        """The axes that share a sample alone, as a mesh, with what is asked of it.

        By share only ``expert`` and ``model``, at the largest microbatch.
        """
        whole, what = level == "by_share", SECONDS if level == "by_share" else _apart(a)
        context, micro = (1, self._most) if whole else (a.context, a.micro_batch)
        stages = self.cluster.devices // (a.expert * context * a.model)
        mesh = micro * a.expert, (stages, 1, 1, a.expert, context, a.model)
        return [(mesh, kind, what) for kind in a.kinds]

    def mesh_of(self, a: Arrangement) -> Mesh:
        """Whose tables an answer about an arrangement needs."""
        return _mesh(a)

    def raised(self, asked: Sequence[Question], then: Sequence[Question] = ()) -> list[float]:
        """Bounds by their names (see :data:`LEVELS`).

        ``then`` may be asked next: for who has the hands to begin with it.
        """
        return [getattr(self, level)(a) for level, a in asked]

    def _bound_alone(self, a: Arrangement, least: Sequence[Least], shares: int) -> float:
        parts = [each.seconds for each in least]
        seconds = np.concatenate(parts) / shares
        if a.splits_backward:
            rest = self.floors.pace(a).parts[len(seconds) :]
            if least[0].halves:
                rest = np.hstack([np.reshape(each.halves, (2, -1)) for each in least]).ravel()
            seconds = np.concatenate([seconds, rest])
        return self.floors.with_storing(a, seconds, self._rooms(a, least))

    def folded(self, a: Arrangement) -> Folded:
        """The tables of an arrangement's mesh and microbatch."""
        key = _mesh(a)
        if key not in self._folded:
            if a.batch not in self._prepared:
                self._prepared[a.batch] = Prepared(self.graphs(a.batch))
            prepared = self._prepared[a.batch]
            names, sizes = active(a.sizes)
            model = CostModel(
                prepared.graph,
                self.cluster.part(a.pipeline),
                sizes,
                prepared.rules,
                optimizer_of(self.optimizer),
                style=self.style,
                beside=frozenset(i for i, n in enumerate(names) if n in self.overlapped),
                products=self.products,
            )
            candidates = prepared.candidates(
                sizes,
                [self.uses[name] for name in names],
                stored=stored(self.pins, names) if self.pins else None,
            )
            self._folded[key] = Folded(model, candidates, names, self.blocks)
        return self._folded[key]

    def scheduled(self, a: Arrangement) -> Scheduled:
        """An arrangement's problem."""
        if a not in self._scheduled:
            self._scheduled[a] = Scheduled(self.folded(a), self.schedule(a), self.limit)
        return self._scheduled[a]

    def schedule(self, a: Arrangement) -> Schedule:
        """How a step of an arrangement is run.

        Raises:
            RequestError: zero-bubble with messages beside computing, which has no bound yet.
        """
        schedule = a.schedule(self.style, self.products)
        if self.overlapped and a.splits_backward:
            raise RequestError(
                f"{a.label} with messages of {', '.join(self.overlapped)} beside computing has no "
                "bound; search it without these, or leave zero-bubble out: name other schedules"
            )
        if not self.overlapped:
            return schedule
        return schedule.model_copy(update={"overlapped": self.overlapped})

    def bound(self, a: Arrangement) -> float:
        """The fourth bound: the least sum of the tables within the memory."""
        self.bounded += 1
        return self.scheduled(a).bound()

    def closer(self, a: Arrangement) -> float:
        """The same along what one choice waits for; after :meth:`bound`, whoever found that."""
        return self._after_bound(a).closer()

    def solve(self, a: Arrangement, then: Sequence[Question] = ()) -> Found:
        """The best strategies, priced exactly; ``then`` as of :meth:`raised`."""
        if a not in self._found:
            self.solved += 1
            self._found[a] = self.scheduled(a).solve()
            del self._scheduled[a]
        return self._found[a]

    def solve_bounded(self, a: Arrangement) -> Found:
        """As :meth:`solve` after :meth:`bound`, whoever found that."""
        if a not in self._found:
            self._after_bound(a)
        return self.solve(a)

    def _after_bound(self, a: Arrangement) -> Scheduled:
        """An arrangement's problem, whose bound was found, here if not yet."""
        if a not in self._scheduled:
            self.scheduled(a).bound()
        return self._scheduled[a]


def _mesh(a: Arrangement) -> Mesh:
    return a.batch, (a.pipeline, *a.sizes)


def _apart(a: Arrangement) -> str:
    """What is asked of tables beside figures of whole backwards.

    Nothing where gradients of weights are no tasks of their own, else what ``waiting`` takes; and
    ``halves`` where passes without these gradients are more than a few.
    """
    if not a.splits_backward:
        return ""
    return "halves" if a.pipeline - 1 > BUBBLE * a.microbatches else "waiting"


def search_whole(
    space: Sequence[Arrangement],
    problems: Problems,
    *,
    sampler: str = "bound",
    trials: int | None = None,
    seed: int = 0,
    storage: str | None = None,
    progress: Callable[[int, Arrangement, float], None] | None = None,
) -> Result:
    """The fastest arrangement that fits, and the proof.

    Args:
        space: what is searched.
        problems: its inner problems.
        sampler: see ``autoshard.search.sampler.SAMPLERS``.
        trials: at most so many are solved; default: as many as the proof needs, or 100 with a
            sampler other than ``bound``.
        seed: of a sampler other than ``bound``.
        storage: URL of an Optuna storage, which several workers may share; default: in memory.
        progress: told the number solved, the arrangement just solved, and its seconds.

    The answer depends on the space and ``trials`` alone for ``bound``, and on the seed for others.
    """
    import optuna

    from autoshard.search.sampler import BoundSampler, sampler_of, taken

    order = BestFirst(space, problems)
    choices = {
        name: sorted({params[name] for params in order.named}, key=str) for name in order.named[0]
    }
    prices: dict[int, _Price] = {}
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            direction="minimize",
            sampler=sampler_of(sampler, seed, BoundSampler(order, choices)),
            storage=storage,
            study_name=_study_name(space, problems) if storage else None,
            load_if_exists=True,
        )
        most = trials or (TRIALS if sampler != "bound" else len(space))
        asked = 0
        while asked < 4 * most:
            _read(study, order, prices)
            if len(prices) >= min(most, len(space)):
                break
            if sampler == "bound" and order.next(taken(study)) is None:
                break
            asked += 1
            trial = study.ask()
            params = {n: trial.suggest_categorical(n, values) for n, values in choices.items()}
            i = order.of(params)
            if i is None:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                continue
            found = problems.solve(space[i], order.likely() if sampler == "bound" else ())
            _record(trial, space[i], found)
            study.tell(trial, found.step.step_time.total_s)
            if progress is not None:
                progress(len(prices) + 1, space[i], found.step.step_time.total_s)
        # What another worker took and never finished is looked at here.
        order.restore()
        while sampler == "bound" and trials is None:
            _read(study, order, prices)
            rest = [p for i in prices if (p := space[i].params)]
            following = order.next(rest)
            if following is None:
                break
            i = order.of(following)
            assert i is not None
            found = problems.solve(space[i])
            prices[i] = _Price(found.step.step_time, found.step.memory, found.bound)
            order.solved(prices[i].step_time, prices[i].memory)
        result = _result(space, problems, order, prices, study)
        study.set_user_attr("certificate", _attributes(result.certificate))
        study.set_user_attr("best", result.arrangement.label)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return result


def _record(trial: Trial, a: Arrangement, found: Found) -> None:
    step, memory = found.step.step_time, found.step.memory
    trial.set_user_attr("label", a.label)
    trial.set_user_attr("step_time", step.model_dump())
    trial.set_user_attr("memory", memory.model_dump())
    trial.set_user_attr("lower_bound_s", found.bound)
    if found.fits and found.bound:
        trial.set_user_attr("gap", step.total_s / found.bound - 1)
    if memory.limit_bytes is not None:
        over = (memory.total_bytes - memory.limit_bytes) / max(1, memory.limit_bytes)
        trial.set_constraint("memory over the limit", over)


def _read(study: Study, order: BestFirst, prices: dict[int, _Price]) -> None:
    """Take what finished trials say, this worker's and others'."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        i = order.of(trial.params)
        if i is None or i in prices:
            continue
        attrs = trial.user_attrs
        price = _Price(
            StepTime.model_validate(attrs["step_time"]),
            Memory.model_validate(attrs["memory"]),
            float(attrs["lower_bound_s"]),
        )
        prices[i] = price
        order.solved(price.step_time, price.memory)


def _result(
    space: Sequence[Arrangement],
    problems: Problems,
    order: BestFirst,
    prices: Mapping[int, _Price],
    study: Study,
) -> Result:
    if not prices:
        # Not even the leanest of any arrangement fits.
        prices = _closest(space, problems)
    best = min(prices, key=lambda i: (prices[i].rank, i))
    found = problems.solve(space[best])
    total = found.step.step_time.total_s
    bounds = [p.bound for p in prices.values() if p.memory.fits]
    certificate = Certificate(
        step_time_s=total,
        lower_bound_s=min([total, order.lowest, *bounds]),
        arrangements=len(space),
        bounded=problems.bounded,
        solved=len(prices),
    )
    others = sorted((i for i in prices if i != best), key=lambda i: (prices[i].rank, i))
    return Result(
        arrangement=space[best],
        found=found,
        folded=problems.folded(space[best]),
        certificate=certificate,
        alternatives=tuple(_alternative(space[i], prices[i], prices[best]) for i in others),
        study=study,
    )


def _closest(space: Sequence[Arrangement], problems: Problems) -> dict[int, _Price]:
    """The arrangement that stores and keeps the least, priced."""
    lean = {i: problems.least_bytes(a) for i, a in enumerate(space)}
    i = min(lean, key=lambda i: lean[i])
    found = problems.solve(space[i])
    return {i: _Price(found.step.step_time, found.step.memory, found.bound)}


def _alternative(a: Arrangement, price: _Price, best: _Price) -> Alternative:
    from autoshard.search.outer import why

    memory, step = price.memory, price.step_time
    return Alternative(
        label=a.label,
        mesh=a.mesh,
        step_time_s=step.total_s,
        memory_bytes=memory.total_bytes,
        fits=memory.fits,
        why=why(step, memory, best.step_time),
    )


def _attributes(certificate: Certificate) -> dict[str, float | int]:
    return {
        "step_time_s": certificate.step_time_s,
        "lower_bound_s": certificate.lower_bound_s,
        "gap": certificate.gap,
        "arrangements": certificate.arrangements,
        "bounded": certificate.bounded,
        "solved": certificate.solved,
    }


def _study_name(space: Sequence[Arrangement], problems: Problems) -> str:
    """Name in a storage: searches of the same space for the same thing share a study."""
    graph = problems.graphs(max(a.batch for a in space))
    if not space:
        raise RequestError("the space has no arrangement")
    asked = [*(a.label for a in space), problems.optimizer, problems.limit, problems.style]
    asked += [problems.products, *problems.overlapped]
    asked += [graph.fingerprint, problems.blocks, json.dumps(problems.cluster.to_json())]
    asked += [f"{name} {spec}" for name, spec in sorted(problems.pins.items())]
    digest = sha256(json.dumps(asked).encode()).hexdigest()[:12]
    where = f"{problems.cluster.devices} {problems.cluster.name}"
    return f"{graph.name} on {where}, whole space, {digest}"
