"""Why a plan is the best: the alternatives that people think of first, each beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from autoshard.answers import ExplanationDocument
from autoshard.errors import RequestError
from autoshard.planner.progress import reporter
from autoshard.planner.why_not import Figures, WhyNot, beside, why_not
from autoshard.render import explanation_table, render_text
from autoshard.search.places import Place, seconds_by_place
from autoshard.search.space import Arrangement
from autoshard.search.whole import Problems, Result, search_whole

if TYPE_CHECKING:
    from autoshard.planner.plan import Plan
    from autoshard.planner.whole import Whole

MOST = 6
"""Alternatives that are compared."""


class Explanation(ExplanationDocument):
    """See :class:`autoshard.answers.ExplanationDocument`."""

    def __str__(self) -> str:
        """As tables."""
        return render_text(explanation_table(self))

    def __rich__(self) -> Any:
        """As tables, for ``rich.print``."""
        return explanation_table(self)


def why(plan: Plan, *, progress: bool | Callable[[str], None] | None = True) -> Explanation:
    """The plan beside the best of each kind that it is not.

    In the plain space: the best plan of each strategy and of each mesh. In the full space: the best
    without stages (or with), without the ``model`` axis (or with), on the ``data`` axes alone,
    on ``model`` alone, with each other recomputation, and with other microbatches.

    Args:
        plan: as :func:`autoshard.optimize` returned it.
        progress: see there.

    Raises:
        RequestError: a plan of the full space that was loaded from a file.
    """
    say = reporter(progress)
    if plan.space is not None:
        rows = list(_of_whole(plan.space, say))
    elif plan.schedule.is_plain:
        rows = list(_of_plain(plan, say))
    else:
        raise RequestError(
            "a plan of the full space is explained where it was searched: plan again, and ask that "
            "plan (or use --explain)"
        )
    return Explanation(
        model=plan.model.name,
        cluster=f"{plan.devices} devices of {plan.cluster.get('name')}",
        plan=plan.label,
        step_time_s=plan.predicted_step_s,
        memory_bytes=plan.memory.total_bytes,
        alternatives=tuple(rows),
    )


def _of_plain(plan: Plan, say: Callable[[str], None]) -> Iterator[WhyNot]:
    """The fastest of each strategy, and of each mesh, that was priced and lost."""
    strategies: set[str] = set()
    meshes: set[object] = {plan.mesh}
    told = 0
    for other in plan.alternatives:
        strategy = other.label.partition(",")[0]
        if told == MOST or (strategy in strategies and other.mesh in meshes):
            continue
        strategies.add(strategy)
        meshes.add(other.mesh)
        told += 1
        say(f"comparing with {other.label}")
        answer = why_not(plan, f"{strategy}, {str(other.mesh).replace(', ', ',')}", progress=None)
        yield answer.model_copy(update={"asked": other.label})


def _of_whole(whole: Whole, say: Callable[[str], None]) -> Iterator[WhyNot]:
    best = whole.result.arrangement
    mine = _figures(whole.result, whole.problems)
    seen = {best}
    for words, holds in _kinds(best):
        points = [a for a in whole.points if holds(a)]
        if not points or len(seen) > MOST:
            continue
        say(f"comparing with the best {words}")
        result = search_whole(points, whole.problems)
        if result.arrangement in seen:
            continue
        seen.add(result.arrangement)
        yield beside(mine, words, _figures(result, whole.problems))


def _kinds(best: Arrangement) -> Iterator[tuple[str, Callable[[Arrangement], bool]]]:
    """What another arrangement may be like, in words."""
    if best.pipeline > 1:
        yield "without stages", lambda a: a.pipeline == 1
    else:
        yield "with stages", lambda a: a.pipeline > 1
    if best.model > 1:
        yield "without a model axis", lambda a: a.model == 1
    else:
        yield "with a model axis", lambda a: a.model > 1
    if best.expert > 1:
        yield "without an expert axis", lambda a: a.expert == 1
    if best.context > 1:
        yield "without a context axis", lambda a: a.context == 1
    yield "on data axes alone", lambda a: a.pipeline == a.expert == a.context == a.model == 1
    yield "on the model axis alone", lambda a: a.devices == a.model and a.pipeline == 1
    yield (
        f"other recomputation than {best.recompute}",
        lambda a: a.recompute != best.recompute,
    )
    yield (
        f"other microbatches than of {best.micro_batch}",
        lambda a: a.micro_batch != best.micro_batch,
    )
    if best.pipeline > 1:
        yield (
            f"other schedules than {best.order}",
            lambda a: a.pipeline > 1 and a.order != best.order,
        )
        yield f"other stages than {best.pipeline}", lambda a: a.pipeline not in (1, best.pipeline)
    if best.stage_blocks is not None:
        yield "even stages", lambda a: a.pipeline == best.pipeline and a.stage_blocks is None


def _figures(result: Result, problems: Problems) -> Figures:
    found, folded, a = result.found, result.folded, result.arrangement
    step, schedule = found.step, problems.schedule(a)
    places: defaultdict[Place, float] = defaultdict(float)
    for tied, only in folded.shared_out(found.tied, found.others, schedule):
        program, _ = folded.measured(tied, schedule)
        told = seconds_by_place(folded.model, program, schedule, folded.stands_for, only=only)
        for place, seconds in told.items():
            places[place] += seconds
    return Figures(
        label=a.label,
        step_time=step.step_time,
        memory=step.memory,
        collectives=step.collectives,
        places=places,
    )
