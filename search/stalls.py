"""How long backward at least stands still for gradients, at the messages that it waits for.

Gradients that travel once a step run beside backward's computing, until a message that blocks asks
for a tier they use: it starts when they are through (:func:`autoshard.search.step.buckets`). Take a
run of a block's nodes in the order of backward: S, ended by the last of some gradients, and W after
it. If a message that blocks uses tier t within W, then what began with the first gradient in S
lasts at least as long as all gradients of S that use t, and so backward stands still for at least::

    seconds of the gradients of S that use t  -  all other seconds of S and W

of which the last is all that could have run beside them. Both are sums of tables. The gradients may
be those of another tier, if the last of them uses t as well: it starts when all before it are
through, and holds t until it is through itself. A gradient counts where it fills a bucket alone:
then it is sent at once. Whether a message is needed within W, and whether the last gradient uses
both tiers, depends on the choice; the least of those choices without either is a problem of its
own, the same one with some entries left out. The lowest of all bounds them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from autoshard.plan import Schedule
from autoshard.search.cost import EdgeTable
from autoshard.search.eliminate import Array
from autoshard.search.folded import Folded
from autoshard.search.step import recomputed
from autoshard.search.sums import Choice, Sums
from autoshard.sharding.layout import Cut, Layout, P, gradient_half

_R, _P, _CUT = 0, 1, 2
"""Numbers of an axis' states; cuts count on from the last."""

_Edge = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Stall:
    """Where backward waits in a block, by numbers of nodes; backward goes down in them.

    Attributes:
        tier: number of the tier that is waited for.
        through: that of the tier whose gradients hold it.
        first: operator whose gradient is the first that is waited for.
        last: the same of the last one.
        end: the first operator of the block that W does not reach.
        seconds: how long, in one block.
    """

    tier: int
    through: int
    first: int
    last: int
    end: int
    seconds: float


