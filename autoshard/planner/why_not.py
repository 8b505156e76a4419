"""Why a plan is not another one: both priced, part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoshard.answers import Part, WhyNotDocument
from autoshard.errors import RequestError
from autoshard.planner.planning import estimate
from autoshard.planner.request import check_strategy
from autoshard.render import render_text, why_not_table
from autoshard.search import binding, slower_by

if TYPE_CHECKING:
    from autoshard.planner.plan import Plan


class WhyNot(WhyNotDocument):
    """See :class:`autoshard.answers.WhyNotDocument`."""

    def __str__(self) -> str:
        """As tables."""
        return render_text(why_not_table(self))

    def __rich__(self) -> Any:
        """As tables, for ``rich.print``."""
        return why_not_table(self)


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
        raise RequestError("a plan of several microbatches, stages or recomputation: not compared")
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
    messages = _messages(plan, other)
    if other.memory.fits:
        verdict = slower_by(other.step_time, plan.step_time)
        if messages and messages[0].other > messages[0].plan:
            verdict += f"; the messages that grow most: {messages[0].name}"
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
        memory=_memory(plan, other),
    )


def _time(plan: Plan, other: Plan) -> tuple[Part, ...]:
    names = {
        "compute": "compute_s",
        "optimizer": "optimizer_s",
        "communication not hidden": "exposed_communication_s",
        "step": "total_s",
    }
    one, two = plan.step_time, other.step_time
    return tuple(
        Part(name=name, unit="s", plan=getattr(one, field), other=getattr(two, field))
        for name, field in names.items()
    )


def _messages(plan: Plan, other: Plan) -> tuple[Part, ...]:
    seconds: dict[str, list[float]] = {}
    for index, groups in enumerate((plan.collectives, other.collectives)):
        for g in groups:
            row = seconds.setdefault(f"{g.op} over {' x '.join(g.axes)}, {g.phase}", [0.0, 0.0])
            row[index] += g.seconds
    order = sorted(seconds, key=lambda name: seconds[name][0] - seconds[name][1])
    return tuple(
        Part(name=name, unit="s", plan=seconds[name][0], other=seconds[name][1]) for name in order
    )


def _memory(plan: Plan, other: Plan) -> tuple[Part, ...]:
    names = {
        "parameters": "parameters_bytes",
        "gradients": "gradients_bytes",
        "optimizer": "optimizer_bytes",
        "activations kept for backward": "activations_bytes",
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
