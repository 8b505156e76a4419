"""Whether anything of the whole space fits, and in how few bytes.

An arrangement fits where :meth:`autoshard.search.scheduled.Scheduled.solve` finds strategies within
the limit; the answers are those of the search itself. Two bounds rule most out: what is stored and
kept cut over all devices of a stage, and the leanest sum of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from autoshard.search.feasible import DIGITS, SURE, Least
from autoshard.search.scheduled import Found, Scheduled
from autoshard.search.space import Arrangement

if TYPE_CHECKING:
    from autoshard.search.whole import Problems


class Lean:
    """A space under any memory limit.

    Args:
        space: what is searched.
        problems: its inner problems.
    """

    def __init__(self, space: Sequence[Arrangement], problems: Problems) -> None:
        self.problems = problems
        problems.prepare(space)
        floors = [(problems.least_bytes(a), i) for i, a in enumerate(space)]
        self._order = [(floor, space[i]) for floor, i in sorted(floors)]
        self._sums: dict[Arrangement, float] = {}
        self._found: dict[tuple[Arrangement, int], Found] = {}
        self._failed: dict[Arrangement, int] = {}  # and at no smaller limit it fits

    def fits(self) -> bool:
        """Whether the search would find a plan."""
        return self.under(self.problems.limit) is not None

    def under(self, limit: int) -> tuple[Arrangement, Found] | None:
        """Some arrangement that fits so many bytes, those that store the least first."""
        rest = []
        for floor, a in self._order:
            if floor > SURE * limit:
                break
            if self._sum(a) > SURE * limit or self._failed.get(a, -1) >= limit:
                continue
            if self._leanest_bytes(a) <= limit and self._at(a, limit).fits:
                return a, self._at(a, limit)
            rest.append(a)
        for a in sorted(rest, key=self._leanest_bytes):
            if self._at(a, limit).fits:
                return a, self._at(a, limit)
            self._failed[a] = limit
        return None

    @cached_property
    def least(self) -> tuple[Least, Arrangement]:
        """How little memory would do, and for which arrangement."""
        best = self._order[0][1]
        total = self._leanest_bytes(best)
        for a in sorted((a for f, a in self._order if f <= SURE * total), key=self._sum):
            if self._sum(a) > SURE * total:
                break
            if self._leanest_bytes(a) < total:
                best, total = a, self._leanest_bytes(a)
        memory = self._at(best, 0).step.memory
        step = 10 ** max(0, len(str(total)) - DIGITS)
        high, less = -(-total // step), 1
        # What the strategies with the least sum of bytes take is seldom more than the least.
        while (found := self.under((high - less) * step)) is not None:
            (best, at), high, less = found, high - less, 2 * less
            memory = at.step.memory
        low = high - less
        while high - low > 1:
            middle = (low + high) // 2
            found = self.under(middle * step)
            if found is None:
                low = middle
            else:
                (best, at), high = found, middle
                memory = at.step.memory
        return Least(high * step, step, memory), best

    def _leanest_bytes(self, a: Arrangement) -> int:
        """Exact bytes of the strategies with the least sum."""
        return self._at(a, 0).step.memory.total_bytes

    def _sum(self, a: Arrangement) -> float:
        if a not in self._sums:
            self._sums[a] = self._scheduled(a, None).leanest_bytes()
        return self._sums[a]

    def _at(self, a: Arrangement, limit: int) -> Found:
        if (a, limit) not in self._found:
            scheduled = self._scheduled(a, limit)
            scheduled.bound()  # as the search does, whose solving begins with what that finds
            self._found[a, limit] = scheduled.solve()
        return self._found[a, limit]

    def _scheduled(self, a: Arrangement, limit: int | None) -> Scheduled:
        problems = self.problems
        return Scheduled(problems.folded(a), problems.schedule(a), limit)
