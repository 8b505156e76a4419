"""Why a plan is not another one: both priced, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoshard.answers import Part, WhyNotDocument
from autoshard.assemble import program_of
from autoshard.errors import RequestError
from autoshard.plan import CollectiveGroup, Memory, StepTime
from autoshard.planner.planning import estimate
from autoshard.planner.predicted import model_of
from autoshard.planner.request import check_strategy
from autoshard.render import render_text, why_not_table
from autoshard.search import binding, slower_by
from autoshard.search.places import Place, seconds_by_place

if TYPE_CHECKING:
    from autoshard.planner.plan import Plan

MOST_PLACES = 8
"""Modules of which the difference is told."""


class WhyNot(WhyNotDocument):
    """See :class:`autoshard.answers.WhyNotDocument`."""

    def __str__(self) -> str:
        """As tables."""
        return render_text(why_not_table(self))

    def __rich__(self) -> Any:
        """As tables, for ``rich.print``."""
        return why_not_table(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is compared of a plan.

    Attributes:
        label: what it amounts to.
        step_time: its seconds.
        memory: of the fullest device.
        collectives: all messages of a step.
        places: where the seconds go; see :mod:`autoshard.search.places`.
    """

    label: str
    step_time: StepTime
    memory: Memory
    collectives: tuple[CollectiveGroup, ...]
    places: Mapping[Place, float]

    @classmethod
    def of(cls, plan: Plan) -> Figures:
        """Those of a plan whose model is at hand."""
        program = program_of(plan.captured().graph, plan)
        return cls(
            label=plan.label,
            step_time=plan.step_time,
            memory=plan.memory,
            collectives=plan.collectives,
            places=seconds_by_place(model_of(program, plan), program, plan.schedule),
        )


def why_not(
    plan: Plan, asked: str, *, progress: bool | Callable[[str], None] | None = True
) -> WhyNot:
    """What another mesh, and strategy, would cost, beside the plan.

    Args:
        plan: of one pass over all samples.
        asked: ``data=8``, ``data=4,model=2`` or, with a strategy, ``fsdp, data=8``.
        progress: see :func:`autoshard.optimize`.

    Raises:
        RequestError: a mesh or strategy that cannot be, or a plan of several microbatches.
    """
    if not plan.schedule.is_plain:
        raise RequestError(
            "a plan of several microbatches, stages or recomputation is not compared with one "
            "mesh; plan.why() (--explain) compares it with others of its space"
        )
    words = [w.strip() for w in asked.split(",") if w.strip()]
    strategies = [check_strategy(w) for w in words if "=" not in w]
    if len(strategies) > 1 or len(strategies) == len(words):
        raise RequestError(
            f"why not {asked!r}: name a mesh, and at most one strategy: data=8 or fsdp, data=8"
        )
    given = plan.asked()
    other = estimate(
        plan.model.source or plan.model.name,
        mesh=",".join(w for w in words if "=" in w),
        cluster=given["cluster"],
        optimizer=plan.optimizer,
        strategy=strategies[0] if strategies else "auto",
        memory_limit_bytes=given["memory_limit_bytes"],
        seq_len=plan.seq_len,
        captured=plan.captured(),
        progress=progress,
    )
    return beside(Figures.of(plan), asked, Figures.of(other))


def beside(plan: Figures, asked: str, other: Figures) -> WhyNot:
    """Two plans part by part; ``asked`` is what the other one is called."""
    messages, places = _messages(plan, other), _places(plan, other)
    if other.memory.fits:
        verdict = slower_by(other.step_time, plan.step_time)
        if messages and messages[0].other > messages[0].plan:
            verdict += f"; the messages that grow most: {messages[0].name}"
        if places and places[0].other > places[0].plan:
            verdict += f"; most is lost at {places[0].name}"
    else:
        verdict = f"does not fit: {binding(other.memory)}"
    return WhyNot(
        plan=plan.label,
        asked=asked,
        other=other.label,
        fits=other.memory.fits,
        verdict=verdict,
        time=_time(plan, other),
        messages=messages,
        places=places,
        memory=_memory(plan, other),
    )


def _time(plan: Figures, other: Figures) -> tuple[Part, ...]:
    names = {
        "compute": "compute_s",
        "optimizer": "optimizer_s",
        "communication not hidden": "exposed_communication_s",
        "step": "total_s",
    }
    one, two = plan.step_time, other.step_time
    *parts, total = (
        Part(name=name, unit="s", plan=getattr(one, field), other=getattr(two, field))
        for name, field in names.items()
    )
    bubble = Part(name="waiting for stages", unit="s", plan=one.waiting_s, other=two.waiting_s)
    waits = max(bubble.plan / one.total_s, bubble.other / two.total_s) > 1e-9
    return (*parts, *([bubble] if waits else []), total)


def _messages(plan: Figures, other: Figures) -> tuple[Part, ...]:
    seconds: dict[str, list[float]] = {}
    for index, groups in enumerate((plan.collectives, other.collectives)):
        for g in groups:
            row = seconds.setdefault(f"{g.op} over {' x '.join(g.axes)}, {g.phase}", [0.0, 0.0])
            row[index] += g.seconds
    order = sorted(seconds, key=lambda name: seconds[name][0] - seconds[name][1])
    return tuple(
        Part(name=name, unit="s", plan=seconds[name][0], other=seconds[name][1]) for name in order
    )


def _places(plan: Figures, other: Figures) -> tuple[Part, ...]:
    """Modules that differ most, those that lose first; the rest of them as one."""
    keys = {*plan.places, *other.places}
    rows = [
        Part(
            name=f"{module}: {what}",
            unit="s",
            plan=plan.places.get((module, what), 0.0),
            other=other.places.get((module, what), 0.0),
        )
        for module, what in keys
    ]
    rows.sort(key=lambda part: (-abs(part.other - part.plan), part.name))
    told, rest = rows[:MOST_PLACES], rows[MOST_PLACES:]
    told.sort(key=lambda part: part.plan - part.other)
    if rest:
        told.append(
            Part(
                name=f"{len(rest)} others",
                unit="s",
                plan=sum(part.plan for part in rest),
                other=sum(part.other for part in rest),
            )
        )
    return tuple(told)


def _memory(plan: Figures, other: Figures) -> tuple[Part, ...]:
    names = {
        "parameters": "parameters_bytes",
        "gradients": "gradients_bytes",
        "optimizer": "optimizer_bytes",
        "activations kept for backward": "activations_bytes",
        "KV cache": "kv_cache_bytes",
        "gathered parameters": "gathered_bytes",
        "largest temporary": "temporary_bytes",
        "reserve": "reserve_bytes",
        "peak": "total_bytes",
    }
    one, two = plan.memory, other.memory
    return tuple(
        Part(name=name, unit="B", plan=getattr(one, field), other=getattr(two, field))
        for name, field in names.items()
    )
