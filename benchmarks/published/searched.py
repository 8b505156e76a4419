"""A case of published runs beside the plan that the search of the whole space finds for it.

The publisher's configurations are priced as ``benchmarks.published_runs`` prices them. Messages
beside computing (``overlapped``), products in other dtypes and the style of kernels belong to the
publisher's software: the search is told of them.

Memory is the device's. A publisher's configuration may be predicted to need more (it ran): where
the plan within the device's memory is slower then, another is found within as much as theirs needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoshard.errors import AutoshardError
from autoshard.graph import ModelGraph
from autoshard.plan import Memory, Schedule, StepTime
from autoshard.planner.family import Family
from autoshard.planner.plan import Plan
from autoshard.search.space import Arrangement, arrangements
from autoshard.search.whole import Problems, search_whole
from autoshard.stretch import Growth
from benchmarks.published.batches import BATCHES
from benchmarks.published.cases import Case, Row
from benchmarks.published.pricing import Known, captured, plan_of
from benchmarks.published.rows import Request, request

OPTIMIZER = "adamw"
"""What ``autoshard.estimate`` prices rows with."""

SAME = 1e-9
"""Share of a step below which two are as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """One configuration and its price.

    Attributes:
        label: its arrangement.
        seconds: of a step.
        parts: of them: computing, optimizer, exposed messages, and waiting for other stages.
        memory_bytes: of the fullest device.
        parameters_bytes: of them, parameters.
        plain_seconds: the same with no messages beside computing; None: there were none.
    """

    label: str
    seconds: float
    parts: Mapping[str, float]
    memory_bytes: int
    parameters_bytes: int
    plain_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A case with both configurations, or why there are not.

    Attributes:
        case: its name.
        ids: of its rows.
        reason: why it is not compared; empty where it is.
        best: id of the row that is predicted the fastest.
        measured_s: published seconds of that row.
        products: what products run in.
        overlapped: axes whose messages run beside computing.
        limit_bytes: of memory that the plan may use.
        raised: whether that is more than the device has: what theirs is predicted to need.
        within_s: seconds of the plan within the device's memory, where it is raised; None: nothing
            fits.
        theirs: the publisher's.
        ours: the plan's.
        lacks: what theirs has that no arrangement of the space has.
        at_theirs_s: seconds of their arrangement with our strategies, where the space has it and
            the plan is slower.
        solved: arrangements that the search solved.
        gap: between the search's best and its bound.
    """

    case: str
    ids: tuple[str, ...]
    reason: str = ""
    best: str = ""
    measured_s: float = 0.0
    products: str = "native"
    overlapped: tuple[str, ...] = ()
    limit_bytes: int = 0
    raised: bool = False
    within_s: float | None = None
    theirs: Configured | None = None
    ours: Configured | None = None
    lacks: tuple[str, ...] = ()
    at_theirs_s: float | None = None
    solved: int = 0
    gap: float = 0.0

    @property
    def gain(self) -> float:
        """By how much the plan makes more steps in the same time, as a share."""
        assert self.theirs is not None
        assert self.ours is not None
        return self.theirs.seconds / self.ours.seconds - 1

    @property
    def plain_gain(self) -> float:
        """The same with no messages beside computing."""
        assert self.theirs is not None
        assert self.ours is not None
        theirs, ours = (c.plain_seconds or c.seconds for c in (self.theirs, self.ours))
        return theirs / ours - 1

    @property
    def is_slower(self) -> bool:
        """Whether the plan is slower than the publisher's."""
        return self.gain < -SAME

    def document(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        out = asdict(self)
        if not self.reason:
            out |= {"gain": self.gain, "plain_gain": self.plain_gain}
        return out


def compare(case: Case, known: Known) -> Compared:
    """Search for a case; what goes wrong with it is its reason."""
    ids = tuple(row["id"] for row in case.rows)
    try:
        return _compared(case, known, ids)
    except AutoshardError as error:
        return Compared(case=case.name, ids=ids, reason=str(error).splitlines()[0])


def _compared(case: Case, known: Known, ids: tuple[str, ...]) -> Compared:
    plans = [plan_of(request(row), known) for row in case.rows]
    at = min(range(len(plans)), key=lambda i: plans[i].step_time.total_s)
    row, plan, asked = case.rows[at], plans[at], request(case.rows[at])
    schedule = plan.schedule
    theirs = _theirs(row, asked, plan, known)
    search = _Search(row, asked, schedule, known)
    limit, within_s = asked.cluster.device.memory_bytes, None
    ours = search.plan(limit)
    raised = plan.memory.total_bytes > limit and (ours is None or ours.seconds > theirs.seconds)
    if raised:
        within_s = None if ours is None else ours.seconds
        limit = plan.memory.total_bytes
        ours = search.plan(limit)
    found = Compared(
        case=case.name,
        ids=ids,
        reason="nothing of the space fits" if ours is None else "",
        best=row["id"],
        measured_s=float(row["step_time_s"]),
        products=schedule.products,
        overlapped=schedule.overlapped,
        limit_bytes=limit,
        raised=raised,
        within_s=within_s,
        theirs=theirs,
        ours=ours,
        lacks=search.lacks(row, plan),
        solved=search.solved,
        gap=search.gap,
    )
    if ours is None or not found.is_slower:
        return found
    return replace(found, at_theirs_s=search.at_theirs(row, plan, limit))


def _theirs(row: Row, asked: Request, plan: Plan, known: Known) -> Configured:
    plain = None
    if plan.schedule.overlapped:
        kind = plan.schedule.recompute, plan.schedule.recomputed_blocks
        options = {**asked.options, "overlapped": ()}
        again = replace(asked, options=options, recompute=(kind,))
        plain = plan_of(again, known).step_time.total_s
    label = _arrangement(row, plan.schedule).label
    if plan.schedule.recomputed_blocks is not None and plan.schedule.recompute != "none":
        label += f" of {plan.schedule.recomputed_blocks} blocks"
    if row["fsdp"] == "yes":
        label += ", parameters cut"
    return _configured(label, plan.step_time, plan.memory, plain)


def _configured(label: str, step: StepTime, memory: Memory, plain: float | None) -> Configured:
    return Configured(
        label=label,
        seconds=step.total_s,
        parts={
            "computing": step.compute_s,
            "optimizer": step.optimizer_s,
            "messages": step.exposed_communication_s,
            "waiting": step.waiting_s,
        },
        memory_bytes=memory.total_bytes,
        parameters_bytes=memory.parameters_bytes,
        plain_seconds=plain,
    )


def _arrangement(row: Row, schedule: Schedule) -> Arrangement:
    """The publisher's, in the terms of the space; empty columns are 1."""
    size = {name: int(row[name] or 1) for name in ("tp", "pp", "dp", "cp", "micro_batch")}
    return Arrangement(
        pipeline=size["pp"],
        replica=1,
        data=size["dp"],
        context=size["cp"],
        model=size["tp"],
        micro_batch=size["micro_batch"],
        microbatches=schedule.microbatches,
        virtual_stages=schedule.virtual_stages,
        order="interleaved" if schedule.virtual_stages > 1 else "1f1b",
        recompute=schedule.recompute,
    )


class _Search:
    """The search of a case, and prices of what it solved as the publisher's software runs it."""

    def __init__(self, row: Row, asked: Request, schedule: Schedule, known: Known) -> None:
        self.schedule, self.cluster = schedule, asked.cluster
        self.solved, self.gap = 0, 0.0

        def graph(batch: int) -> ModelGraph:
            at_batch = replace(asked, batch=batch, sizes=(batch, *asked.sizes[1:]))
            return captured(at_batch, known)[0].graph

        first, second = BATCHES[0], 2 * BATCHES[0]
        self.family = Family(Growth(graph(first), graph(second)), int(row["layers"]))
        self.space = arrangements(
            asked.cluster,
            asked.options["global_batch"],
            self.family.blocks,
            tokens=self.family.tokens,
            experts=self.family.experts,
            recompute=self.family.recomputation,
            orders=("1f1b", "interleaved"),  # those of the rows
            ends=self.family.ends(
                asked.cluster, schedule.style, self.family.recomputation, schedule.products
            ),
        )

    def plan(self, limit: int) -> Configured | None:
        """The fastest that fits."""
        problems = self._problems(limit)
        result = search_whole(self.space, problems)
        self.solved, self.gap = result.certificate.solved, result.certificate.gap
        return self.price(problems, result.arrangement)

    def _problems(self, limit: int) -> Problems:
        return Problems(
            self.family.few,
            self.family.blocks,
            self.cluster,
            OPTIMIZER,
            limit,
            style=self.schedule.style,
            overlapped=self.schedule.overlapped,
            products=self.schedule.products,
        )

    def price(self, problems: Problems, a: Arrangement) -> Configured | None:
        """An arrangement, with our strategies; None: too large."""
        step = problems.solve(a).step
        if not step.memory.fits:
            return None
        plain = self._plain_seconds(problems, a) if self.schedule.overlapped else None
        return _configured(a.label, step.step_time, step.memory, plain)

    def _plain_seconds(self, problems: Problems, a: Arrangement) -> float:
        """Of the same strategies, with no messages beside computing."""
        found, schedule = problems.solve(a), problems.schedule(a)
        alone = schedule.model_copy(update={"overlapped": ()})
        step = problems.folded(a).step(found.tied, alone, problems.limit, found.others)
        return step.step_time.total_s

    def lacks(self, row: Row, plan: Plan) -> tuple[str, ...]:
        """What the publisher's has that no arrangement of the space has."""
        theirs, schedule = _arrangement(row, plan.schedule), plan.schedule
        near = [a for a in self.space if a.pipeline == theirs.pipeline]
        out = []
        if not near:
            out.append(f"{theirs.pipeline} stages of {self.family.blocks} blocks")
        if near and all(a.virtual_stages != theirs.virtual_stages for a in near):
            out.append(f"{theirs.virtual_stages} chunks a stage")
        if near and all(a.micro_batch != theirs.micro_batch for a in near):
            out.append(f"microbatches of {theirs.micro_batch}")
        some = schedule.recomputed_blocks is not None
        if schedule.recompute != "none" and some:
            out.append("recomputation of some blocks")
        if not out and not self._same(theirs):
            out.append("another use of the axes")
        return tuple(out)

    def at_theirs(self, row: Row, plan: Plan, limit: int) -> float | None:
        """Seconds of the publisher's arrangement with strategies of our own; None: none fit."""
        problems = self._problems(limit)
        problems.prepare(self.space)
        near = self._same(_arrangement(row, plan.schedule))
        prices = [self.price(problems, a) for a in near if problems.floors.room(a) >= 0]
        best = _fastest(prices)
        return None if best is None else best.seconds

    def _same(self, theirs: Arrangement) -> list[Arrangement]:
        """Arrangements of the space that differ in recomputation and replicas alone."""

        def sizes(a: Arrangement) -> tuple[object, ...]:
            axes = (a.pipeline, a.replica * a.data, *a.sizes[2:])
            return *axes, a.micro_batch, a.virtual_stages

        return [a for a in self.space if sizes(a) == sizes(theirs)]


def _fastest(offers: Sequence[Configured | None]) -> Configured | None:
    return min((c for c in offers if c), key=lambda c: c.seconds, default=None)
