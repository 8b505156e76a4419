"""The whole space for ``optimize``: a model's family, its arrangements, the best as a solution."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.candidates import Rules
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, MeshError, RequestError, UnknownNameError
from autoshard.graph import ModelGraph
from autoshard.kernels import Style
from autoshard.plan import Schedule
from autoshard.planner.family import Family, family_of
from autoshard.planner.request import SHORT_AXES
from autoshard.program import Program
from autoshard.search import Solution
from autoshard.search.outer import binding
from autoshard.search.space import AXES, Arrangement, Range, arrangements
from autoshard.search.step import segments
from autoshard.search.whole import Problems, Result, search_whole

SPACES = ("plain", "full")
"""What ``optimize`` searches: what the bundled runtime runs, or everything that can be priced."""

SHORTER = tuple(short for short, axis in SHORT_AXES.items() if axis in AXES)

_AXIS = re.compile(r"\s*([a-z]+)\s*(<=|>=|=)\s*(\d+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The best of the whole space.

    Attributes:
        graph: of one microbatch, all blocks.
        solution: its strategies and figures; axes are those of one stage.
        schedule: how a step is run.
        result: what the search says of itself.
    """

    graph: ModelGraph
    solution: Solution
    schedule: Schedule
    result: Result

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
    """Ranges of axes: ``("model<=8", "pipeline=4")``, or ``{"model": (1, 8), "pipeline": 4}``.

    Raises:
        UnknownNameError: no such axis.
        RequestError: unreadable, or a range that holds no number.
    """
    found: dict[str, Range] = {}

    def narrow(name: str, least: int, most: int | None) -> None:
        axis = SHORT_AXES.get(name, name)
        if axis not in AXES:
            raise UnknownNameError("mesh axis", name, (*AXES, *SHORTER))
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
    axes: Mapping[str, Range],
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
        MeshError: no arrangement is within the axes' ranges.
    """
    family = family_of(model, seq_len=seq_len, dtype=dtype, say=say)
    space = _space(family, cluster, global_batch, axes)
    problems = Problems(family.few, family.blocks, cluster, optimizer, limit, style)
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
        raise _infeasible(family, cluster, result, global_batch, optimizer, limit, axes)
    graph = family.whole(result.arrangement.batch)
    return Whole(
        graph=graph,
        solution=solution_of(result, graph),
        schedule=result.arrangement.schedule(style),
        result=result,
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


def _infeasible(
    family: Family,
    cluster: Cluster,
    result: Result,
    global_batch: int,
    optimizer: str,
    limit: int | None,
    axes: Mapping[str, Range],
) -> InfeasibleError:
    memory = result.found.step.memory
    graph = family.growth.one
    return InfeasibleError(
        f"{graph.name} (global batch {global_batch}, {optimizer}) does not fit on "
        f"{cluster.devices} devices of {cluster.name} in any of "
        f"{result.certificate.arrangements:,} arrangements; the leanest is "
        f"{result.arrangement.label}",
        binding=binding(memory),
        nearest=_nearest(
            family, cluster, global_batch, optimizer, limit, axes, result.folded.model.style
        ),
    )


def _nearest(
    family: Family,
    cluster: Cluster,
    global_batch: int,
    optimizer: str,
    limit: int | None,
    axes: Mapping[str, Range],
    style: Style,
) -> list[str]:
    """The fewest devices, doubling, on which something fits."""
    for factor in (2, 4, 8, 16):
        try:
            larger = cluster.with_devices(cluster.devices * factor)
            space = _space(family, larger, global_batch, axes)
        except (MeshError, RequestError):
            continue
        problems = Problems(family.few, family.blocks, larger, optimizer, limit, style)
        problems.prepare(space)
        if any(problems.fits(a) for a in space):
            return [f"{larger.devices} devices"]
    return []
