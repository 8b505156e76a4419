"""The inner search: for one mesh, the fastest strategies that fit, with a proof of how good.

Gradients that travel in buckets may hide behind backward; how much of them does is only known from
the simulation of a finished program. So the additive problem is solved with all of them hidden
(which bounds every schedule from below), with none hidden, with a third exposed, and with the share
that the simulation of the best saw, until it repeats; each answer is priced exactly, the best kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.candidates import BY_TOKENS, AxisUse, Candidates, Proposals, Rules, Stored
from autoshard.cluster import Cluster
from autoshard.errors import MeshError
from autoshard.graph import ModelGraph
from autoshard.kernels import Style
from autoshard.plan import CollectiveGroup, Memory, StepTime
from autoshard.program import DEFAULT_BUCKET_BYTES, Program
from autoshard.search.cost import CostModel, build_tables
from autoshard.search.memory import optimizer_of
from autoshard.search.preference import preference
from autoshard.search.price import Priced, price
from autoshard.search.problem import LEANEST, Answer, Assignment, Problem
from autoshard.sharding.layout import Layout, R, Shape
from autoshard.sharding.strategy import Passing, Strategy

FIRST_SHARES = (1.0, 0.35)
"""Exposed shares that are tried after 0, before those that simulations give."""

ROUNDS = 4
"""Times that the exposed share, or the room for temporaries, is corrected from exact figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best program found for one mesh.

    Attributes:
        axis_names: names of the mesh's axes, those of size 1 included.
        sizes: their sizes.
        uses: what each axis larger than 1 was allowed to be used for.
        strategies: strategy of every node, over the axes larger than 1.
        regather: (consumer, operand index) of the edges that gather again in backward.
        program: what a device executes.
        step_time: its exact figures.
        memory: its exact figures; ``memory.fits`` says whether it is within the limit.
        collectives: its messages, grouped.
        lower_bound_s: no strategies on this mesh (for these uses) are faster.
    """

    axis_names: tuple[str, ...]
    sizes: Shape
    uses: tuple[AxisUse, ...]
    strategies: Mapping[str, Strategy]
    regather: frozenset[tuple[str, int]]
    program: Program
    step_time: StepTime
    memory: Memory
    collectives: tuple[CollectiveGroup, ...]
    lower_bound_s: float

    @property
    def fits(self) -> bool:
        """Whether the memory is within the limit."""
        return self.memory.fits

    @property
    def gap(self) -> float:
        """How much slower than the bound it is at most, as a share of the bound."""
        return self.step_time.total_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    @property
    def mesh(self) -> str:
        """``data=4, model=2``."""
        return ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.sizes, strict=True))


@dataclass(slots=True)
class Prepared:
    """What does not depend on the mesh: rules and proposals of a graph, found once."""

    graph: ModelGraph
    rules: Rules = field(init=False)
    proposals: Proposals = field(init=False)
    batch: Proposals = field(init=False)
    _tokens: Proposals | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Find them."""
        self.rules = Rules(self.graph)
        self.proposals = Proposals(self.graph, self.rules)
        self.batch = Proposals(self.graph, self.rules, only_inputs=True)

    @property
    def tokens(self) -> Proposals:
        """Cuts of the tokens of each sample, found where they are asked for."""
        if self._tokens is None:
            self._tokens = Proposals(self.graph, self.rules, only_inputs=True, dim=1)
        return self._tokens

    def candidates(
        self,
        sizes: Shape,
        uses: Sequence[AxisUse],
        *,
        passing: Passing = "star",
        pins: Mapping[str, Layout] | None = None,
        stored: Stored | None = None,
    ) -> Candidates:
        """Strategies on axes of ``sizes``; arguments as of :class:`Candidates`."""
        return Candidates(
            self.graph,
            sizes,
            uses=tuple(uses),
            passing=passing,
            pins=pins,
            rules=self.rules,
            proposals=self.proposals,
            batch=self.batch,
            tokens=self.tokens if any(use in BY_TOKENS for use in uses) else None,
            stored=stored,
        )


