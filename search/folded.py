"""One microbatch of a pipeline stage's mesh with all repeated blocks alike: tables, and their sum.

In a step of m microbatches over p stages every segment of the model (what stands before the blocks,
a block, what stands after) is passed a known number of times on the way that bounds the step
(:mod:`autoshard.search.bounds`). So with the instances of a block tied to the same strategies, the
seconds of a step are again a sum of tables over the nodes of *one* block, each with a weight, and
so are the bytes of a stage. The elimination is that of the plain problem; its work does not depend
on the number of blocks, stages or microbatches.

Tables are those of :mod:`autoshard.search.cost`, built once for a mesh and the samples of one
microbatch; schedules share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from autoshard.candidates import Candidates
from autoshard.graph import ModelGraph, Node, Repeat
from autoshard.plan import Schedule
from autoshard.program import DEFAULT_BUCKET_BYTES, Program, shared_by
from autoshard.search.cost import (
    CostModel,
    Kept,
    build_tables,
    kept_bytes,
    stored_bytes,
    weight_values,
)
from autoshard.search.eliminate import Array, Elimination, Factor
from autoshard.search.kept import PARTLY, base, in_kernels, listed, read_again
from autoshard.search.later import LaterTables
from autoshard.search.step import (
    MASTER_BYTES,
    Measured,
    Step,
    again_of,
    compose,
    crossing_nodes,
    later_blocks,
    measure,
    measured_step,
    mixed,
    recomputed,
    segments,
    send_seconds,
)
from autoshard.search.sums import Choice, Others, Places, Sums, Tied
from autoshard.sharding.layout import R
from autoshard.sharding.strategy import Strategy

Shares = tuple[tuple[float, float], ...]
"""A number from 0 to 1 for forward and for backward of each segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How often the seconds and bytes of each segment of the short graph count.

    Attributes:
        forward: passes of one microbatch.
        backward: the same of backward, with what is computed again.
        update: updates by the optimizer.
        late: gradients that travel once a step; what backward computes beside them hides.
        stored: parameters, gradients and optimizer state.
        kept: what is kept for the backward of one microbatch.
        weight: passes of gradients of weights, where they are tasks of their own and not part of
            backward; None: they are.
        waiting: what is kept for these tasks, of one microbatch; None: nothing.
        sends: messages from stage to stage.
        temporary: what there is for a while beside all that is kept.
        working: what comes back of one block while it is computed again.
        floor: whether late gradients count with the least they can take, and less what hides them
            (computing, and messages where some use no tier that others use): then the sum is a
            bound.
        beside: of each segment how much messages beside computing count, from 0 to 1, in forward
            and in backward; None: they are waited for. See :meth:`Folded.sums`.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    late: tuple[float, ...]
    stored: tuple[float, ...]
    kept: tuple[float, ...]
    weight: tuple[float, ...] | None = None
    waiting: tuple[float, ...] | None = None
    sends: float = 0.0
    temporary: float = 0.0
    working: float = 0.0
    floor: bool = False
    beside: Shares | None = None

    def halves(self) -> tuple[Weights, Weights]:
        """Of segments that are listed twice, the first of each and the second.

        Messages, and what there is for a while, count with the first; what is computed again is
        of the second.
        """
        n = len(self.forward) // 2
        rows = ("forward", "backward", "update", "late", "stored", "kept", "weight", "waiting")
        listed = [name for name in rows if getattr(self, name) is not None]
        first, second = (
            {name: getattr(self, name)[half] for name in listed}
            | {"beside": self.beside and self.beside[half]}
            for half in (slice(n), slice(n, None))
        )
        return (
            replace(self, **first, working=0.0),
            replace(self, **second, sends=0.0, temporary=0.0),
        )

    @property
    def counts(self) -> tuple[bool, ...]:
        """Whether a segment counts at all."""
        rows = [self.forward, self.backward, self.update, self.late, self.stored, self.kept]
        rows += [row for row in (self.weight, self.waiting) if row is not None]
        return tuple(map(any, zip(*rows, strict=True)))


