"""The whole space for ``optimize``: a model's family, its arrangements, the best as a solution."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from autoshard.candidates import Rules
from autoshard.errors import (
    AutoshardError,
    InputError,
    MeshError,
    RequestError,
    SpecError,
    UnknownNameError,
)
from autoshard.graph import ModelGraph
from autoshard.plan import Schedule
from autoshard.planner.family import Family, family_of
from autoshard.planner.request import SHORT_AXES, check_sizes
from autoshard.planner.schedule import check_products, check_software
from autoshard.planner.whole_nearest import WholeAsked, explained_whole
from autoshard.program import Program
from autoshard.search import Solution
from autoshard.search.demands import SIZES, Demands
from autoshard.search.divided import Divided
from autoshard.search.space import AXES, Arrangement, Range
from autoshard.search.step import segments
from autoshard.search.whole import Problems, Result, search_whole
from autoshard.sharding.spec import PartitionSpec
from autoshard.sharding.strategy import Strategy
from autoshard.workers import Workers

if TYPE_CHECKING:
    from autoshard.kernels import Products, Style
    from autoshard.planner.crew import Crew
    from autoshard.planner.keep import Keeping
    from autoshard.planner.planning import Constraints, Request

SPACES = ("plain", "full")
"""What ``optimize`` searches: what the bundled runtime runs, or everything that can be priced."""

SHORTER = tuple(short for short, axis in SHORT_AXES.items() if axis in AXES)

_AXIS = re.compile(r"\s*([a-z_-]+)\s*(<=|>=|=)\s*(\d+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The best of the whole space.

    Attributes:
        graph: of one microbatch, all blocks.
        solution: its strategies and figures; axes are those of one stage.
        schedule: how a step is run.
        result: what the search says of itself.
        points: what was searched.
        problems: its inner problems.
    """

    graph: ModelGraph
    solution: Solution
    schedule: Schedule
    result: Result
    points: Sequence[Arrangement]
    problems: Problems

    @property
    def note(self) -> str:
        """What was searched, in words."""
        c = self.result.certificate
        return (
            f"space: {c.arrangements:,} arrangements of stages, replicas, data, expert, context "
            "and model axes, schedules, microbatches and recomputation; "
            f"{c.bounded:,} bounded by their tables, {c.solved:,} solved and priced; the plan is "
            f"within {c.gap:.2%} of the bound, which is of blocks alike"
        )

    @property
    def mixture(self) -> str | None:
        """Which blocks are not as the others, in words; None: none."""
        others = self.result.found.others
        if others is None:
            return None
        return (
            f"blocks: {others.blocks} of {self.result.folded.blocks} have strategies that take "
            "more memory and less time than those of the rest"
        )


def read_axes(texts: Sequence[str] | Mapping[str, int | Range] | None) -> dict[str, Range]:
    """Ranges of sizes: ``("model<=8", "micro-batch=2")``, or ``{"model": (1, 8), "pipeline": 4}``.

    Raises:
        UnknownNameError: no such size.
        RequestError: unreadable, or a range that holds no number.
    """
    found: dict[str, Range] = {}

    def narrow(name: str, least: int, most: int | None) -> None:
        axis = SHORT_AXES.get(name, name.replace("_", "-"))
        if axis not in SIZES:
            raise UnknownNameError("mesh axis", name, (*SIZES, *SHORTER))
        low, high = found.get(axis, (1, None))
        low = max(low, least)
        high = most if high is None else high if most is None else min(high, most)
        if low < 1 or (high is not None and high < low):
            raise RequestError(
                f"axis {axis!r} cannot be at least {low} and at most {high}; name a range that "
                "holds a number from 1"
            )
        found[axis] = low, high

    if isinstance(texts, Mapping):
        for name, value in texts.items():
            narrow(name, *((value, value) if isinstance(value, int) else value))
        return found
    for text in texts or ():
        match = _AXIS.fullmatch(text)
        if match is None:
            raise RequestError(
                f"cannot read the axis {text!r}; write it as model<=8, data>=2 or pipeline=4"
            )
        size = int(match[3])
        narrow(
            match[1],
            size if match[2] in ("=", ">=") else 1,
            size if match[2] in ("=", "<=") else None,
        )
    return found


