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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import inf

import numpy as np
from numpy.typing import NDArray

from autoshard.candidates import Candidates
from autoshard.graph import ModelGraph, Node, Repeat
from autoshard.plan import Schedule
from autoshard.program import DEFAULT_BUCKET_BYTES, Program, shared_by
from autoshard.search.cost import CostModel, build_tables, kept_bytes, weight_values
from autoshard.search.eliminate import Array, Elimination, Factor
from autoshard.search.packing import packed
from autoshard.search.step import (
    MASTER_BYTES,
    Measured,
    Step,
    compose,
    crossing_nodes,
    measure,
    recomputed,
    segments,
    send_seconds,
)
from autoshard.sharding.layout import R
from autoshard.sharding.strategy import Strategy

Choice = NDArray[np.int64]

FEW = 3
"""Gathered weights of a group of which every subset is looked at."""


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
        sends: messages from stage to stage.
        temporary: what there is for a while beside all that is kept.
        floor: whether late gradients count with the least they can take, and less what hides them
            (computing, and messages where some use no tier that others use): then the sum is a
            bound.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    late: tuple[float, ...]
    stored: tuple[float, ...]
    kept: tuple[float, ...]
    sends: float = 0.0
    temporary: float = 0.0
    floor: bool = False

    @property
    def counts(self) -> tuple[bool, ...]:
        """Whether a segment counts at all."""
        rows = (self.forward, self.backward, self.update, self.late, self.stored, self.kept)
        return tuple(map(any, zip(*rows, strict=True)))


@dataclass(frozen=True, slots=True)
class Sums:
    """Tables of one schedule and one set of weights, by factor.

    Attributes:
        seconds: of each factor.
        num_bytes: of each factor.
        gathered: bytes of gathered weights that are kept, where a factor has any.
        again: seconds of gathering them again instead.
    """

    seconds: tuple[Array, ...]
    num_bytes: tuple[Array, ...]
    gathered: dict[int, Array]
    again: dict[int, Array]

    def towards(self, other: Sums, share: float) -> Sums:
        """Between these seconds and another's; bytes are the same."""
        seconds = tuple(
            a if a is b else a + share * (b - a)
            for a, b in zip(self.seconds, other.seconds, strict=True)
        )
        again = {f: (1 - share) * a + share * other.again[f] for f, a in self.again.items()}
        return Sums(seconds, self.num_bytes, self.gathered, again)

    def at(self, per_byte: float) -> list[Array]:
        """Seconds with every byte at a price."""
        if not per_byte:
            return list(self.seconds)
        out = [s + per_byte * b for s, b in zip(self.seconds, self.num_bytes, strict=True)]
        for factor, gathered in self.gathered.items():
            out[factor] = out[factor] + np.minimum(per_byte * gathered, self.again[factor])
        return out


