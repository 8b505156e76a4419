"""The fastest strategies for a step of many microbatches, stages and recomputation on one mesh.

The weighted sum of :mod:`autoshard.search.bounds` is minimised exactly; the answer is priced
exactly. Memory enters by a multiplier, as in :mod:`autoshard.search.problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

import numpy as np

from autoshard.plan import Schedule
from autoshard.search.bounds import Way, rows_of, runs_of, ways, weights
from autoshard.search.chords import between
from autoshard.search.critical import critical
from autoshard.search.feasible import SURE
from autoshard.search.filling import combined, filled
from autoshard.search.folded import Folded, Shares, listed_twice
from autoshard.search.mixing import Pair, pairs
from autoshard.search.preference import preference
from autoshard.search.problem import LEANEST
from autoshard.search.stalls import Stall, Stalls
from autoshard.search.step import Step, kinds_of
from autoshard.search.sums import Others, Sums, Tied

HALVINGS = 6
"""Steps that find the share of late gradients whose bound is the highest."""

ROUNDS = 4
"""Times that the room for temporaries is corrected from exact figures."""

PARTS = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Parts of the bytes left free that are tried."""

CHAINS = 3
"""Times that the sum follows what the best strategies wait for."""

DEPTH = 1
"""Times that choices without a stall are looked at for stalls of their own."""

CLOSE = 1e-4
"""Share of a step below which another way is not worth a solve."""

NEAR = 1e-4
"""Share of the limit by which exact bytes may be below those of the tables: where nearly nothing
fits, a byte less has no bound at any price."""

LEANINGS = 5
"""Most shares of messages beside computing that are tried."""

PAIRS = 2
"""Most pairs of choices that blocks are mixed from."""

CHORDS = 16
"""Most prices of memory that are tried."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best strategies of one schedule on one mesh.

    Attributes:
        tied: the choice.
        step: its exact figures.
        bound: no strategies, alike in all blocks, are faster within the limit.
        others: the choice of some of the blocks; None: they are all alike.
    """

    tied: Tied
    step: Step
    bound: float
    others: Others | None = None

    @property
    def fits(self) -> bool:
        """Whether it is within the limit."""
        return self.step.memory.fits


