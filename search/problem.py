"""The tables of one graph on one mesh as an elimination, and the memory limit on top.

The limit enters by a multiplier: seconds + price * bytes is again a sum of tables, and for each
price its minimum, less price * limit, is a bound from below. Chords between the cheapest solution
that is too large and the best that fits find the price where the bound is highest; the best that
fits is kept, mixed over the instances of repeated blocks, and given back gathered weights while
they fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import ModelGraph
from autoshard.search.chords import between
from autoshard.search.cost import Tables
from autoshard.search.eliminate import Array, Elimination, Factor

Choice = NDArray[np.int64]
LEANEST = 1e-3
"""Seconds per byte at which nothing but bytes counts."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A choice for every variable, with its additive figures.

    Attributes:
        choice: number of the strategy of each variable.
        regather: numbers (in ``Tables.edges``) of the edges that gather again in backward.
        seconds: sum of the tables, exposed gradients at the price they were solved with.
        num_bytes: parameters, gradients, optimizer state and what is kept for backward.
    """

    choice: Choice
    regather: frozenset[int]
    seconds: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solve under a limit found.

    Attributes:
        assignment: the best that fits; the leanest of all where none does.
        bound: no choice that fits is faster than this, in the sum of the tables.
        per_byte: price of memory at which the bound was found.
        fits: whether the assignment is within the limit.
    """

    assignment: Assignment
    bound: float
    fits: bool
    per_byte: float = 0.0