class _Member(NamedTuple):
    """A variable of the tables: its kind, its table, its node, the segment that it is in."""

    kind: int
    variable: int
    table: int
    node: Node
    part: int


@lru_cache(maxsize=64)
def _ordered(
    sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...]
) -> tuple[Elimination, Places]:
    """How tables of these kinds are eliminated, and where their entries lie.

    Meshes whose kinds have equally many strategies share it.
    """
    factors: list[Factor] = [(scope, i) for i, scope in enumerate(scopes)]
    shapes = [tuple(sizes[k] for k in scope) for scope in scopes]
    return Elimination(sizes, factors, shapes), Places(scopes, shapes)


class Folded:
    """The problem of one microbatch on one mesh, its repeated blocks alike.

    Args:
        model: costs, on the graph of a few blocks.
        candidates: strategies of its nodes.
        axis_names: of the mesh's axes.
        blocks: how many blocks the whole model has; None: as many as the graph.
        bucket_bytes: size at which fused gradients are sent.
    """

    def __init__(
        self,
        model: CostModel,
        candidates: Candidates,
        axis_names: tuple[str, ...],
        blocks: int | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.model, self.axis_names, self.bucket_bytes = model, axis_names, bucket_bytes
        self.uses = candidates.uses
        self.graph: ModelGraph = model.graph
        self.tables = build_tables(model, candidates, bucket_bytes)
        self.parts = segments(self.graph)
        self.is_block = tuple(part.is_block for part in self.parts)
        here = sum(self.is_block)
        self.blocks = here if blocks is None else blocks
        self.stands_for = standing(self.is_block, self.blocks)
        tiers = [set(model.prices.tiers_of((a,))) for a in range(len(model.sizes))]
        self.one_link = not tiers or bool(set.intersection(*tiers))
        self.segment_of = {
            n.name: i for i, s in enumerate(self.parts) for n in self.graph.nodes[s.start : s.end]
        }
        self.slows = min(1.0, model.cluster.device.kernels.contention)
        self._tie()
        self._programs: dict[object, Program] = {}
        self._measured: dict[object, Measured] = {}
        self._again: dict[str, frozenset[str]] = {}
        self._read: dict[tuple[str, bool], list[tuple[int, int, Array]]] = {}
        self._copies: dict[str, dict[int, Array]] = {}
        self._work: dict[str, Array] = {}
        self._without: dict[str, frozenset[str]] = {}
        self._kept: dict[object, Array] = {}

    # ---- kinds and factors ------------------------------------------------------------------

    def _tie(self) -> None:
        """Number the kinds of nodes, and the factors between them."""
        tables = self.tables
        first = first_instances(self.graph.nodes, self.graph.repeats)
        kinds: dict[str, int] = {}
        self.kind: list[int] = []
        lists: list[list[Strategy]] = []
        for name, rows in zip(tables.variables, tables.lists, strict=True):
            origin = first.get(name, name)
            if origin not in kinds or lists[kinds[origin]] is not rows:
                origin = origin if origin not in kinds else name
                kinds[origin] = len(lists)
                lists.append(rows)
            self.kind.append(kinds[origin])
        self.lists = lists
        keys: dict[tuple[int, ...], int] = {(k,): k for k in range(len(lists))}
        inside = [self.segment_of[name] for name in tables.variables]
        members = [
            _Member(kind, variable, table, self.graph.by_name[name], part)
            for variable, (kind, table, name, part) in enumerate(
                zip(self.kind, tables.unary, tables.variables, inside, strict=True)
            )
        ]
        self._members = sorted(members, key=attrgetter("kind"))
        self._edges: dict[int, list[tuple[int, int]]] = {}
        for number, (u, v, _, table) in enumerate(tables.edges):
            a, b = self.kind[u], self.kind[v]
            key = (a, b) if a != b else (a, a, a)
            factor = keys.setdefault(key, len(keys))
            self._edges.setdefault(factor, []).append((number, table))
        self._inside = [
            (factor, number, table, inside[tables.edges[number][1]])
            for factor, edges in self._edges.items()
            for number, table in edges
        ]
        self.scopes = [key if len(key) < 3 else (key[0],) for key in keys]
        sizes = tuple(len(rows) for rows in lists)
        self.elimination, self.places = _ordered(sizes, tuple(self.scopes))
        self.shapes = self.places.shapes
        self._diagonal = {i for i, key in enumerate(keys) if len(key) == 3}

    def sums(self, schedule: Schedule, weights: Weights) -> Sums:
        """The tables of a step of ``schedule``.

        A pass that computes for c seconds beside messages of b takes max(c + k b, b + k c) where
        each slows the other by the share k, which is no less than (1 - u) (c + k b) + u (b + k c)
        at any u from 0 to 1: ``weights.beside``. That is (1 - k) (u c + (1 - u) b) less than c + b.
        """
        places = self.places
        flat_seconds, flat_bytes = np.zeros((2, places.ends[-1]))
        seconds, num_bytes = places.split(flat_seconds), places.split(flat_bytes)
        again = self._recomputed(schedule)
        whole = schedule.recompute in ("full", "reentrant")
        gone = self._gone(schedule)
        less = self._less(weights)
        counts, apart = weights.counts, None if weights.weight is None else self.later
        for kind, variable, number, node, part in self._members:
            table = self.tables.unary_tables[number]
            if weights.temporary and table.temporary is not None:
                # Of all stages, as exact figures have it.
                num_bytes[kind] += weights.temporary * table.temporary
            if not counts[part]:
                continue
            if node.is_leaf:
                self._leaf(node, part, kind, number, schedule, weights, seconds, num_bytes)
                continue
            repeated = node.name in again
            there, back = weights.forward[part], weights.backward[part]
            seconds[kind] += back * table.seconds
            if repeated or there != back:
                seconds[kind] += (there - back + back * repeated) * table.forward
            if apart is not None:
                self._later(apart, variable, kind, part, weights, seconds, num_bytes)
            elif weights.floor and weights.late[part]:
                if self.one_link:
                    hides = table.backward + table.forward_compute * repeated
                else:
                    hides = table.seconds - table.forward + table.forward * repeated
                if self.one_link and table.beside is not None:
                    # What runs beside computing is in the way of no gradient.
                    hides = hides + table.beside[1] + table.beside[0] * repeated
                seconds[kind] -= weights.late[part] * hides
            if less is not None and table.beside is not None:
                (computing, messages), (c, b) = less[part]
                seconds[kind] -= computing * table.forward_compute + messages * table.beside[0]
                seconds[kind] -= c * table.backward + b * table.beside[1]
                if repeated:
                    seconds[kind] -= c * table.forward_compute + b * table.beside[0]
            if weights.kept[part] and not (whole and self.is_block[part]):
                num_bytes[kind] += weights.kept[part] * self._keeps(node, number, again, gone)
        copied = self._copied(schedule)
        gathered: dict[int, Array] = {}
        gather_again: dict[int, Array] = {}
        for factor, number, table_number, part in self._inside:
            if not counts[part]:
                continue
            consumer = self.tables.variables[self.tables.edges[number][1]]
            producer = self.tables.variables[self.tables.edges[number][0]]
            table_ = self.tables.edge_tables[table_number]
            repeated = consumer in again
            there, back = weights.forward[part], weights.backward[part]
            forward = table_.seconds if table_.forward is None else table_.forward
            times = there - back + back * repeated
            if table_.forward is None:
                out = scaled(back + times, forward)
            else:
                out = scaled(back, table_.seconds)
                if times:
                    out = out + scaled(times, forward)
            late = table_.floor if weights.floor else table_.deferred
            if late is not None and weights.late[part]:
                out = out + weights.late[part] * late
            hidden = 0.0 if self.one_link or not weights.floor else weights.late[part]
            if weights.weight is not None and apart is not None:
                if table_.forward is not None and apart.is_sent(self.tables.edges[number][0]):
                    more = weights.weight[part] - back - hidden
                    out = out + more * np.where(
                        np.isinf(table_.seconds), 0.0, table_.seconds - forward
                    )
                hidden = 0.0  # what its backward does hides no gradient
            if hidden and table_.forward is not None:
                out = out - hidden * np.where(
                    np.isinf(table_.seconds), 0.0, table_.seconds - forward
                )
            if hidden and repeated:
                out = out - hidden * np.where(np.isinf(forward), 0.0, forward)
            freed = 0.0
            if table_.beside is not None and less is not None:
                freed = less[part][1][1]
                if self.one_link and weights.floor:
                    freed += weights.late[part]
                ahead, behind, _ = table_.beside
                out = out - (less[part][0][1] + freed * repeated) * ahead - freed * behind
            seconds[factor] += self._flat(factor, out)
            keeps = weights.kept[part] and not repeated and not (whole and self.is_block[part])
            stays = not gone or base(self.graph, producer) not in gone
            if keeps and stays and table_.kept is not None:
                num_bytes[factor] += weights.kept[part] * self._flat(factor, table_.kept)
            if keeps and number in copied:
                num_bytes[factor] += weights.kept[part] * self._flat(factor, copied[number])
            if not keeps or table_.gathered is None or table_.again is None:
                continue
            for held, values, weight in (
                (gathered, table_.gathered, weights.kept[part]),
                (gather_again, table_.again, weights.backward[part] - hidden),
            ):
                added = self._flat(factor, scaled(weight, values))
                if held is gather_again and freed and table_.beside is not None:
                    added = added - freed * self._flat(factor, table_.beside[2])
                held[factor] = held[factor] + added if factor in held else added
        self._crossing(schedule, weights, whole, seconds, num_bytes)
        if schedule.recompute in PARTLY:
            self._reads(schedule, weights, num_bytes)
        if weights.working and again:
            flat_bytes += weights.working * self._working(schedule.recompute)
        return Sums(self.scopes, places, flat_seconds, flat_bytes, gathered, gather_again)

    def _less(self, weights: Weights) -> list[tuple[tuple[float, float], ...]] | None:
        """By how much computing, and messages beside it, count less than in line.

        Of each segment, in forward and in backward: there of what late gradients leave, which hide
        behind all of it. None where no messages are beside computing.
        """
        if weights.beside is None:
            return None
        alone = 1.0 - self.slows
        out = []
        for part, shares in enumerate(weights.beside):
            late = weights.late[part] if weights.floor else 0.0
            passes = weights.forward[part], max(0.0, weights.backward[part] - late)
            out.append(
                tuple(
                    (alone * n * u, alone * n * (1.0 - u))
                    for n, u in zip(passes, shares, strict=True)
                )
            )
        return out

    def _later(
        self,
        apart: LaterTables,
        variable: int,
        kind: int,
        part: int,
        weights: Weights,
        seconds: list[Array],
        num_bytes: list[Array],
    ) -> None:
        """What differs where gradients of weights are tasks of their own."""
        later = apart.of[variable]
        if later is None or weights.weight is None:
            return
        back = weights.backward[part]
        seconds[kind] += back * later.more + (weights.weight[part] - back) * later.seconds
        if weights.floor and weights.late[part]:
            hides = later.computing if self.one_link else later.seconds
            seconds[kind] -= weights.late[part] * hides
        if weights.waiting is not None:
            num_bytes[kind] += weights.waiting[part] * later.waiting

    def _flat(self, factor: int, table: Array) -> Array:
        return np.diagonal(table).copy() if factor in self._diagonal else table

    def _leaf(
        self,
        node: Node,
        part: int,
        kind: int,
        number: int,
        schedule: Schedule,
        weights: Weights,
        seconds: list[Array],
        num_bytes: list[Array],
    ) -> None:
        """Update, accumulation and bytes of a stored value."""
        if node.op == "input":
            return
        model, shards = self.model, schedule.optimizer_shards
        key = ("leaf", number, shards)
        if key not in self._kept:
            rows = np.zeros((3, len(self.lists[kind])))
            bandwidth = model.cluster.copy_bytes_per_second
            for i, strategy in enumerate(self.lists[kind]):
                share = shared_by(self.axis_names, model.sizes, strategy.result, shards)
                itself, gradient, state = model.stored_bytes(node, strategy.result)
                rows[1, i] = itself + gradient + state // share
                if node.op == "parameter" and node.differentiable:
                    elements = model.local_bytes(node, strategy.result) / node.itemsize
                    rows[0, i] = model.update_seconds(node, strategy.result) / share
                    rows[2, i] = elements * (node.itemsize + 2 * MASTER_BYTES) / bandwidth
            self._kept[key] = rows
        update, stored, adding = self._kept[key]
        seconds[kind] += weights.update[part] * update
        if schedule.microbatches > 1:
            passes = weights.backward if weights.weight is None else weights.weight
            seconds[kind] += passes[part] * adding
        num_bytes[kind] += weights.stored[part] * stored

    def _keeps(self, node: Node, number: int, again: frozenset[str], gone: frozenset[str]) -> Array:
        """Bytes that a node keeps for backward; nothing of its own where it is computed again."""
        if node.name in again:
            return np.zeros_like(self.tables.unary_tables[number].num_bytes)
        if not gone:
            return self.tables.unary_tables[number].num_bytes
        roles = tuple(
            role
            for role, value in zip(node.saved, listed(node), strict=True)
            if base(self.graph, value) not in gone
        )
        if roles == node.saved:
            return self.tables.unary_tables[number].num_bytes
        key = ("kept", number, roles)
        if key not in self._kept:
            rest = _saving(node, roles)
            rows = self.lists[self.kind[self.tables.place[node.name]]]
            self._kept[key] = np.array(
                [kept_bytes(self.model, rest, s, self._weights) for s in rows]
            )
        return self._kept[key]

    @cached_property
    def later(self) -> LaterTables:
        """What makes gradients of weights only."""
        return LaterTables(self.model, self.tables)

    @cached_property
    def _weights(self) -> frozenset[str]:
        return weight_values(self.graph)

    def _recomputed(self, schedule: Schedule) -> frozenset[str]:
        kind = schedule.recompute
        if kind not in self._again:
            found: set[str] = set()
            for s in self.parts:
                if s.is_block:
                    found |= recomputed(self.graph.nodes[s.start : s.end], schedule)
            self._again[kind] = frozenset(found)
        return self._again[kind]

    def _gone(self, schedule: Schedule) -> frozenset[str]:
        """Values of blocks that nobody keeps, whoever lists them."""
        key = schedule.recompute if schedule.recompute in PARTLY else "none"
        if key not in self._without:
            found = self._recomputed(schedule) if key in PARTLY else frozenset()
            for s in self.parts:
                if s.is_block:
                    nodes = self.graph.nodes[s.start : s.end]
                    found |= in_kernels(self.graph, nodes, self.model.style)
            self._without[key] = found
        return self._without[key]

    def _reads(self, schedule: Schedule, weights: Weights, num_bytes: list[Array]) -> None:
        """Bytes that are kept because what is computed again reads them."""
        for part, kind, sizes in self._read_again(schedule):
            num_bytes[kind] += weights.kept[part] * sizes

    def _read_again(
        self, schedule: Schedule, *, news: bool = False
    ) -> list[tuple[int, int, Array]]:
        """(segment, kind of node, bytes of each strategy) of values that are read again.

        ``news``: of those alone that nobody keeps where nothing is computed again.
        """
        key = schedule.recompute, news
        if key not in self._read:
            again, found = self._recomputed(schedule), []
            for part, s in enumerate(self.parts):
                nodes = self.graph.nodes[s.start : s.end]
                names = read_again(self.graph, nodes, again) if s.is_block else ()
                if news:
                    all_ = {
                        base(self.graph, v) for n in nodes if n.differentiable for v in listed(n)
                    }
                    names = tuple(n for n in names if base(self.graph, n) not in all_)
                for name in names:
                    node, kind = self.graph.by_name[name], self.kind[self.tables.place[name]]
                    sizes = [stored_bytes(self.model, node, s.result) for s in self.lists[kind]]
                    found.append((part, kind, np.array(sizes, dtype=np.float64)))
            self._read[key] = found
        return self._read[key]

    def _working(self, kind: str) -> Array:
        """Bytes of one block that come back while it is computed again, by entries of all factors.

        All that it keeps otherwise; where a part is computed again, what it keeps more then.
        """
        if kind not in self._work:
            none = (0.0,) * len(self.parts)
            blocks = [i for i, is_block in enumerate(self.is_block) if is_block]
            at = blocks[min(1, len(blocks) - 1)]
            one = tuple(float(i == at) for i in range(len(self.parts)))
            held = Weights(
                forward=none, backward=none, update=none, late=none, stored=none, kept=one
            )
            found = self.sums(Schedule(), held).flat_bytes
            if kind in PARTLY:
                schedule = Schedule(recompute=kind)
                found = found - self.sums(schedule, held).flat_bytes
                sizes_of = self.places.split(found)
                for part, number, sizes in self._read_again(schedule, news=True):
                    if part == at:
                        sizes_of[number] += sizes
            self._work[kind] = found
        return self._work[kind]

    def _copied(self, schedule: Schedule) -> dict[int, Array]:
        """By edge: bytes of what an operator keeps of a value that is computed again.

        Where messages bring it, that is a copy, which is not computed again with the value.
        """
        key = schedule.recompute
        if key not in PARTLY:
            return {}
        if key not in self._copies:
            again, found = self._recomputed(schedule), {}
            uses = Kept.of(self.graph, self._weights)
            names = self.tables.variables
            for number, (u, v, index, table) in enumerate(self.tables.edges):
                kept = (names[v], index) in uses.listed | uses.unlisted
                if not kept or names[v] in again or base(self.graph, names[u]) not in again:
                    continue
                edge, producer = self.tables.edge_tables[table], self.graph.by_name[names[u]]
                rows = self.lists[self.kind[v]]
                sent = edge.seconds if edge.forward is None else edge.forward
                sizes = [stored_bytes(self.model, producer, s.operands[index]) for s in rows]
                moved = np.isfinite(sent) & (sent > 0)
                found[number] = np.where(moved, np.array(sizes, dtype=np.float64), 0.0)
            self._copies[key] = found
        return self._copies[key]

    def _crossing(
        self,
        schedule: Schedule,
        weights: Weights,
        whole: bool,
        seconds: list[Array],
        num_bytes: list[Array],
    ) -> None:
        """Of what one block hands to the next: messages, and bytes where nothing else is kept."""
        names = crossing_nodes(self.graph, self.parts)
        kept = sum(w for w, block in zip(weights.kept, self.is_block, strict=True) if block)
        for name in names:
            kind = self.kind[self.tables.place[name]]
            node = self.graph.by_name[name]
            sizes = [self.model.local_bytes(node, s.result) for s in self.lists[kind]]
            if whole:
                num_bytes[kind] += kept * np.array(sizes, dtype=np.float64)
            if weights.sends and len(names) == 1:
                known = {n: send_seconds(self.model, schedule, n) for n in set(sizes)}
                seconds[kind] += weights.sends * np.array([known[n] for n in sizes])

    # ---- solving ----------------------------------------------------------------------------

    def minimum(self, sums: Sums, per_byte: float = 0.0) -> tuple[float, Tied]:
        """(least seconds + per_byte * bytes, the choice that has it)."""
        if per_byte not in sums.minima:
            value, choice = self.elimination.solve(sums.at(per_byte))
            again = sums.chosen_again(choice, per_byte)
            sums.minima[per_byte] = value, sums.measure(choice, again)
        return sums.minima[per_byte]

    def measure(self, sums: Sums, choice: Choice, again: frozenset[int]) -> Tied:
        """Seconds and bytes of a choice."""
        return sums.measure(choice, again)

    def passes_at(self, schedule: Schedule, choice: Choice) -> Array:
        """Seconds of one microbatch with a choice; gradients of all left out.

        In forward, in backward and for gradients of weights, where these are apart (rows), of each
        segment.
        """
        again, out = self._recomputed(schedule), np.zeros((3, len(self.parts)))
        apart = self.later if schedule.splits_backward else None
        tables = self.tables
        for i, passes in enumerate(
            self.beside_at(schedule, choice, frozenset()) if self.model.beside else ()
        ):
            out[:2, i] -= [(1.0 - self.slows) * min(c, b) for c, b in passes]
        at = [int(choice[k]) for k in self.kind]
        for variable, number in enumerate(tables.unary):
            name = tables.variables[variable]
            if not self.graph.by_name[name].is_leaf:
                table, i = tables.unary_tables[number], at[variable]
                forward = table.forward[i]
                back = table.seconds[i] - forward + (forward if name in again else 0.0)
                later = None if apart is None else apart.of[variable]
                last = 0.0 if later is None else later.seconds[i]
                more = 0.0 if later is None else later.more[i]
                out[:, self.segment_of[name]] += forward, back + more - last, last
        for u, v, _, number in tables.edges:
            edge, name = tables.edge_tables[number], tables.variables[v]
            forward = (edge.seconds if edge.forward is None else edge.forward)[at[u], at[v]]
            back = edge.seconds[at[u], at[v]] - forward
            last = back if apart is not None and apart.is_sent(u) else 0.0
            back += (forward if name in again else 0.0) - last
            out[:, self.segment_of[name]] += forward, back, last
        return out

    def beside_at(
        self, schedule: Schedule, choice: Choice, gathered_again: frozenset[int]
    ) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """Seconds of computing, and of messages beside it, of one microbatch with a choice.

        Of each segment, in forward and in backward.

        ``gathered_again``: factors whose weights are gathered again in backward.
        """
        again, tables = self._recomputed(schedule), self.tables
        out = np.zeros((len(self.parts), 2, 2))
        at = [int(choice[k]) for k in self.kind]
        for variable, number in enumerate(tables.unary):
            node, table = (
                self.graph.by_name[tables.variables[variable]],
                tables.unary_tables[number],
            )
            if table.beside is None or node.is_leaf:
                continue
            i = at[variable]
            there = np.array([table.forward_compute[i], table.beside[0][i]])
            back = np.array([table.backward[i], table.beside[1][i]])
            out[self.segment_of[node.name]] += [there, back + there * (node.name in again)]
        for factor, edges in self._edges.items():
            for number, table_number in edges:
                u, v, _, _ = tables.edges[number]
                beside, name = tables.edge_tables[table_number].beside, tables.variables[v]
                if beside is None:
                    continue
                ahead, behind, later = (float(b[at[u], at[v]]) for b in beside)
                back_s = behind + ahead * (name in again) + later * (factor in gathered_again)
                out[self.segment_of[name], :, 1] += (ahead, back_s)
        return [((a, b), (c, d)) for ((a, b), (c, d)) in out.tolist()]

    @property
    def extremes(self) -> tuple[Shares | None, ...]:
        """What messages beside computing may count: nothing, all; not at all where none are."""
        if not self.model.beside:
            return (None,)
        return tuple(((u, u),) * len(self.parts) for u in (0.0, 1.0))

    def passing(self, recompute: str) -> list[Array]:
        """Bytes that there are for a while beside all that is kept, by factor.

        What the loss takes, and what comes back of one block while it is computed again.
        """
        flat = np.zeros(self.places.ends[-1])
        if self._recomputed(Schedule(recompute=recompute)):
            flat += self._working(recompute)
        sizes = self.places.split(flat)
        for kind, _, number, _, _ in self._members:
            temporary = self.tables.unary_tables[number].temporary
            if temporary is not None:
                sizes[kind] += temporary
        return sizes

    # ---- exact figures ----------------------------------------------------------------------

    def strategies(self, choice: Choice) -> dict[str, Strategy]:
        """The strategy of every node of the short graph."""
        out = {
            name: self.lists[kind][int(choice[kind])]
            for name, kind in zip(self.tables.variables, self.kind, strict=True)
        }
        whole = Strategy((), (), (R,) * len(self.model.sizes), 1.0)
        out |= {n.name: whole for n in self.graph.nodes if n.op == "constant"}
        return out

    def regather(self, again: frozenset[int]) -> frozenset[tuple[str, int]]:
        """(consumer, operand index) of the edges that gather again, in the short graph."""
        return frozenset(
            (self.tables.variables[self.tables.edges[number][1]], self.tables.edges[number][2])
            for factor in again
            for number, table in self._edges[factor]
            if self.tables.edge_tables[table].gathered is not None
        )

    def program(self, found: Tied) -> Program:
        """The program of one microbatch of the short graph."""
        return Program(
            self.graph,
            self.axis_names,
            self.model.sizes,
            self.strategies(found.choice),
            self.model.resharder,
            regather=self.regather(found.again),
            bucket_bytes=self.bucket_bytes,
            rules=self.model.rules,
        )

    def measured(self, found: Tied, schedule: Schedule) -> tuple[Program, Measured]:
        """The program, and the exact figures of each segment of the whole model."""
        if found.key not in self._programs:
            self._programs[found.key] = self.program(found)
        program = self._programs[found.key]

        def measured(schedule: Schedule) -> Measured:
            how = schedule.recompute, schedule.optimizer_shards, schedule.overlapped
            full = found.key, *how, schedule.splits_backward
            if full not in self._measured:
                segments_ = measure(self.model, program, schedule)
                self._measured[full] = segments_.with_blocks(self.blocks)
            return self._measured[full]

        return program, measured_step(measured, schedule)

    def step(
        self,
        found: Tied,
        schedule: Schedule,
        limit: int | None,
        others: Others | None = None,
    ) -> Step:
        """The exact figures of a step; ``others`` are the strategies of some of the blocks."""
        program, measured = self.measured(found, schedule)
        if others is not None:
            _, more = self.measured(others.tied, schedule)
            measured = mixed(measured, more, self.have(others, schedule))
        return compose(self.model, program, schedule, measured, limit)

    def shared_out(
        self, rest: Tied, others: Others | None, schedule: Schedule
    ) -> list[tuple[Tied, frozenset[int]]]:
        """Each choice, and the segments of the whole model that have it."""
        every = frozenset(range(len(self.stands_for)))
        if others is None:
            return [(rest, every)]
        have = self.have(others, schedule)
        return [(rest, every - have), (others.tied, have)]

    def have(self, others: Others, schedule: Schedule) -> frozenset[int]:
        """Segments of the whole model that have the strategies of ``others``."""
        is_block = [self.is_block[i] for i in self.stands_for]
        return later_blocks(is_block, schedule, others.blocks)


def scaled(weight: float, values: Array) -> Array:
    """``weight * values``; what is impossible stays so at any weight."""
    if weight > 0:
        return weight * values
    out: Array = np.where(np.isinf(values), values, weight * np.where(np.isinf(values), 0, values))
    return out


def standing(is_block: Sequence[bool], blocks: int) -> tuple[int, ...]:
    """For each segment of the whole model the segment of the short graph that stands for it."""
    here = [i for i, repeated in enumerate(is_block) if repeated]
    if len(here) == blocks:
        return tuple(range(len(is_block)))
    first, last = here[0], here[-1]
    middle = (first + 1,) * (blocks - 2)
    return (*range(first + 1), *middle, *range(last, len(is_block)))


def listed_twice(
    is_block: tuple[bool, ...], stands_for: tuple[int, ...], schedule: Schedule
) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """The same with the segments of the short graph a second time, for recomputed blocks.

    As they are where all blocks are recomputed, or none.
    """
    if schedule.recomputed_blocks is None:
        return is_block, stands_for
    chosen = again_of([is_block[i] for i in stands_for], schedule)
    count = len(is_block)
    return is_block * 2, tuple(
        stands + count * (i in chosen) for i, stands in enumerate(stands_for)
    )


def first_instances(nodes: Sequence[Node], repeats: Sequence[Repeat]) -> dict[str, str]:
    """Name of each node of a repeated block -> that of its counterpart in the first instance."""
    out: dict[str, str] = {}
    for repeat in repeats:
        first = nodes[repeat.starts[0] : repeat.starts[0] + repeat.length]
        for start in repeat.starts:
            for a, b in zip(first, nodes[start : start + repeat.length], strict=True):
                out[b.name] = a.name
    return out


def _saving(node: Node, roles: tuple[str, ...]) -> Node:
    return replace(node, saved=roles)