def asked_of(
    request: Request,
    model: object,
    *,
    keeping: Keeping | None = None,
    example_inputs: object | None,
    constraints: Constraints,
    axes: Sequence[str] | Mapping[str, int | Range] | None,
    within: Sequence[str] | Mapping[str, str] | None,
    recompute: str | Sequence[str] | None,
    schedule: str | Sequence[str] | None = None,
    global_batch: int | None,
    seq_len: int | None,
    dtype: str | None,
    limit: int | None,
    kernels: str,
    products: str = "native",
    overlapped: str | Sequence[str] = (),
    crew: Crew | None = None,
) -> WholeAsked:
    """What is asked of the whole space, the model captured; arguments as of ``optimize``.

    ``keeping`` is what is kept of a file.

    Raises:
        RequestError: says what is wrong, or of the plain space only.
    """
    beside = (overlapped,) if isinstance(overlapped, str) else tuple(dict.fromkeys(overlapped))
    check_software(kernels, products, beside)
    check_products(products, request.cluster)
    if not request.is_free:
        raise RequestError(
            "strategy and mesh are of the plain space; in the full one name ranges of axes: "
            "axes=['model=8', 'pipeline<=4']"
        )
    if example_inputs is not None:
        raise InputError(
            "example_inputs have one batch, the full space has microbatches of many sizes; leave "
            "them out, or leave space at 'plain'"
        )
    check_sizes(global_batch=global_batch, seq_len=seq_len)
    demands = Demands(
        sizes=read_axes(axes),
        within=read_within(within),
        recompute=(recompute,) if isinstance(recompute, str) else tuple(recompute or ()),
        schedules=(schedule,) if isinstance(schedule, str) else tuple(schedule or ()),
        pins=read_pins(constraints),
    )
    capture = crew.family if crew else family_of
    family = capture(model, seq_len=seq_len, dtype=dtype, say=request.say)
    if keeping is not None:
        demands = keeping.demands(demands, family.blocks, family.recomputation)
    asked = WholeAsked(
        family=family,
        cluster=request.cluster,
        global_batch=global_batch or request.cluster.devices,
        optimizer=request.optimizer,
        limit=limit,
        demands=demands,
        style=cast("Style", kernels),
        products=cast("Products", products),
        overlapped=beside,
    )
    if keeping is None:
        return asked
    try:
        # The space may lack it: its numbers of recomputed blocks are round ones.
        return replace(asked, also=keeping.arrangement(asked))
    except AutoshardError:
        return asked  # it cannot be, which the notes say


def search_space(
    asked: WholeAsked,
    model: object,
    *,
    suggest: bool,
    dtype: str | None,
    sampler: str,
    trials: int | None,
    seed: int,
    storage: str | None,
    keeping: Keeping | None,
    say: Callable[[str], None],
    workers: Workers | None = None,
) -> Whole:
    """The fastest arrangement of what is asked for.

    Args:
        asked: what is searched.
        model: what its family is of.
        suggest: whether to look, where nothing fits, for the nearest changes that do.
        dtype: of the model.
        sampler: see :func:`autoshard.search.whole.search_whole`, as for the rest.
        trials: see there.
        seed: see there.
        storage: see there.
        keeping: what of ``asked`` is kept of a file.
        say: told of each step.
        workers: who looks; None: this process.

    Raises:
        InfeasibleError: nothing fits; names what binds and what would fit.
        MeshError: no arrangement is as demanded.
    """
    problems = asked.problems()
    try:
        space = asked.points()
    except MeshError as error:
        if keeping is None:
            raise
        raise MeshError(
            f"{error}; {', '.join(keeping.kept.said.values())} are kept of {keeping.name}: what is "
            "named with --free (free=[...]) is searched all the same"
        ) from None
    say(f"searching {len(space):,} arrangements")

    def told(number: int, a: Arrangement, seconds: float) -> None:
        say(f"solved {number}: {a.label}: {seconds * 1e3:,.1f} ms")

    result = search_whole(
        space,
        problems if workers is None else Divided(problems, workers),
        sampler=sampler,
        trials=trials,
        seed=seed,
        storage=storage,
        progress=told,
    )
    if not result.found.fits:

        def regraph(length: int) -> Family:
            return family_of(model, seq_len=length, dtype=dtype, say=lambda text: None)

        partial = ", ".join(
            [f"sampler {sampler}"] * (sampler != "bound")
            + [f"{trials} trials"] * (trials is not None)
        )
        raise explained_whole(
            replace(asked, partial=partial), problems, regraph, say, suggest=suggest
        )
    graph = asked.family.whole(result.arrangement.batch)
    return Whole(
        graph=graph,
        solution=solution_of(result, graph),
        schedule=problems.schedule(result.arrangement),
        result=result,
        points=space,
        problems=problems,
    )


