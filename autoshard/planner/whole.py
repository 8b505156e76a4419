"""The whole space for ``optimize``: a model's family, its arrangements, the best as a solution."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.candidates import Rules
from autoshard.cluster import Cluster
from autoshard.errors import RequestError, UnknownNameError
from autoshard.graph import ModelGraph
from autoshard.kernels import Style
from autoshard.plan import Schedule
from autoshard.planner.family import Family, family_of
from autoshard.planner.request import SHORT_AXES
from autoshard.planner.whole_nearest import WholeAsked, explained_whole
from autoshard.program import Program
from autoshard.search import Solution
from autoshard.search.demands import SIZES, Demands
from autoshard.search.space import AXES, Arrangement, Range
from autoshard.search.step import segments
from autoshard.search.whole import Problems, Result, search_whole

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
            "and model axes, microbatches and recomputation, with blocks alike; "
            f"{c.bounded:,} bounded by their tables, {c.solved:,} solved and priced; the plan is "
            f"within {c.gap:.2%} of the bound"
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


def search_space(
    model: object,
    cluster: Cluster,
    *,
    global_batch: int,
    seq_len: int | None,
    dtype: str | None,
    optimizer: str,
    limit: int | None,
    demands: Demands,
    suggest: bool,
    sampler: str,
    trials: int | None,
    seed: int,
    storage: str | None,
    style: Style,
    say: Callable[[str], None],
) -> Whole:
    """The fastest arrangement of a step of ``global_batch`` samples.

    Raises:
        InfeasibleError: nothing fits; names what binds and what would fit.
        MeshError: no arrangement is as demanded.
    """
    family = family_of(model, seq_len=seq_len, dtype=dtype, say=say)
    partial = ", ".join(
        [f"sampler {sampler}"] * (sampler != "bound") + [f"{trials} trials"] * (trials is not None)
    )
    asked = WholeAsked(
        family=family,
        cluster=cluster,
        global_batch=global_batch,
        optimizer=optimizer,
        limit=limit,
        demands=demands,
        style=style,
        partial=partial,
    )
    space, problems = asked.points(), asked.problems()
    say(f"searching {len(space):,} arrangements")

    def told(number: int, a: Arrangement, seconds: float) -> None:
        say(f"solved {number}: {a.label}: {seconds * 1e3:,.1f} ms")

    result = search_whole(
        space,
        problems,
        sampler=sampler,
        trials=trials,
        seed=seed,
        storage=storage,
        progress=told,
    )
    if not result.found.fits:

        def regraph(length: int) -> Family:
            return family_of(model, seq_len=length, dtype=dtype, say=lambda text: None)

        raise explained_whole(asked, problems, regraph, say, suggest=suggest)
    graph = family.whole(result.arrangement.batch)
    return Whole(
        graph=graph,
        solution=solution_of(result, graph),
        schedule=result.arrangement.schedule(style),
        result=result,
        points=space,
        problems=problems,
    )


def _space(
    family: Family, cluster: Cluster, global_batch: int, axes: Mapping[str, Range]
) -> list[Arrangement]:
    return arrangements(
        cluster,
        global_batch,
        family.blocks,
        tokens=family.tokens,
        experts=family.experts,
        axes=axes,
    )


def solution_of(result: Result, graph: ModelGraph) -> Solution:
    """The found strategies on the graph of all blocks."""
    folded, found = result.folded, result.found
    few = folded.strategies(found.tied.choice)
    again = folded.regather(found.tied.again)
    pairs = [
        (whole, short)
        for part, stands in zip(segments(graph), folded.stands_for, strict=True)
        for whole, short in zip(
            graph.nodes[part.start : part.end],
            folded.graph.nodes[folded.parts[stands].start : folded.parts[stands].end],
            strict=True,
        )
    ]
    strategies = {whole.name: few[short.name] for whole, short in pairs}
    regather = frozenset(
        (whole.name, index)
        for whole, short in pairs
        for index in range(len(short.operands))
        if (short.name, index) in again
    )
    arrangement, step = result.arrangement, found.step
    names = [n for n in arrangement.mesh.axis_names if n != "pipeline"]
    sizes = dict(zip(AXES[1:], arrangement.sizes, strict=True))
    program = Program(
        graph,
        folded.axis_names,
        folded.model.sizes,
        strategies,
        folded.model.resharder,
        regather=regather,
        bucket_bytes=folded.bucket_bytes,
        rules=Rules(graph),
    )
    return Solution(
        axis_names=tuple(names),
        sizes=tuple(sizes[n] for n in names),
        uses=folded.uses,
        strategies=strategies,
        regather=regather,
        program=program,
        step_time=step.step_time,
        memory=step.memory,
        collectives=step.collectives,
        lower_bound_s=result.certificate.lower_bound_s,
    )


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