class Scheduled:
    """One schedule on one mesh.

    Args:
        folded: the problem of one microbatch.
        schedule: how a step is run.
        limit: bytes of a device that may be used; None: no limit.
    """

    def __init__(self, folded: Folded, schedule: Schedule, limit: int | None) -> None:
        self.folded, self.schedule, self.limit = folded, schedule, limit
        twice = listed_twice(folded.is_block, folded.stands_for, schedule)
        self.is_block, self.stands_for = twice
        self._kinds = kinds_of(schedule)
        """Blocks that differ in what is computed again, as schedules of the same for all."""
        self.ways = ways(schedule)
        self.way = self.ways[0]
        self.memory_rank = 0
        self._price = self._bounded = 0.0
        self.has_late = any(t.deferred is not None for t in folded.tables.edge_tables)
        self._exposed = 0.0
        self._seen: list[Tied] = []
        self._tried: list[Tied] = []
        self.extremes = [s and s * len(self._kinds) for s in folded.extremes]
        self.beside = self.extremes[0]
        self._sums: dict[tuple[float, bool, Way, int, Shares | None], Sums] = {}
        self._steps: dict[tuple[bytes, frozenset[int]], Step] = {}

    def sums(self, exposed: float, *, floor: bool = False) -> Sums:
        """The tables at one share of late gradients."""
        key = exposed, floor, self.way, self.memory_rank, self.beside
        if key not in self._sums:
            if 0.0 < exposed < 1.0:
                none, all_ = (self.sums(e, floor=floor) for e in (0.0, 1.0))
                return none.towards(all_, exposed)
            found = weights(
                self.is_block,
                self.stands_for,
                self.schedule,
                way=self.way,
                memory_rank=self.memory_rank,
                exposed=exposed,
                floor=floor,
                beside=self.beside,
            )
            each = (found,) if len(self._kinds) == 1 else found.halves()
            sums = [self.folded.sums(s, w) for s, w in zip(self._kinds, each, strict=True)]
            self._sums[key] = sums[0] if len(sums) == 1 else sums[0].plus(sums[1])
        return self._sums[key]

    def bound(self) -> float:
        """Seconds that no strategies within the limit beat; infinite where none are within it."""
        if self.limit is not None and self.leanest_bytes() > SURE * self.limit:
            return inf
        self._price = 0.0
        _, fastest = self.folded.minimum(self.sums(0.0))
        self.way = self._longest_way(fastest)
        if self.limit is not None:
            self.memory_rank = max(self._ends, key=lambda rank: self._bytes_at(rank, fastest))
            sums = self.sums(0.0)
            fastest = self.folded.measure(sums, fastest.choice, fastest.again)
            if fastest.num_bytes > self._room(0.0):
                leanest = self.folded.minimum(sums, LEANEST)[1]
                _, self._price = self._chords(sums, fastest, leanest, self._room(0.0))
        if self.beside is None:
            self._bounded = self._highest()[0]
            return self._bounded
        found = []
        for shares in (*self.extremes, self._leaning(fastest)):
            self.beside = shares
            found.append(self._highest()[0])
        self.beside = self.extremes[0]
        self._bounded = max(found)
        return self._bounded

    def closer(self) -> float:
        """The bound along what one choice waits for, and where its backward stands still.

        Comes after :meth:`bound`; what :meth:`solve` does after it is the same as without.
        """
        _, tied = self.folded.minimum(self.sums(0.0), self._price)
        step = self.folded.step(tied, self.schedule, self.limit)
        way, found = self.way, self._bounded
        if longer := self._longer(step):
            self.way = longer
            found = max(found, self._highest()[0])
        if self._is_late(step, found):
            found = self._stalled(tied, found)
        self.way = way
        return found

    def _leaning(self, tied: Tied) -> Shares:
        """Where messages beside computing take longer than it does, with a choice."""
        return tuple(
            (float(a < b), float(c < d))
            for schedule in self._kinds
            for (a, b), (c, d) in self.folded.beside_at(schedule, tied.choice, tied.again)
        )

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Stages that may be the fullest: the first, the last, and one with more blocks than these.

        Of those that have the most blocks the first one, which keeps the most microbatches.
        """
        p = self.schedule.stages
        runs = runs_of([self.is_block[i] for i in self.stands_for], self.schedule)
        blocks = [0] * p
        for chunk, run in enumerate(runs):
            blocks[chunk % p] += sum(self.is_block[self.stands_for[i]] for i in run)
        most = max(range(p), key=lambda rank: (blocks[rank], -rank))
        return tuple(sorted({0, p - 1} | ({most} if blocks[most] > blocks[0] else set())))

    def _bytes_at(self, rank: int, tied: Tied) -> float:
        """Bytes of a choice on one stage."""
        self.memory_rank = rank
        return self.folded.measure(self.sums(0.0), tied.choice, tied.again).num_bytes

    def leanest_bytes(self) -> float:
        """Bytes that no strategies go below, on the stages that may be the fullest."""
        least = []
        for rank in self._ends:
            self.memory_rank = rank
            least.append(self.folded.minimum(self.sums(0.0), LEANEST)[1].num_bytes)
        self.memory_rank = 0
        return max(least) + self.folded.model.cluster.reserve_bytes

    def solve(self, *, alike: bool = False) -> Found:
        """The fastest that fits, with blocks ``alike`` if need be; where none does, the leanest."""
        found = self._alike()
        return found if alike else self._with_mixed(found)

    def _alike(self) -> Found:
        if self.beside is None:
            return self._chained()
        tried: dict[Shares, Found] = {}
        todo = [shares for shares in self.extremes if shares is not None]
        while todo and len(tried) < LEANINGS:
            self.beside = todo.pop(0)
            tried[self.beside] = self._chained()
            best, bound = min(tried.values(), key=_rank), max(f.bound for f in tried.values())
            if not todo and best.fits and bound < best.step.step_time.total_s * (1 - CLOSE):
                todo = [s for s in self._between(tried) if s not in tried][:1]
        seconds = best.step.step_time.total_s
        bound = min(bound, seconds) if best.fits else bound
        return Found(best.tied, best.step, bound)

    def _with_mixed(self, found: Found) -> Found:
        """``found``, or what is faster where not all blocks are alike."""
        if not found.fits or not self._price:
            return found
        seconds, folded = found.step.step_time.total_s, self.folded
        if found.bound >= seconds * (1 - CLOSE):
            return found
        assert self.limit is not None
        sums = self.sums(self._exposed)
        tied = folded.measure(sums, found.tied.choice, found.tied.again)
        pool = {t.key: t for t in (tied, *self._tried, *self._seen)}
        room = tied.num_bytes + self.limit - found.step.memory.total_bytes
        best = found
        for pair in pairs(folded, sums, list(pool.values()), room)[:PAIRS]:
            for other in self._filling(pair):
                # Where stages have not the same share of it, it may be below the bound.
                if found.bound <= other.step.step_time.total_s and _rank(other) < _rank(best):
                    best = replace(other, bound=found.bound)
        return best

    def _filling(self, pair: Pair) -> Iterator[Found]:
        """A pair with about as many of the faster blocks as fit, all of them maybe."""
        low, high = 0, self.folded.blocks + 1
        count = int(pair.share * self.folded.blocks)
        while low < high - 1:
            count = min(max(count, low + 1), high - 1)
            is_mixed = count < self.folded.blocks
            tied = pair.rest if is_mixed else pair.some
            others = Others(pair.some, count) if is_mixed else None
            step = self.folded.step(tied, self.schedule, self.limit, others)
            if step.memory.fits:
                low = count
                yield Found(tied, step, 0.0, others)
            else:
                high = count
            count = (low + high) // 2

    def _between(self, tried: Mapping[Shares, Found]) -> list[Shares]:
        """What messages beside computing may count next, the likeliest to help first.

        As the best choice has it; and half of what two that were tried have.
        """
        ranked = sorted(tried, key=lambda shares: -tried[shares].bound)
        best = min(tried.values(), key=_rank)
        halves = tuple(
            tuple((a + b) / 2 for a, b in zip(one, two, strict=True))
            for one, two in zip(*ranked[:2], strict=True)
        )
        return [self._leaning(best.tied), halves]

    def _chained(self) -> Found:
        """The best at one share of messages beside computing."""
        found = self._solve()
        for _ in range(CHAINS):
            # What these strategies wait for is the better sum, and the closer bound.
            way = self._longer(found.step)
            if way is None:
                break
            self.way = way
            other = self._solve()
            best = min((found, other), key=_rank)
            found = Found(best.tied, best.step, max(found.bound, other.bound))
        if not found.fits:
            return found
        seconds = found.step.step_time.total_s
        bound = found.bound
        if self._is_late(found.step, bound):
            bound = self._stalled(found.tied, bound)
        return Found(found.tied, found.step, min(bound, seconds))

    def _longer(self, step: Step) -> Way | None:
        """What a step waits for, where that takes longer than the way that is looked at."""
        s, chunks = self.schedule, step.chunks
        way = critical(s.order, chunks, s.stages, s.microbatches)
        if way == self.way or way.seconds(chunks) <= self.way.seconds(chunks) * (1 + CLOSE):
            return None
        return way

    @staticmethod
    def _is_late(step: Step, bound: float) -> bool:
        """Whether gradients that travel once a step may be why it is longer than a bound."""
        seconds = step.step_time.total_s
        return bound < seconds * (1 - CLOSE) and step.late_s > seconds * CLOSE

    def _stalled(self, tied: Tied, known: float) -> float:
        """The bound where backward stands still as it does with a choice.

        With more and more of its stalls, the longest first: each has choices without it, whose
        least is a bound of its own.
        """
        if self.schedule.overlapped or self.schedule.splits_backward:
            return known  # what a window has beside it is elsewhere then
        if len(self._kinds) > 1:
            return known  # windows differ from block to block
        if not any(self.folded.is_block):
            return known
        return self._above(
            Stalls(self.folded, self.schedule), tied, known, lambda sums: sums, DEPTH
        )

    def _above(
        self,
        stalls: Stalls,
        tied: Tied,
        known: float,
        only: Callable[[Sums], Sums],
        depth: int,
    ) -> float:
        """The bound of the choices that ``only`` leaves; ``tied`` is one of them."""
        base = only(self.sums(0.0, floor=True))
        highest = known
        found = stalls.of(tied.choice)
        for tiers in dict.fromkeys((stall.tier, stall.through) for stall in found):
            # Apart, since of other tiers it may be the same seconds.
            own = [stall for stall in found if (stall.tier, stall.through) == tiers]
            most = max(
                self._raised(partial(stalls.longer, base, some))[0] for some in (own[:1], own)
            )
            if most <= highest * (1 + CLOSE):
                continue
            taken: list[Stall] = []
            best, others = highest, inf
            for stall in own:
                value = others
                for rest in stalls.without(stall):
                    if value > best:
                        value = min(value, self._without(stalls, rest, best, most, only, depth))
                if value <= best:
                    continue
                taken.append(stall)
                others = value
                longer = self._raised(partial(stalls.longer, base, taken))[0]
                best = max(best, min(others, longer))
            highest = max(highest, best)
        return highest

    def _without(
        self,
        stalls: Stalls,
        rest: Callable[[Sums], Sums],
        low: float,
        high: float,
        only: Callable[[Sums], Sums],
        depth: int,
    ) -> float:
        """The same of choices without a stall; what is over ``high`` or under ``low`` is enough."""

        def left(sums: Sums) -> Sums:
            return rest(only(sums))

        value, _, seen = self._raised(lambda share: left(self.sums(share, floor=True)))
        if depth and low < high and value < high and seen:
            value = self._above(stalls, seen[-1], value, left, depth - 1)
        return value

    def _solve(self) -> Found:
        best = self._within(0.0)
        bound, exposed, seen = self._highest()
        self._exposed = exposed
        if self.has_late and best.fits:
            found = [self._within(e) for e in {1.0, exposed} - {0.0}]
            found += [Found(tied, self._step(tied), 0.0) for tied in seen]
            best = min((best, *found), key=_rank)
        return Found(best.tied, best.step, bound)

    def _highest(self) -> tuple[float, float, list[Tied]]:
        """(the highest bound, at what share of late gradients, the choices on the way)."""
        return self._raised(partial(self.sums, floor=True), HALVINGS if self.has_late else 1)

    def _raised(
        self, sums: Callable[[float], Sums], rounds: int = HALVINGS
    ) -> tuple[float, float, list[Tied]]:
        """(the highest bound, at what share of what backward cannot hide, the choices on the way).

        At the price of memory that :meth:`_within` found. The bound is concave in the share; its
        slope at a choice is how much more its late gradients take than what hides them.
        """
        best, at, seen = -inf, 0.0, []
        low, high = 0.0, 1.0
        room = self._price * (self._room(0.0) + NEAR * (self.limit or 0))
        share = 0.0
        for _ in range(rounds):
            value, tied = self.folded.minimum(sums(share), self._price)
            if value - room > best:
                best, at = value - room, share
            seen.append(tied)
            none, all_ = (
                self.folded.measure(sums(e), tied.choice, tied.again).seconds for e in (0.0, 1.0)
            )
            if all_ > none:
                low = share
            else:
                high = share
            if low == high:
                break
            share = 1.0 if low == share == 0.0 else (low + high) / 2
        return best, at, seen

    def _room(self, beyond: float) -> float:
        reserve = self.folded.model.cluster.reserve_bytes
        return 0.0 if self.limit is None else self.limit - reserve - beyond

    def _within(self, exposed: float) -> Found:
        """The best at one share of late gradients."""
        self._seen = []
        _, fastest = self.folded.minimum(self.sums(exposed))
        step = self._step(fastest)
        if exposed == 0.0:
            self._price = 0.0
        if self.limit is None or step.memory.fits:
            return Found(fastest, step, 0.0)
        self.memory_rank = self._fullest_rank(step)
        sums = self.sums(exposed)
        fastest = self.folded.measure(sums, fastest.choice, fastest.again)
        leanest = self.folded.minimum(sums, LEANEST)[1]
        if exposed == 0.0:
            _, self._price = self._chords(sums, fastest, leanest, self._room(0.0))
        best = Found(leanest, self._step(leanest), 0.0)
        beyond = 0.0
        for _ in range(ROUNDS):
            if leanest.num_bytes > self._room(beyond):
                break
            tied = self._packed(sums, fastest, leanest, self._room(beyond))
            step = self._step(tied)
            one = Found(tied, step, 0.0)
            best = min((best, one), key=_rank)
            if step.memory.fits:
                break
            over = step.memory.total_bytes - self.limit
            beyond += max(over, 0.0005 * self.limit)
        return self._refined(best, sums, fastest, leanest) if best.fits else best

    def _refined(self, best: Found, sums: Sums, fastest: Tied, leanest: Tied) -> Found:
        """``best`` with the bytes used up that exact figures leave free."""
        assert self.limit is not None
        improved = True
        while improved:
            improved = False
            free = self.limit - best.step.memory.total_bytes
            for share in PARTS:
                # The fullest moment grows with what is taken, so all of it may be too much.
                room = best.tied.num_bytes + share * free
                other, _ = self._chords(sums, fastest, leanest, room)
                starts = {tied.key: tied for tied in (other, best.tied, leanest)}
                offers = [
                    self._filled(sums, start, fastest, leanest, room) for start in starts.values()
                ]
                found = [Found(tied, self._step(tied), 0.0) for tied in offers]
                better = min(found, key=_rank)
                if _rank(better) < _rank(best):
                    best, improved = better, True
                    break
        return best

    def within(self, room: float, exposed: float = 0.0) -> Tied | None:
        """The least sum of the tables that is found within ``room`` bytes of a stage.

        None where nothing is. The stage is the one that the last limit was about.
        """
        sums = self.sums(exposed)
        fastest = self.folded.minimum(sums)[1]
        leanest = self.folded.minimum(sums, LEANEST)[1]
        if leanest.num_bytes > room:
            return None
        return self._packed(sums, fastest, leanest, room)

    def _packed(self, sums: Sums, fastest: Tied, leanest: Tied, room: float) -> Tied:
        start, _ = self._chords(sums, fastest, leanest, room)
        return self._filled(sums, start, fastest, leanest, room)

    def _filled(self, sums: Sums, start: Tied, fastest: Tied, leanest: Tied, room: float) -> Tied:
        """``start`` with what is left of ``room`` used up; the best of two ways to do so."""
        full = filled(sums, start, fastest, room)
        other = combined(sums, [full, start, leanest, fastest, *self._seen], room)
        return full if other is None or other.seconds >= full.seconds else other

    def _chords(self, sums: Sums, large: Tied, small: Tied, room: float) -> tuple[Tied, float]:
        """(the best within ``room``, the price of memory that gives the highest bound)."""
        if large.num_bytes <= room:
            return large, 0.0

        def minimum(price: float) -> tuple[float, Tied]:
            value, found = self.folded.minimum(sums, price)
            if not any(np.array_equal(found.choice, t.choice) for t in self._seen):
                self._seen.append(found)
            return value, found

        best, _, _, price = between(
            minimum,
            large,
            small,
            room,
            bound=0.0,
            rounds=CHORDS,
        )
        return best, price

    def _step(self, tied: Tied) -> Step:
        if tied.key not in self._steps:
            self._tried.append(tied)
            self._steps[tied.key] = self.folded.step(tied, self.schedule, self.limit)
        return self._steps[tied.key]

    def _longest_way(self, tied: Tied) -> Way:
        """Of the ways that are known beforehand the one that takes longest with a choice."""
        seconds = np.hstack([self.folded.passes_at(s, tied.choice) for s in self._kinds])
        rows = rows_of(self.is_block, self.stands_for, self.ways, self.schedule.stage_blocks)
        lengths = (rows * seconds[:, None, :]).sum(axis=(0, 2))
        return self.ways[int(lengths.argmax())]

    def _fullest_rank(self, step: Step) -> int:
        """The stage whose memory is the fullest, with these strategies."""
        stages = step.memory.stages
        return max(range(len(stages)), key=lambda rank: stages[rank].allocated_bytes, default=0)


def _rank(found: Found) -> tuple[bool, float]:
    return preference(found.step.step_time, found.step.memory)
