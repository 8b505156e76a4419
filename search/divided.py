"""Inner problems whose bounds and solutions other processes find."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.search.lowest import LINE, OWN, SOLVE, Question
from autoshard.search.scheduled import Found
from autoshard.search.space import Arrangement
from autoshard.search.whole import Problems
from autoshard.workers import Ask, Workers


class Divided(Problems):
    """The same problems as another's, divided over workers; the answers are the same.

    Args:
        problems: which.
        workers: processes of this search alone.
    """

    def __init__(self, problems: Problems, workers: Workers) -> None:
        super().__init__(*problems.asked)
        self.workers = workers
        self._bounded: set[Arrangement] = set()

    def sized(self, micro_batch: int, batch: int) -> None:
        """Make ready for bounds, here and in the workers; see :meth:`Problems.sized`."""
        self.workers.hold(sized, Problems(*self.asked), micro_batch, batch)
        super().sized(micro_batch, batch)

    def raised(self, asked: Sequence[Question], then: Sequence[Question] = ()) -> list[float]:
        """See :meth:`Problems.raised`."""
        # Thousands of the first bounds need what few meshes take: only that is asked of others.
        needed = {key: what for level, a in asked for key, what in self.needed(level, a)}
        own = [(level, a) for level, a in asked if level in OWN]
        bounds = [a for level, a in own if level == "bound"]
        questions = [self._ask_least(what) for what in needed.values()]
        questions += [self._ask(level, a) for level, a in own]
        answers = self.workers.answers(questions, self._beside(then))
        self._leasts.update(zip(needed, answers, strict=False))
        self.bounded += len(bounds)
        self._bounded.update(bounds)
        found = iter(answers[len(needed) :])
        return [
            float(next(found)) if level in OWN else getattr(self, level)(a) for level, a in asked
        ]

    def solve(self, a: Arrangement, then: Sequence[Question] = ()) -> Found:
        """See :meth:`Problems.solve`."""
        if a not in self._found:
            self.solved += 1
            (self._found[a],) = self.workers.answers([self._ask(SOLVE, a)], self._beside(then))
        return self._found[a]

    def _ask(self, question: str, a: Arrangement) -> Ask:
        # Where a solution begins depends on its bound, which another worker may have found.
        of = "solve_bounded" if question == SOLVE and a in self._bounded else question
        return Ask(of, a, self.mesh_of(a), is_long=question == SOLVE)

    def _beside(self, then: Sequence[Question]) -> list[Ask]:
        out: dict[object, Ask] = {}
        for level, a in then:
            for key, what in self.needed(level, a):
                out.setdefault(key, self._ask_least(what))
            if level in (*OWN, SOLVE) and a not in self._found:
                out[level, a] = self._ask(level, a)
            if len(out) >= LINE:
                break
        return list(out.values())

    def _ask_least(self, what: tuple[Arrangement, str, str]) -> Ask:
        return Ask("least", what, self.mesh_of(what[0]))


def sized(problems: Problems, micro_batch: int, batch: int) -> Problems:
    """The problems, ready for bounds."""
    problems.sized(micro_batch, batch)
    return problems