def solution_of(result: Result, graph: ModelGraph) -> Solution:
    """The found strategies on the graph of all blocks."""
    folded, found, arrangement = result.folded, result.found, result.arrangement
    few: dict[int, tuple[dict[str, Strategy], frozenset[tuple[str, int]]]] = {}
    for tied, own in folded.shared_out(found.tied, found.others, arrangement.schedule()):
        few |= dict.fromkeys(own, (folded.strategies(tied.choice), folded.regather(tied.again)))
    strategies: dict[str, Strategy] = {}
    regather: set[tuple[str, int]] = set()
    for i, (part, stands) in enumerate(zip(segments(graph), folded.stands_for, strict=True)):
        chosen, again = few[i]
        for whole, short in zip(
            graph.nodes[part.start : part.end],
            folded.graph.nodes[folded.parts[stands].start : folded.parts[stands].end],
            strict=True,
        ):
            strategies[whole.name] = chosen[short.name]
            regather.update(
                (whole.name, index)
                for index in range(len(short.operands))
                if (short.name, index) in again
            )
    step = found.step
    names = [n for n in arrangement.mesh.axis_names if n != "pipeline"]
    sizes = dict(zip(AXES[1:], arrangement.sizes, strict=True))
    program = Program(
        graph,
        folded.axis_names,
        folded.model.sizes,
        strategies,
        folded.model.resharder,
        regather=frozenset(regather),
        bucket_bytes=folded.bucket_bytes,
        rules=Rules(graph),
    )
    return Solution(
        axis_names=tuple(names),
        sizes=tuple(sizes[n] for n in names),
        uses=folded.uses,
        strategies=strategies,
        regather=program.regather,
        program=program,
        step_time=step.step_time,
        memory=step.memory,
        collectives=step.collectives,
        lower_bound_s=result.certificate.lower_bound_s,
    )


def read_pins(texts: Constraints) -> dict[str, PartitionSpec]:
    """How parameters are stored: ``("mlp.down_proj.weight=None,model",)``, or specs by pattern.

    Of a text, entries are those of a PartitionSpec: ``None`` for a whole dim, an axis, or
    ``data+model``; ``whole`` stands for no cut at all.

    Raises:
        RequestError: unreadable.
        SpecError: a spec with a mesh, which is for the search to find.
    """
    out: dict[str, PartitionSpec] = {}
    pairs = list(texts.items()) if isinstance(texts, Mapping) else []
    for pattern, spec in pairs:
        if not isinstance(spec, PartitionSpec):
            raise SpecError(
                f"the constraint of {pattern} is {spec!r}; in the full space, where the search "
                'finds the mesh, give a PartitionSpec: PartitionSpec("model", None)'
            )
        out[pattern] = spec
    for text in () if isinstance(texts, Mapping) else texts or ():
        pattern, equals, entries = (s.strip() for s in text.partition("="))
        words = [word.strip() for word in entries.split(",")]
        if not equals or not pattern or not all(words):
            raise RequestError(
                f"cannot read the pin {text!r}; write it as mlp.down_proj.weight=None,model, with "
                "data+model for a dim that both cut, or mlp.down_proj.weight=whole"
            )
        out[pattern] = PartitionSpec(*([] if words == ["whole"] else map(_entry, words)))
    return out


def _entry(word: str) -> tuple[str, ...] | None:
    if word == "None":
        return None
    return tuple(SHORT_AXES.get(axis.strip(), axis.strip()) for axis in word.split("+"))


def read_within(texts: Sequence[str] | Mapping[str, str] | None) -> dict[str, str]:
    """The tier that an axis keeps to: ``("model=node",)`` or ``{"model": "node"}``.

    Raises:
        UnknownNameError: no such axis.
        RequestError: unreadable.
    """
    found: dict[str, str] = {}
    pairs = list(texts.items()) if isinstance(texts, Mapping) else []
    for text in () if isinstance(texts, Mapping) else texts or ():
        name, equals, tier = (s.strip() for s in text.partition("="))
        if not equals or not tier:
            raise RequestError(f"cannot read {text!r}; write it as model=node")
        pairs.append((name, tier))
    for name, tier in pairs:
        axis = SHORT_AXES.get(name, name)
        if axis not in AXES:
            raise UnknownNameError("mesh axis", name, (*AXES, *SHORTER))
        found[axis] = tier
    return found