@dataclass(frozen=True, slots=True)
class Tied:
    """A choice for every kind of node, with its sums.

    Attributes:
        choice: number of the strategy of each kind.
        again: factors whose weights are gathered again in backward.
        seconds: sum of the tables.
        num_bytes: the same of bytes.
    """

    choice: Choice
    again: frozenset[int]
    seconds: float
    num_bytes: float


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
        self._part = {
            n.name: i for i, s in enumerate(self.parts) for n in self.graph.nodes[s.start : s.end]
        }
        self._tie()
        self._measured: dict[object, tuple[Program, Measured]] = {}
        self._again: dict[str, frozenset[str]] = {}
        self._kept: dict[object, Array] = {}
        self._least: dict[str, tuple[float, ...]] = {}
        self._lean: dict[str, tuple[float, ...]] = {}

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
        self._unary: list[list[tuple[int, int]]] = [[] for _ in lists]
        for variable, table in enumerate(tables.unary):
            self._unary[self.kind[variable]].append((variable, table))
        self._edges: dict[int, list[tuple[int, int]]] = {}
        for number, (u, v, _, table) in enumerate(tables.edges):
            a, b = self.kind[u], self.kind[v]
            key = (a, b) if a != b else (a, a, a)
            factor = keys.setdefault(key, len(keys))
            self._edges.setdefault(factor, []).append((number, table))
        self.scopes = [key if len(key) < 3 else (key[0],) for key in keys]
        sizes = [len(rows) for rows in lists]
        factors: list[Factor] = [(scope, i) for i, scope in enumerate(self.scopes)]
        shapes = [tuple(sizes[k] for k in scope) for scope in self.scopes]
        self.shapes = shapes
        self.elimination = Elimination(sizes, factors, shapes)
        self._diagonal = {i for i, key in enumerate(keys) if len(key) == 3}

    def sums(self, schedule: Schedule, weights: Weights) -> Sums:
        """The tables of a step of ``schedule``."""
        seconds: list[Array] = [np.zeros(shape) for shape in self.shapes]
        num_bytes: list[Array] = [np.zeros(shape) for shape in self.shapes]
        again = self._recomputed(schedule)
        whole = schedule.recompute in ("full", "reentrant")
        counts = weights.counts
        for kind, members in enumerate(self._unary):
            for variable, number in members:
                node = self.graph.by_name[self.tables.variables[variable]]
                part = self._part[node.name]
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
                if weights.floor and weights.late[part]:
                    if self.one_link:
                        hides = table.backward + table.forward_compute * repeated
                    else:
                        hides = table.seconds - table.forward + table.forward * repeated
                    seconds[kind] -= weights.late[part] * hides
                if weights.kept[part] and not (whole and self.is_block[part]):
                    num_bytes[kind] += weights.kept[part] * self._keeps(node, number, again)
        gathered: dict[int, Array] = {}
        gather_again: dict[int, Array] = {}
        for factor, edges in self._edges.items():
            for number, table_number in edges:
                consumer = self.tables.variables[self.tables.edges[number][1]]
                part = self._part[consumer]
                if not counts[part]:
                    continue
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
                if hidden and table_.forward is not None:
                    out = out - hidden * np.where(
                        np.isinf(table_.seconds), 0.0, table_.seconds - forward
                    )
                if hidden and repeated:
                    out = out - hidden * np.where(np.isinf(forward), 0.0, forward)
                seconds[factor] += self._flat(factor, out)
                keeps = weights.kept[part] and not repeated and not (whole and self.is_block[part])
                if keeps and table_.kept is not None:
                    num_bytes[factor] += weights.kept[part] * self._flat(factor, table_.kept)
                if not keeps or table_.gathered is None or table_.again is None:
                    continue
                for held, values, weight in (
                    (gathered, table_.gathered, weights.kept[part]),
                    (gather_again, table_.again, weights.backward[part] - hidden),
                ):
                    added = self._flat(factor, scaled(weight, values))
                    held[factor] = held[factor] + added if factor in held else added
        self._crossing(schedule, weights, whole, seconds, num_bytes)
        return Sums(tuple(seconds), tuple(num_bytes), gathered, gather_again)

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
            seconds[kind] += weights.backward[part] * adding
        num_bytes[kind] += weights.stored[part] * stored

    def _keeps(self, node: Node, number: int, again: frozenset[str]) -> Array:
        """Bytes that a node keeps for backward; not what is computed again."""
        if not again:
            return self.tables.unary_tables[number].num_bytes
        if node.name in again:
            return np.zeros_like(self.tables.unary_tables[number].num_bytes)
        roles = tuple(
            role
            for role in node.saved
            if role == "result" or node.operands[node.roles.index(role)] not in again
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
        value, choice = self.elimination.solve(sums.at(per_byte))
        return value, self.measure(sums, choice, self._chosen_again(sums, choice, per_byte))

    def _at(self, factor: int, choice: Choice) -> tuple[int, ...]:
        return tuple(int(choice[k]) for k in self.scopes[factor])

    def _chosen_again(self, sums: Sums, choice: Choice, per_byte: float) -> frozenset[int]:
        out = []
        for factor, gathered in sums.gathered.items() if per_byte else ():
            at = self._at(factor, choice)
            if gathered[at] > 0 and per_byte * gathered[at] > sums.again[factor][at]:
                out.append(factor)
        return frozenset(out)

    def measure(self, sums: Sums, choice: Choice, again: frozenset[int]) -> Tied:
        """Seconds and bytes of a choice."""
        seconds = num_bytes = 0.0
        for factor in range(len(self.scopes)):
            at = self._at(factor, choice)
            seconds += float(sums.seconds[factor][at])
            num_bytes += float(sums.num_bytes[factor][at])
        for factor, gathered in sums.gathered.items():
            at = self._at(factor, choice)
            if factor in again:
                seconds += float(sums.again[factor][at])
            else:
                num_bytes += float(gathered[at])
        return Tied(choice, again, seconds, num_bytes)

    def parts_at(self, schedule: Schedule, choice: Choice) -> list[float]:
        """Seconds of one microbatch in each segment, with a choice; gradients of all left out."""
        again, out = self._recomputed(schedule), [0.0] * len(self.parts)
        tables = self.tables
        at = [int(choice[k]) for k in self.kind]
        for variable, number in enumerate(tables.unary):
            name = tables.variables[variable]
            if not self.graph.by_name[name].is_leaf:
                table = tables.unary_tables[number]
                out[self._part[name]] += float(table.seconds[at[variable]])
                if name in again:
                    out[self._part[name]] += float(table.forward[at[variable]])
        for u, v, _, number in tables.edges:
            edge, name = tables.edge_tables[number], tables.variables[v]
            out[self._part[name]] += float(edge.seconds[at[u], at[v]])
            if name in again:
                forward = edge.seconds if edge.forward is None else edge.forward
                out[self._part[name]] += float(forward[at[u], at[v]])
        return out

    def combined(self, sums: Sums, pool: Sequence[Tied], room: float) -> Tied | None:
        """The best within ``room`` that takes each group of kinds from one choice of ``pool``.

        Groups are kinds that choose differently within the pool and touch; what they cost adds up.
        A price of memory alone finds the corners of what can be had for so many bytes; between
        them lies what takes some groups from one corner and some from another. Gathered weights of
        each group may be kept or gathered again. None where nothing is within ``room``.
        """
        base = pool[0]
        differ = {k for t in pool for k in np.flatnonzero(t.choice != base.choice).tolist()}
        groups = self._touching(differ)
        near: dict[int, list[int]] = {}
        for factor in sums.gathered:
            home = next((g for g, kinds in enumerate(groups) if {*self.scopes[factor]} & kinds), -1)
            near.setdefault(home, []).append(factor)
        groups += [set() for _ in near.get(-1, ())]
        touched = [near.get(g, []) for g in range(len(groups) - len(near.get(-1, ())))]
        touched += [[factor] for factor in near.get(-1, ())]
        offers: list[list[tuple[Choice, frozenset[int], Tied]]] = []
        for kinds, factors in zip(groups, touched, strict=True):
            found: dict[object, tuple[Choice, frozenset[int], Tied]] = {}
            own = sorted(kinds)
            for tied in pool:
                choice = base.choice.copy()
                choice[own] = tied.choice[own]
                may = frozenset(f for f in factors if sums.gathered[f][self._at(f, choice)] > 0)
                for again in _subsets(may, tied.again & may):
                    key = choice[own].tobytes(), again
                    if key not in found:
                        rest = base.again - frozenset(factors)
                        found[key] = choice, again, self.measure(sums, choice, rest | again)
            offers.append([o for o in found.values() if o[2].seconds < inf])
        fixed = base.num_bytes
        chosen = packed(
            [[(t.seconds - base.seconds, t.num_bytes - fixed) for *_, t in o] for o in offers],
            room - fixed,
        )
        if chosen is None:
            return None
        choice, again = base.choice.copy(), base.again
        for kinds, factors, offer, number in zip(groups, touched, offers, chosen, strict=True):
            own = sorted(kinds)
            choice[own] = offer[number][0][own]
            again = again.difference(factors) | offer[number][1]
        best = self.measure(sums, choice, frozenset(again))
        return best if best.num_bytes <= room else None

    def _touching(self, kinds: set[int]) -> list[set[int]]:
        """Groups of kinds that share factors."""
        out: list[set[int]] = [{k} for k in sorted(kinds)]
        for scope in self.scopes:
            joined = [group for group in out if group & {*scope}]
            if len(joined) > 1:
                out = [group for group in out if group not in joined]
                out.append(set().union(*joined))
        return out

    def filled(self, sums: Sums, found: Tied, faster: Tied, room: float) -> Tied:
        """``found`` with what is left of ``room`` used up.

        A price of memory gives all or nothing where many choices are worth the same. So gathered
        weights are kept where they fit, and groups of kinds that touch are taken over from
        ``faster``, what saves most for its bytes first.
        """
        best = found
        improved = True
        while improved:
            improved = False
            offers = [best.again - {factor} for factor in best.again]
            trials = [self.measure(sums, best.choice, again) for again in offers]
            for group in self._groups(best.choice, faster.choice):
                choice = best.choice.copy()
                choice[group] = faster.choice[group]
                again = frozenset(
                    f for f in best.again if sums.gathered[f][self._at(f, choice)] > 0
                )
                trials.append(self.measure(sums, choice, again))
            better = [t for t in trials if t.num_bytes <= room and t.seconds < best.seconds]
            if better:
                bytes_, seconds = best.num_bytes, best.seconds
                best = min(
                    better,
                    key=lambda t: (t.seconds - seconds) / max(1.0, t.num_bytes - bytes_),
                )
                improved = True
        return best

    def _groups(self, mine: Choice, other: Choice) -> list[list[int]]:
        """Kinds that choose differently, those that share a factor together, and each alone."""
        differ = {k for k in range(len(self.lists)) if mine[k] != other[k]}
        near: dict[int, set[int]] = {k: set() for k in differ}
        for scope in self.scopes:
            if len(scope) == 2 and scope[0] in differ and scope[1] in differ:
                near[scope[0]].add(scope[1])
                near[scope[1]].add(scope[0])
        out: list[list[int]] = []
        seen: set[int] = set()
        for kind in sorted(differ):
            if kind in seen:
                continue
            group, todo = {kind}, [kind]
            while todo:
                fresh = near[todo.pop()] - group
                group |= fresh
                todo += fresh
            seen |= group
            out.append(sorted(group))
        alone = [[k] for k in sorted(differ)]
        return out + [group for group in alone if group not in out]

    def least_parts(self, recompute: str) -> tuple[float, ...]:
        """The least seconds of one microbatch in each segment, chosen for that segment alone.

        The optimizer and the sum of several microbatches' gradients are left out.
        """
        if recompute not in self._least:
            none = (0.0,) * len(self.parts)
            schedule = Schedule(recompute=recompute)
            found = []
            for part in range(len(self.parts)):
                one = tuple(float(i == part) for i in range(len(self.parts)))
                weights = Weights(
                    forward=one, backward=one, update=none, late=none, stored=none, kept=none
                )
                found.append(self.elimination.least(self.sums(schedule, weights).seconds))
            self._least[recompute] = tuple(found)
        return self._least[recompute]

    def least_kept(self, recompute: str) -> tuple[float, ...]:
        """The least bytes that each segment keeps for the backward of one microbatch.

        Chosen for that segment alone; gathered weights are not counted.
        """
        if recompute not in self._lean:
            none = (0.0,) * len(self.parts)
            found = []
            for part in range(len(self.parts)):
                one = tuple(float(i == part) for i in range(len(self.parts)))
                weights = Weights(
                    forward=none, backward=none, update=none, late=none, stored=none, kept=one
                )
                sums = self.sums(Schedule(recompute=recompute), weights)
                found.append(self.elimination.least(sums.num_bytes))
            self._lean[recompute] = tuple(found)
        return self._lean[recompute]

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
        key = (found.choice.tobytes(), found.again)
        full = (key, schedule.recompute, schedule.optimizer_shards)
        if full not in self._measured:
            known = next((p for k, (p, _) in self._measured.items() if k[0] == key), None)  # type: ignore[index]
            program = known or self.program(found)
            segments_ = measure(self.model, program, schedule)
            self._measured[full] = program, segments_.with_blocks(self.blocks)
        return self._measured[full]

    def step(self, found: Tied, schedule: Schedule, limit: int | None) -> Step:
        """The exact figures of a step."""
        program, measured = self.measured(found, schedule)
        return compose(self.model, program, schedule, measured, limit)


def _subsets(may: frozenset[int], own: frozenset[int]) -> Iterator[frozenset[int]]:
    """All of few factors; of many none, all and those that a choice has."""
    if len(may) > FEW:
        yield from (frozenset(), may, own)
        return
    for count in range(len(may) + 1):
        yield from map(frozenset, combinations(sorted(may), count))


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