def solve(
    graph: ModelGraph,
    cluster: Cluster,
    sizes: Sequence[int],
    axis_names: Sequence[str],
    uses: Sequence[AxisUse] | None = None,
    *,
    optimizer: str = "adamw",
    memory_limit: int | None = None,
    pins: Mapping[str, Layout] | None = None,
    passing: Passing = "star",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    fold: bool = True,
    prepared: Prepared | None = None,
    style: Style = "eager",
) -> Solution:
    """The fastest program for ``graph`` on a mesh of ``sizes``, within the memory limit.

    Args:
        graph: what is computed.
        cluster: what it runs on; the sizes multiply to its devices.
        sizes: sizes of the axes, the last one nearest.
        axis_names: their names.
        uses: what each axis may be used for (``candidates.AxisUse``); default ``any``.
        optimizer: see ``search.memory.OPTIMIZERS``.
        memory_limit: bytes of a device that may be used, the reserve included; None: no limit.
        pins: parameter's dotted name -> layout over the axes larger than 1.
        passing: which pass-through strategies are offered.
        bucket_bytes: size at which fused gradients are sent.
        fold: whether repeated blocks are solved once.
        prepared: rules and proposals, if at hand.
        style: how operators between products are run.

    The result may not fit: then it is the leanest one, and ``fits`` is False.
    """
    search = inner_search(
        graph,
        cluster,
        sizes,
        axis_names,
        uses,
        optimizer=optimizer,
        memory_limit=memory_limit,
        pins=pins,
        passing=passing,
        bucket_bytes=bucket_bytes,
        fold=fold,
        prepared=prepared,
        style=style,
    )
    program, priced, bound = search.run()
    return search.solution(tuple(axis_names), tuple(sizes), program, priced, bound)


def inner_search(
    graph: ModelGraph,
    cluster: Cluster,
    sizes: Sequence[int],
    axis_names: Sequence[str],
    uses: Sequence[AxisUse] | None,
    *,
    optimizer: str,
    memory_limit: int | None,
    pins: Mapping[str, Layout] | None,
    passing: Passing = "star",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    fold: bool = True,
    prepared: Prepared | None = None,
    style: Style = "eager",
) -> InnerSearch:
    """The search of one mesh, its tables built; arguments as of :func:`solve`."""
    if len(sizes) != len(axis_names):
        raise MeshError(
            f"{len(sizes)} sizes for {len(axis_names)} axes: {tuple(sizes)}, {tuple(axis_names)}"
        )
    active = [i for i, s in enumerate(sizes) if s > 1]
    mesh = tuple(sizes[i] for i in active)
    anything: AxisUse = "any"
    given = tuple(uses) if uses is not None else (anything,) * len(sizes)
    if len(given) != len(sizes):
        raise MeshError(f"{len(given)} uses for {len(sizes)} axes: {given}, {tuple(axis_names)}")
    prepared = prepared or Prepared(graph)
    model = CostModel(graph, cluster, mesh, prepared.rules, optimizer_of(optimizer), style=style)
    candidates = prepared.candidates(mesh, [given[i] for i in active], passing=passing, pins=pins)
    names = tuple(axis_names[i] for i in active)
    return InnerSearch(model, candidates, names, memory_limit, bucket_bytes, fold)