class Problem:
    """An additive problem, ready to be solved at any price of memory and of exposed gradients."""

    def __init__(self, graph: ModelGraph, tables: Tables, *, fold: bool = True) -> None:
        self.tables = tables
        shift = len(tables.unary_tables)
        factors: list[Factor] = [((v,), t) for v, t in enumerate(tables.unary)]
        factors += [((u, v), shift + t) for u, v, _, t in tables.edges]
        shapes = [t.seconds.shape for t in tables.unary_tables]
        shapes += [t.seconds.shape for t in tables.edge_tables]
        self.blocks = _blocks(graph, tables)
        self.elimination = Elimination(
            [len(rows) for rows in tables.lists], factors, shapes, self.blocks if fold else ()
        )
        self._unary = _group(tables.unary, range(len(tables.unary)))
        self._edges = _group((e[3] for e in tables.edges), range(len(tables.edges)))
        self._ends = np.array([e[:2] for e in tables.edges], dtype=np.int64).reshape(-1, 2)

    def arrays(self, exposed: float, per_byte: float) -> list[Array]:
        """Every table at these prices, in the elimination's numbering."""
        return [
            *(t.value(0.0, per_byte) for t in self.tables.unary_tables),
            *(t.value(exposed, per_byte) for t in self.tables.edge_tables),
        ]

    def bound(self, exposed: float, per_byte: float = 0.0, limit: float = 0.0) -> float:
        """Seconds that no schedule of no choice within ``limit`` bytes can beat.

        A step is never shorter than its computing and its blocking messages, and never shorter
        than its forward half with all messages of both halves: they share one link, and fused
        gradients wait for backward to begin. Any mean of the two sums, here with weight
        ``exposed`` on the second, is a sum of tables again.
        """
        value, _ = self.elimination.solve(
            [
                *(t.value(exposed, per_byte) for t in self.tables.unary_tables),
                *(t.value(exposed, per_byte, floor=True) for t in self.tables.edge_tables),
            ]
        )
        return value - per_byte * limit

    def minimum(self, exposed: float, per_byte: float) -> tuple[float, Assignment]:
        """(least seconds + per_byte * bytes, the assignment that has it)."""
        value, choice = self.elimination.solve(self.arrays(exposed, per_byte))
        return value, self.measure(choice, exposed, self.chosen_again(choice, per_byte))

    def chosen_again(self, choice: Choice, per_byte: float) -> frozenset[int]:
        """Edges where gathering again is cheaper than keeping, at a price of memory."""
        out: list[int] = []
        if not per_byte:
            return frozenset()
        for number, edges in self._edges.items():
            table = self.tables.edge_tables[number]
            if table.gathered is None or table.again is None:
                continue
            at = choice[self._ends[edges, 0]], choice[self._ends[edges, 1]]
            size = table.gathered[at]
            out += edges[(size > 0) & (per_byte * size > table.again[at])].tolist()
        return frozenset(out)

    def measure(self, choice: Choice, exposed: float, regather: frozenset[int]) -> Assignment:
        """Seconds and bytes of a choice."""
        seconds = num_bytes = 0.0
        for number, variables in self._unary.items():
            unary = self.tables.unary_tables[number]
            at = choice[variables]
            seconds += float(unary.seconds[at].sum())
            num_bytes += float(unary.num_bytes[at].sum())
        for number, edges in self._edges.items():
            table = self.tables.edge_tables[number]
            ends = choice[self._ends[edges, 0]], choice[self._ends[edges, 1]]
            seconds += float(table.seconds[ends].sum())
            if table.deferred is not None:
                seconds += exposed * float(table.deferred[ends].sum())
            if table.gathered is not None and table.again is not None:
                dropped = np.array([e in regather for e in edges.tolist()])
                seconds += float(np.where(dropped, table.again[ends], 0.0).sum())
                num_bytes += float(np.where(dropped, 0.0, table.gathered[ends]).sum())
            if table.kept is not None:
                num_bytes += float(table.kept[ends].sum())
        return Assignment(choice, regather, seconds, num_bytes)

    def solve(self, exposed: float, limit: float | None) -> Answer:
        """The fastest assignment within ``limit`` bytes that the multiplier finds."""
        fastest_s, fastest = self.minimum(exposed, 0.0)
        if limit is None or fastest.num_bytes <= limit:
            return Answer(fastest, fastest_s, True)
        _, leanest = self.minimum(exposed, LEANEST)
        if leanest.num_bytes > limit:
            return Answer(leanest, fastest_s, False)
        best, large, bound, at = between(
            lambda price: self.minimum(exposed, price),
            fastest,
            leanest,
            limit,
            bound=fastest_s,
            rounds=24,
        )
        best = self._mix(large, best, exposed, limit)
        return Answer(self._keep_what_fits(best, exposed, limit), bound, True, at)

    def _mix(
        self, large: Assignment, small: Assignment, exposed: float, limit: float
    ) -> Assignment:
        """Between two assignments: the first instances of each block from the one too large."""
        best = small
        for instances in self.blocks:
            low, high = 0, len(instances)
            while low < high:
                count = (low + high + 1) // 2
                mixed = self._first(large, best if low else small, instances, count, exposed)
                if mixed.num_bytes <= limit:
                    low = count
                    if mixed.seconds < best.seconds:
                        best = mixed
                else:
                    high = count - 1
        return best

    def _first(
        self,
        large: Assignment,
        small: Assignment,
        instances: Sequence[Sequence[int]],
        count: int,
        exposed: float,
    ) -> Assignment:
        choice = small.choice.copy()
        taken = [v for run in instances[:count] for v in run]
        choice[taken] = large.choice[taken]
        inside = np.zeros(len(choice), dtype=bool)
        inside[taken] = True
        consumers = self._ends[:, 1]
        regather = {e for e in small.regather if not inside[consumers[e]]}
        regather |= {e for e in large.regather if inside[consumers[e]]}
        return self.measure(choice, exposed, frozenset(self._meaningful(choice, regather)))

    def _meaningful(self, choice: Choice, regather: set[int]) -> list[int]:
        out = []
        for e in regather:
            u, v, _, t = self.tables.edges[e]
            gathered = self.tables.edge_tables[t].gathered
            if gathered is not None and gathered[choice[u], choice[v]] > 0:
                out.append(e)
        return out

    def _keep_what_fits(self, found: Assignment, exposed: float, limit: float) -> Assignment:
        """Keep gathered weights after all while they fit, the dearest to gather first."""
        room = limit - found.num_bytes
        offers = []
        for e in found.regather:
            u, v, _, t = self.tables.edges[e]
            table = self.tables.edge_tables[t]
            if table.gathered is None or table.again is None:
                continue
            at = int(found.choice[u]), int(found.choice[v])
            offers.append((-table.again[at] / table.gathered[at], e, table.gathered[at]))
        kept = set()
        for _, e, size in sorted(offers):
            if size <= room:
                room -= size
                kept.add(e)
        if not kept:
            return found
        return self.measure(found.choice, exposed, found.regather - kept)


def _group(keys: object, items: object) -> dict[int, NDArray[np.int64]]:
    found: dict[int, list[int]] = {}
    for key, item in zip(keys, items, strict=True):  # type: ignore[call-overload]
        found.setdefault(key, []).append(item)
    return {k: np.array(v, dtype=np.int64) for k, v in found.items()}


def _blocks(graph: ModelGraph, tables: Tables) -> list[list[list[int]]]:
    """Variables of each instance of each repeated block."""
    out = []
    for repeat in graph.repeats:
        runs = [
            [
                tables.place[n.name]
                for n in graph.nodes[start : start + repeat.length]
                if n.name in tables.place
            ]
            for start in repeat.starts
        ]
        out.append(runs)
    return out
