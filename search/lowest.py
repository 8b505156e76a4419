"""Arrangements in the order of their bounds, and which bounds are asked for at once."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence, Set
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from autoshard.plan import Memory, StepTime
from autoshard.search.space import Arrangement

if TYPE_CHECKING:
    from autoshard.search.whole import Problems

LEVELS = ("by_share", "by_axes", "bound", "closer")
"""Bounds of an arrangement beyond the first, each closer and dearer than the one before."""

OWN = ("bound", "closer")
"""Those that take tables of the arrangement's own mesh."""

FIRST = LEVELS.index(OWN[0])
"""Level of the first of these."""

SOLVE = "solve"
Question = tuple[str, Arrangement]
"""One of :data:`LEVELS`, or SOLVE, of an arrangement."""

_Entry = tuple[float, int, int]
"""A bound, the number of its arrangement, and the level that is next."""

LINE = 8
"""Questions that may be begun before they are asked."""

SOON = 1.05
"""Until there is a price: bounds in those of the lowest up to which questions may be begun."""

AHEAD = 128
"""Bounds that are asked for at once, whoever looks; tables for them are built side by side."""

DEAR = 4
"""How many of these may be of OWN: where they are the last ones, they were in vain."""


class BestFirst:
    """Arrangements in the order of their bounds; bounds are raised as far as needed.

    Args:
        space: all arrangements.
        problems: give bounds.
    """

    def __init__(self, space: Sequence[Arrangement], problems: Problems) -> None:
        self.space, self.problems = space, problems
        self.named = [a.params for a in space]
        self._names = tuple(self.named[0]) if space else ()
        self._of = {self._key(params): i for i, params in enumerate(self.named)}
        problems.prepare(space)
        floors = problems.floors
        self._lines: list[list[_Entry]] = [[] for _ in (*LEVELS, SOLVE)]
        """For each level what is in line for it, the lowest bound first."""
        self._lines[0] = [
            (bound, i, 0) for i, a in enumerate(space) if (bound := floors.seconds(a)) < inf
        ]
        heapq.heapify(self._lines[0])
        self.best = inf
        self._gone: list[_Entry] = []

    @property
    def _line(self) -> list[_Entry]:
        """Where the lowest bound is."""
        return min((line for line in self._lines if line), key=itemgetter(0), default=[])

    @property
    def lowest(self) -> float:
        """No arrangement that was not given out yet is faster."""
        return self._line[0][0] if self._line else inf

    def of(self, params: Mapping[str, Any]) -> int | None:
        """Number of the arrangement that has such parameters; None: none has."""
        return self._of.get(self._key(params))

    def _key(self, params: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(map(params.get, self._names))

    def next(self, taken: Sequence[Mapping[str, Any]]) -> dict[str, int | str] | None:
        """Parameters of the arrangement to solve next; None where none can be the best."""
        gone = {self.of(params) for params in taken}
        while True:
            together = self._together(gone)
            if not together:
                line = self._line
                return self.space[line[0][1]].params if line and line[0][0] <= self.best else None
            asked = [(LEVELS[level], self.space[i]) for _, i, level in together]
            bounds = self.problems.raised(asked, self.likely())
            for (value, i, level), bound in zip(together, bounds, strict=True):
                if bound < inf:
                    self._put((max(value, bound), i, level + 1))

    def _together(self, gone: Set[int | None]) -> list[_Entry]:
        """What is lowest and has bounds that may be raised, as much as is asked for at once.

        Nothing where none can be the best, or where what is lowest is to be solved. That stays in
        line until it is taken: whoever asks may not use the answer.
        """
        out: list[_Entry] = []
        dear: list[int] = []
        while (line := self._line) and line[0][0] <= self.best and len(out) < AHEAD:
            _, i, level = line[0]
            if i in gone:
                self._gone.append(heapq.heappop(line))
                continue
            if level == len(LEVELS):
                break
            if level >= FIRST:
                # Of one level: what is closer may be the price that rules others out.
                if len(dear) == DEAR or level not in (dear or (level,)):
                    break
                dear.append(level)
            out.append(heapq.heappop(line))
        return out

    def _put(self, entry: _Entry) -> None:
        heapq.heappush(self._lines[entry[2]], entry)

    def likely(self) -> list[Question]:
        """What may be asked after what was given out last, the likeliest first: what is long."""
        most = min(self.best, SOON * self.lowest if self.best == inf else inf)
        names = (*LEVELS, SOLVE)
        soon = (entry for line in self._lines[1:] for entry in line if entry[0] <= most)
        return [(names[level], self.space[i]) for _, i, level in heapq.nsmallest(AHEAD, soon)]

    def restore(self) -> None:
        """Put back what was left out because somebody had taken it."""
        for entry in self._gone:
            self._put(entry)
        self._gone.clear()

    def solved(self, step_time: StepTime, memory: Memory) -> None:
        """Take note of a price."""
        if memory.fits:
            self.best = min(self.best, step_time.total_s)