class InnerSearch:
    """One mesh under one limit, which may be changed."""

    def __init__(
        self,
        model: CostModel,
        candidates: Candidates,
        axis_names: tuple[str, ...],
        memory_limit: int | None,
        bucket_bytes: int,
        fold: bool,
    ) -> None:
        self.model, self.candidates, self.axis_names = model, candidates, axis_names
        self.limit, self.bucket_bytes = memory_limit, bucket_bytes
        self.problem = Problem(
            model.graph, build_tables(model, candidates, bucket_bytes), fold=fold
        )
        self._seen: dict[tuple[bytes, frozenset[int]], tuple[Program, Priced]] = {}

    def solution(
        self,
        axis_names: tuple[str, ...],
        sizes: Shape,
        program: Program,
        priced: Priced,
        bound: float,
    ) -> Solution:
        """A priced program as the answer for a mesh that may have axes of size 1."""
        return Solution(
            axis_names=axis_names,
            sizes=sizes,
            uses=self.candidates.uses,
            strategies=program.strategies,
            regather=program.regather,
            program=program,
            step_time=priced.step_time,
            memory=priced.memory,
            collectives=priced.collectives,
            lower_bound_s=bound,
        )

    def run(self) -> tuple[Program, Priced, float]:
        """The best program, its figures, and the bound."""
        (answer, one), room = self._within(0.0, None)
        programs = [one]
        if not one[1].memory.fits:
            return *one, answer.bound
        tried = {0.0}
        todo = list(FIRST_SHARES)
        while todo and len(tried) < ROUNDS + len(FIRST_SHARES):
            exposed = todo.pop(0)
            tried.add(exposed)
            (_, one), room = self._within(exposed, room)
            programs.append(one)
            share = round(min(programs, key=_rank)[1].exposed_share, 2)
            if not todo and share not in tried:
                todo.append(share)
        best = min(programs, key=_rank)
        return *best, min(self._bound(answer), best[1].step_time.total_s)

    def closest(self, limit: int) -> tuple[Program, Priced]:
        """What :meth:`run` begins with under ``limit``: it fits exactly where an answer does."""
        self.limit = limit
        return self._within(0.0, None)[0][1]

    @cached_property
    def least_bytes(self) -> float:
        """Bytes of the leanest program, without what the fullest moment holds beyond them."""
        return self._lean.num_bytes + self.model.cluster.reserve_bytes

    def leanest(self) -> tuple[Program, Priced]:
        """The program that takes the fewest bytes."""
        return self._price(self._lean)

    @cached_property
    def _lean(self) -> Assignment:
        return self.problem.minimum(0.0, LEANEST)[1]

    def _bound(self, hidden: Answer) -> float:
        """The highest bound found; ``hidden`` is the answer with all gradients hidden."""
        limit = 0.0 if self.limit is None else float(self.limit - self.model.cluster.reserve_bytes)
        rest = (self.problem.bound(e, hidden.per_byte, limit) for e in (0.5, 1.0))
        return max(hidden.bound, *rest)

    def _within(
        self, exposed: float, room: float | None
    ) -> tuple[tuple[Answer, tuple[Program, Priced]], float | None]:
        """Solve with the additive limit corrected until the exact memory fits.

        ``room`` is what exact memory had beyond the additive sum (temporaries, reserve). The
        answer's bound is that of the loosest limit: the reserve alone.
        """
        if self.limit is None:
            answer = self.problem.solve(exposed, None)
            return (answer, self._price(answer.assignment)), None
        reserve = float(self.model.cluster.reserve_bytes)
        loosest: Answer | None = None
        best: tuple[tuple[Program, Priced], float] | None = None
        room = reserve if room is None else room
        for _ in range(ROUNDS):
            answer = self.problem.solve(exposed, self.limit - room)
            loosest = loosest or answer
            priced = self._price(answer.assignment)
            total = priced[1].memory.total_bytes
            beyond = total - answer.assignment.num_bytes
            if best is None or _rank(priced) < _rank(best[0]):
                best = priced, beyond
            if total <= self.limit or not answer.fits:
                break
            room = max(beyond, room + 0.001 * self.limit)
        assert best is not None
        assert loosest is not None
        if not best[0][1].memory.fits:
            best = min(best, (self.leanest(), best[1]), key=lambda found: _rank(found[0]))
        return (loosest, best[0]), best[1]

    def _price(self, found: Assignment) -> tuple[Program, Priced]:
        key = (found.choice.tobytes(), found.regather)
        if key not in self._seen:
            program = program_of_assignment(
                self.model, self.problem, found, self.axis_names, self.bucket_bytes
            )
            self._seen[key] = program, price(self.model, program)
        program, priced = self._seen[key]
        memory = priced.memory.model_copy(update={"limit_bytes": self.limit})
        return program, replace(priced, memory=memory)


def program_of_assignment(
    model: CostModel,
    problem: Problem,
    found: Assignment,
    axis_names: tuple[str, ...],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Program:
    """The program that makes the choices of ``found``."""
    tables = problem.tables
    strategies = {name: tables.lists[v][found.choice[v]] for v, name in enumerate(tables.variables)}
    whole = Strategy((), (), (R,) * len(model.sizes), 1.0)
    strategies |= {n.name: whole for n in model.graph.nodes if n.op == "constant"}
    regather = frozenset(
        (tables.variables[tables.edges[e][1]], tables.edges[e][2]) for e in found.regather
    )
    return Program(
        model.graph,
        axis_names,
        model.sizes,
        strategies,
        model.resharder,
        regather=regather,
        bucket_bytes=bucket_bytes,
        rules=model.rules,
    )


def _rank(found: tuple[Program, Priced]) -> tuple[bool, float]:
    return preference(found[1].step_time, found[1].memory)
