"""Inner problems whose bounds and solutions other processes find."""

from __future__ import annotations

from collections.abc import Sequence

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

    def prepare(self, space: Sequence[Arrangement]) -> None:
        """Make ready for bounds, here and in the workers."""
        self.workers.hold(prepared, Problems(*self.asked), space)
        super().prepare(space)

    def raised(self, asked: Sequence[tuple[str, Arrangement]]) -> list[float]:
        """See :meth:`Problems.raised`."""
        self.bounded += sum(level == "bound" for level, _ in asked)
        questions = [Ask(level, a, self.mesh_of(level, a)) for level, a in asked]
        return [float(bound) for bound in self.workers.answers(questions)]

    def solve(self, a: Arrangement) -> Found:
        """See :meth:`Problems.solve`."""
        if a not in self._found:
            self.solved += 1
            (self._found[a],) = self.workers.answers([Ask("solve", a, self.mesh_of("solve", a))])
        return self._found[a]


def prepared(problems: Problems, space: Sequence[Arrangement]) -> Problems:
    """The problems, ready for bounds."""
    problems.prepare(space)
    return problems