class Stalls:
    """The stalls of one mesh's blocks.

    Args:
        folded: the problem of one microbatch.
        schedule: how a step is run; nothing of it runs beside computing but gradients.
    """

    def __init__(self, folded: Folded, schedule: Schedule) -> None:
        self.folded, self.tables = folded, folded.tables
        stands = [i for i in folded.stands_for if folded.is_block[i]]
        part = max(sorted({*stands}), key=stands.count)
        segment = folded.parts[part]
        self.nodes = range(segment.start, segment.end)
        self.share = stands.count(part) / schedule.stages
        """Of one block's stall, what the step is longer by at least."""
        inside = folded.graph.nodes[segment.start : segment.end]
        self.again = recomputed(inside, schedule)
        self._factor = {scope: i for i, scope in enumerate(folded.scopes)}
        self._into: dict[int, list[_Edge]] = {}
        for edge in self.tables.edges:
            self._into.setdefault(edge[1], []).append(edge)
        self._states: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._cuts: dict[Cut, int] = {}

    # ---- where ------------------------------------------------------------------------------

    def of(self, choice: Choice) -> list[Stall]:
        """Those of a choice that are waited for once in each block, the longest first."""
        prices = self.folded.model.prices
        tiers = {t for a in range(len(self.folded.model.sizes)) for t in prices.tiers_of((a,))}
        found = [
            stall
            for tier, through in product(sorted(tiers), repeat=2)
            for stall in self._waits(choice, tier, through)
        ]
        return sorted(found, key=lambda s: -s.seconds)

    def _waits(self, choice: Choice, tier: int, through: int) -> Iterator[Stall]:
        """Backward of one block with a choice, as far as gradients of ``through`` hold ``tier``."""
        now = free = held = 0.0
        first = last = -1
        is_over = False
        waiting: list[Stall] = []
        for at, variable in self._operators(self.nodes):
            now += float(self._beside(variable)[choice[self.folded.kind[variable]]])
            edges = [(e, self._at(e, choice)) for e in reversed(self._into.get(variable, ()))]
            late, both = (
                sum(float(self._gradients(e, *which)[pair]) for e, pair in edges)
                for which in ((through,), (through, tier))
            )
            if late:
                yield from (replace(stall, end=at) for stall in waiting)
                waiting = []
                if free <= now or is_over:
                    first, is_over = at, False
                free = max(free, now) + late
                if both:
                    held, last = free, at
            for edge, pair in edges:
                seconds = float(self._back(edge)[pair])
                if seconds and self._needs(edge, tier)[pair]:
                    if held > now:
                        end = self.nodes.start - 1
                        waiting.append(Stall(tier, through, first, last, end, held - now))
                        is_over = True  # what is still on its way is of this one
                    now = max(held, now) + seconds
                    if tier == through:
                        free = now
                else:
                    now += seconds
        yield from waiting

    # ---- sums -------------------------------------------------------------------------------

    def longer(self, sums: Sums, stalls: Sequence[Stall], share: float) -> Sums:
        """``sums`` and a share of what stalls add to the step at least, where there are such.

        Args:
            sums: of a bound that counts no late gradients.
            stalls: of one tier, held by gradients of one; no two overlap.
            share: from 0 to 1.
        """
        flat, again = sums.flat_seconds.copy(), dict(sums.again)
        seconds = sums.places.split(flat)
        weight = share * self.share
        for stall in stalls:
            for at, variable in self._operators(range(stall.end + 1, stall.first + 1)):
                kind = self.folded.kind[variable]
                if at != stall.first:
                    seconds[kind] -= weight * self._beside(variable)
                for edge in self._into.get(variable, ()):
                    added = -self._back(edge)
                    if at > stall.last:
                        added = added + self._gradients(edge, stall.through)
                    elif at == stall.last:
                        added = added + self._gradients(edge, stall.through, stall.tier)
                    factor = self._factor_of(edge)
                    seconds[factor] += weight * self._flat(edge, added)
                    held = self._table(edge).again
                    if held is not None and factor in again and self._name(edge) not in self.again:
                        finite = np.where(np.isinf(held), 0.0, held)
                        again[factor] = again[factor] - weight * self._flat(edge, finite)
        return sums.with_seconds(flat, again)

    def without(self, stall: Stall) -> list[Callable[[Sums], Sums]]:
        """Sums of the choices alone that need no message within W.

        Where another tier's gradients hold the tier, then of those whose last gradient does not.
        """
        within = range(stall.end + 1, stall.last + 1)
        out = [self._unless(within, lambda edge: self._needs(edge, stall.tier))]
        if stall.through != stall.tier:
            last = range(stall.last, stall.last + 1)
            both = stall.through, stall.tier
            out.append(self._unless(last, lambda edge: self._gradients(edge, *both) > 0))
        return out

    def _unless(
        self, nodes: range, is_so: Callable[[_Edge], NDArray[np.bool_]]
    ) -> Callable[[Sums], Sums]:
        """Sums of the choices alone for which no edge into some nodes ``is_so``."""
        entries = [
            (self._factor_of(edge), self._flat(edge, is_so(edge)))
            for _, variable in self._operators(nodes)
            for edge in self._into.get(variable, ())
        ]

        def only(sums: Sums) -> Sums:
            flat = sums.flat_seconds.copy()
            seconds = sums.places.split(flat)
            for factor, where in entries:
                seconds[factor][where] = inf
            return sums.with_seconds(flat, sums.again)

        return only

    # ---- tables -----------------------------------------------------------------------------

    def _operators(self, nodes: range) -> Iterator[tuple[int, int]]:
        """(number, variable) of operators that have a backward, in its order."""
        for at in reversed(nodes):
            node = self.folded.graph.nodes[at]
            if not node.is_leaf and node.differentiable:
                yield at, self.tables.place[node.name]

    def _name(self, edge: _Edge) -> str:
        return self.tables.variables[edge[1]]

    def _table(self, edge: _Edge) -> EdgeTable:
        return self.tables.edge_tables[edge[3]]

    def _at(self, edge: _Edge, choice: Choice) -> tuple[int, int]:
        kind = self.folded.kind
        return int(choice[kind[edge[0]]]), int(choice[kind[edge[1]]])

    def _factor_of(self, edge: _Edge) -> int:
        u, v = self.folded.kind[edge[0]], self.folded.kind[edge[1]]
        return u if u == v else self._factor[u, v]

    def _flat(self, edge: _Edge, table: NDArray[np.generic]) -> Array:
        same = self.folded.kind[edge[0]] == self.folded.kind[edge[1]]
        return np.diagonal(table) if same else table  # type: ignore[return-value]

    def _beside(self, variable: int) -> Array:
        """Backward of an operator, its own messages included."""
        table = self.tables.unary_tables[self.tables.unary[variable]]
        return table.seconds - table.forward

    def _back(self, edge: _Edge) -> Array:
        """Seconds of an edge's messages in backward."""
        table = self._table(edge)
        if table.forward is None:
            return np.zeros_like(table.seconds)
        out: Array = np.where(np.isinf(table.seconds), 0.0, table.seconds) - np.where(
            np.isinf(table.seconds), 0.0, table.forward
        )
        return out

    def _gradients(self, edge: _Edge, *tiers: int) -> Array:
        """Seconds of a gradient that fills a bucket alone and uses all of ``tiers``."""
        table = self._table(edge)
        if table.deferred is None:
            return np.zeros_like(table.seconds)
        model = self.folded.model
        node = self.folded.graph.by_name[self.tables.variables[edge[0]]]
        rows = self.folded.lists[self.folded.kind[edge[0]]]
        full = [model.local_bytes(node, s.result) >= self.folded.bucket_bytes for s in rows]
        given, taken = self._both(edge)
        summed = (taken == _P) & (given == _R)
        masks = sum(summed[:, :, a] << a for a in range(summed.shape[2]))
        uses = np.zeros_like(table.seconds, dtype=bool)
        for mask in np.unique(masks).tolist():
            axes = tuple(a for a in range(summed.shape[2]) if mask >> a & 1)
            if axes and {*tiers}.issubset(model.prices.tiers_of(axes)):
                uses |= masks == mask
        return np.where(uses & np.array(full)[:, None], table.deferred, 0.0)

    def _needs(self, edge: _Edge, tier: int) -> NDArray[np.bool_]:
        """Whether the gradient of a value cannot come back without a message on the tier."""
        table = self._table(edge)
        out = np.zeros_like(table.seconds, dtype=bool)
        if table.forward is None or table.deferred is not None:
            return out
        given, taken = self._both(edge)
        for axis in range(given.shape[2]):
            if self._always(axis, tier):
                to, of = given[:, :, axis], taken[:, :, axis]
                out |= (of != _R) & (of != to) & (to != _P)
        return out

    def _always(self, axis: int, tier: int) -> bool:
        """Whether every message over an axis uses a tier, whatever other axes it has."""
        count, prices = len(self.folded.model.sizes), self.folded.model.prices
        others = [a for a in range(count) if a != axis]
        return all(
            tier in prices.tiers_of(tuple(sorted((axis, *more))))
            for n in range(count)
            for more in combinations(others, n)
        )

    def _both(self, edge: _Edge) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """States of a value's gradient, of each pair and axis: where it is made, where it goes."""
        u, v, index, _ = edge
        given = self._numbers(self.folded.kind[u], -1)[:, None, :]
        taken = self._numbers(self.folded.kind[v], index)[None, :, :]
        shape = (given.shape[0], taken.shape[1], given.shape[2])
        return np.broadcast_to(given, shape), np.broadcast_to(taken, shape)

    def _numbers(self, kind: int, index: int) -> NDArray[np.int64]:
        """States of the gradient of a result (index -1) or an operand over a strategy list."""
        if (kind, index) not in self._states:
            rows = self.folded.lists[kind]
            layouts = [s.result if index < 0 else s.operands[index] for s in rows]
            self._states[kind, index] = np.array(
                [self._row(gradient_half(layout)) for layout in layouts], dtype=np.int64
            ).reshape(len(rows), len(self.folded.model.sizes))
        return self._states[kind, index]

    def _row(self, half: Layout) -> list[int]:
        return [
            _CUT + self._cuts.setdefault(s, len(self._cuts))
            if isinstance(s, Cut)
            else (_P if s is P else _R)
            for s in half
        ]
