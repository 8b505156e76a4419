"""Bounds from work and bytes alone, before any table is built.

Every operator's work, and every byte, is divided by the devices of a stage, and no message counted;
then come the messages of parameters that do not fit whole. Both depend on a step's schedule and on
few other numbers, which thousands of arrangements share: a :class:`Pace` has what those of one
schedule share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import mul

import numpy as np
from numpy.typing import NDArray

from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph, Node
from autoshard.kernels import Products, Style
from autoshard.plan import Schedule
from autoshard.search.apart import halves, of_weights
from autoshard.search.bounds import Way, rows_of, runs_of, ways
from autoshard.search.cost import VIEWS, repeated, weight_values
from autoshard.search.fewer_bits import in_fewer_bits, kept_shares
from autoshard.search.folded import listed_twice, standing
from autoshard.search.kept import PARTLY, base, in_kernels, listed, read_again
from autoshard.search.later import gradients_apart, keeps_apart
from autoshard.search.memory import Optimizer
from autoshard.search.roofline import PRODUCT_DTYPES, attention_seconds, cast_bytes
from autoshard.search.space import Arrangement
from autoshard.search.stages import bounding_microbatches
from autoshard.search.step import crossing_nodes, recomputed, segments
from autoshard.search.storing import Storing
from autoshard.search.work import Pass, passes

Numbers = NDArray[np.float64]

LISTED = ((1, 1, 0), (1, 0, 1), (0, 0, 0))
"""Of a microbatch all, forward and backward without W, and forward alone: how often that has
forward a second time where backward computes it again, backward, and backward without its W."""


@dataclass(frozen=True, slots=True)
class End:
    """The first stage of a schedule, or the last one.

    Attributes:
        passes: the least that each way passes a chunk of it.
        inside: how often each segment is in it.
        stored: bytes that it stores, over all of its devices.
        held: microbatches that it keeps something for, until backward and until W.
        kept: bytes that it keeps for the backward of one, over all of its devices.
        waiting: the same for W, where that is a task of its own.
    """

    passes: Numbers
    inside: tuple[int, ...]
    stored: float
    held: tuple[float, float]
    kept: float
    waiting: float

    @property
    def num_bytes(self) -> float:
        """All that it stores and keeps, over all of its devices."""
        return self.stored + self.held[0] * self.kept + self.held[1] * self.waiting


@dataclass(frozen=True, slots=True)
class Pace:
    """What all arrangements of one schedule share.

    Attributes:
        schedules: of a step, one for each kind of recomputation that blocks have; the optimizer's
            shards are left out. What is said of each segment is said for one after the other.
        rows: how often each way (rows) passes each segment of the short graph, there and back;
            where gradients of weights are tasks of their own, then how often it passes it there and
            back beside that without them, then how often there alone.
        parts: seconds of one microbatch in each segment, for the work alone, as ``rows`` list them.
        seconds: of the step, for the work alone.
        num_bytes: of the fuller end, over all of its devices.
        ends: the first stage, which keeps the most microbatches, and the last one, which keeps
            what the loss needs.
    """

    schedules: tuple[Schedule, ...]
    rows: Numbers
    parts: Numbers
    seconds: float
    num_bytes: float
    ends: tuple[End, ...]

    def step(self, parts: Numbers, more_s: Sequence[float]) -> float:
        """Seconds of the longest way where segments take at least ``parts`` seconds.

        ``more_s`` is what one microbatch takes beside that in all segments of each end.
        """
        total = self.rows @ parts
        if any(more_s):
            more = [e.passes * s for e, s in zip(self.ends, more_s, strict=True)]
            total = total + (more[0] if len(more) == 1 else np.maximum(*more))
        return float(total.max())


class Floors:
    """The first bounds of a space.

    Args:
        graph: of few blocks, at the largest batch that is asked for: what does not grow with the
            batch then counts least.
        blocks: how many the whole model has.
        cluster: all of its devices are used.
        optimizer: what keeps state for each parameter.
        limit: bytes of a device that may be used.
        style: how operators between products are run.
        overlapped: axes whose messages run beside computing.
        products: what products of weights of blocks run in.
    """

    def __init__(
        self,
        graph: ModelGraph,
        blocks: int,
        cluster: Cluster,
        optimizer: Optimizer,
        limit: float,
        style: Style = "eager",
        overlapped: tuple[str, ...] = (),
        products: Products = "native",
    ) -> None:
        self.cluster, self.optimizer = cluster, optimizer
        self.style, self.products = style, products
        # Those of parameters are among them.
        self._beside = bool({"data", "context"} & {*overlapped})
        self.limit = limit - cluster.reserve_bytes
        self._work = Work(graph, cluster, style, products)
        self._storing = Storing(graph, cluster)
        self._stands_for = standing(self._work.is_block, blocks)
        self._paces: dict[tuple[object, ...], Pace] = {}
        self._lists: dict[
            tuple[object, ...], tuple[tuple[bool, ...], tuple[int, ...], dict[int, Numbers]]
        ] = {}

    def pace(self, a: Arrangement) -> Pace:
        """What an arrangement shares with those of its schedule."""
        chunks = a.pipeline, a.virtual_stages, a.order, a.stage_blocks
        key = *chunks, a.microbatches, a.batch, a.recompute, a.recomputed_blocks
        if key not in self._paces:
            self._paces[key] = self._pace(a)
        return self._paces[key]

    def _pace(self, a: Arrangement) -> Pace:
        schedule = a.schedule(self.style, self.products).model_copy(update={"optimizer_shards": 1})
        is_block, stands_for, inside = self._listed(schedule)
        schedules = tuple(
            schedule.model_copy(update={"recompute": kind, "recomputed_blocks": None})
            for kind in a.kinds
        )
        chains = ways(schedule)
        rows = rows_of(is_block, stands_for, chains, a.stage_blocks)
        whole = rows.min(axis=0)
        if schedule.splits_backward:
            both = rows[:2].min(axis=0)
            rows = np.hstack([whole, both - whole, rows[0] - both])
        else:
            rows = whole
        share = a.batch / self._work.graph.batch
        work = [self._work.seconds(s, share / a.devices) for s in schedules]
        parts = np.hstack([found.reshape(-1, len(self._work.parts)) for found in work]).ravel()
        sizes = [self._work.bytes(s, self.optimizer) for s in schedules]
        stored, kept, waiting = (np.concatenate(column) for column in zip(*sizes, strict=True))
        ends = []
        for rank, times in inside.items():
            ends.append(
                End(
                    passes=np.array([_least(way, rank, schedule.stages) for way in chains]),
                    inside=tuple(times.astype(int).tolist()),
                    stored=float(times @ stored),
                    held=bounding_microbatches(schedule, rank),
                    kept=float(times @ kept) * share,
                    waiting=float(times @ waiting) * share,
                )
            )
        return Pace(
            schedules=schedules,
            rows=rows,
            parts=parts,
            seconds=float((rows @ parts).max()),
            num_bytes=max(end.num_bytes for end in ends),
            ends=tuple(ends),
        )

    def _listed(
        self, schedule: Schedule
    ) -> tuple[tuple[bool, ...], tuple[int, ...], dict[int, Numbers]]:
        """Segments as rows list them, and how often each is in the first and the last stage.

        However many microbatches there are: deep models have many segments.
        """
        chunks = schedule.stages, schedule.virtual_stages, schedule.stage_blocks
        key = *chunks, schedule.recompute, schedule.recomputed_blocks
        if key not in self._lists:
            is_block, stands_for = listed_twice(self._work.is_block, self._stands_for, schedule)
            runs = runs_of([is_block[i] for i in stands_for], schedule)
            ends = {}
            for rank in sorted({0, schedule.stages - 1}):
                there = [stands_for[i] for run in runs[rank :: schedule.stages] for i in run]
                ends[rank] = np.bincount(there, minlength=len(is_block)).astype(np.float64)
            self._lists[key] = is_block, stands_for, ends
        return self._lists[key]

    def seconds(self, a: Arrangement) -> float:
        """Of the work alone; infinite where not even the bytes fit."""
        pace = self.pace(a)
        return inf if self.limit < pace.num_bytes / a.devices else pace.seconds

    def with_storing(self, a: Arrangement, parts: Numbers, rooms: Sequence[float]) -> float:
        """Of segments that take ``parts`` seconds each, and of the parameters beside that.

        ``parts``: as the rows of a :class:`Pace` list them.
        ``rooms``: bytes left on each end, see :meth:`rooms`.
        """
        pace = self.pace(a)
        more_s = [
            self._storing.stage(pace.schedules, end.inside, a.sizes, room)
            for end, room in zip(pace.ends, rooms, strict=True)
        ]
        if max(more_s) == inf:
            return inf
        # It may be all in forward, or all for gradients of weights: so of whole passes.
        each = self._storing.each(pace.schedules, a.sizes)
        if self._beside:
            # A segment takes as long as the longer of the two; of the first stage, all messages.
            both = pace.step(np.maximum(parts, each), [0.0] * len(more_s))
            return max(both, pace.step(each, more_s))
        if len(each) < len(parts):
            each = np.pad(each, (0, len(parts) - len(each)))
        return pace.step(parts + each, more_s)

    def room(self, a: Arrangement) -> float:
        """The least of :meth:`rooms`."""
        return self.limit - self.pace(a).num_bytes / a.devices

    def rooms(
        self,
        a: Arrangement,
        kept: Sequence[float] | None = None,
        waiting: Sequence[float] = (),
        passing: float = 0.0,
    ) -> list[float]:
        """Bytes left on each end where everything is cut over all devices of a stage.

        ``kept``, ``waiting``: what a device keeps of each segment at least, until backward and
        until W, if that is known better; listed as those of :meth:`with_storing`.
        ``passing``: what any device has for a while beside that, at least.
        """
        ends = self.pace(a).ends
        if kept is None:
            return [self.limit - end.num_bytes / a.devices for end in ends]
        out = []
        for end in ends:
            held = sum(map(mul, end.inside, kept))
            later = sum(map(mul, end.inside, waiting)) if waiting else end.waiting / a.devices
            both = end.held[0] * held + end.held[1] * later
            out.append(self.limit - end.stored / a.devices - both - passing)
        return out


def _least(way: Way, rank: int, stages: int) -> float:
    """The least that a way passes a chunk of a stage, all of a microbatch's work."""
    return float(min(min(row[rank::stages]) for row in way.passes))


class Work:
    """Seconds and bytes that each segment takes at least.

    Args:
        graph: see :class:`Floors`.
        cluster: what it runs on.
        style: how operators between products are run.
        products: what products of weights of blocks run in.
    """

    def __init__(
        self,
        graph: ModelGraph,
        cluster: Cluster,
        style: Style = "eager",
        products: Products = "native",
    ) -> None:
        self.graph, self.cluster = graph, cluster
        kernels = cluster.device.kernels
        self.traffic, self.attention_gain = kernels.traffic(style), kernels.attention_gain(style)
        self.parts = segments(graph)
        self.is_block = tuple(part.is_block for part in self.parts)
        self.style, self._weights = style, weight_values(graph)
        self._low, shares = in_fewer_bits(graph, products), kept_shares(graph, products)
        self._products, self._shares = products, shares
        by_name, weights = graph.by_name, of_weights(graph)
        self._given = gradients_apart(graph, weights)
        self._apart = frozenset(
            node.name
            for node in graph.nodes
            if node.name not in weights and any(halves(graph, node, weights)[1])
        )
        self._rows: dict[str, tuple[tuple[float, int], ...]] = {}
        for node in graph.nodes:
            if node.is_leaf or node.family in VIEWS:
                continue
            operands = [by_name[o] for o in node.operands]
            everything = tuple(node.differentiable and o.differentiable for o in operands)
            (forward, backward), (_, now) = (
                passes(
                    node,
                    tuple(o.shape for o in operands),
                    tuple(o.itemsize for o in operands),
                    node.shape,
                    wants,
                    1.0,
                    bias=any(o.op == "parameter" for o in operands),
                )
                for wants in (everything, halves(graph, node, weights)[0])
            )
            self._rows[node.name] = tuple(
                (self._seconds(work, node), work.launches) for work in (forward, backward, now)
            )
        self._known: dict[tuple[str, bool], tuple[Numbers, Numbers]] = {}
        self._sizes: dict[str, tuple[Numbers, Numbers, Numbers]] = {}

    def _seconds(self, work: Pass, node: Node) -> float:
        cluster, bandwidth = self.cluster, self.cluster.copy_bytes_per_second
        rate, products = cluster.flops_per_second(node.dtype), self._products
        low = products if node.name in self._low else "native"
        faster = rate if low == "native" else cluster.flops_per_second(PRODUCT_DTYPES[low])
        total = sum(
            max(2.0 * p.batch * p.m * p.n * p.k / faster, p.elements * node.itemsize / bandwidth)
            for p in work.products
        )
        attended = attention_seconds(cluster, work, node.dtype, self.attention_gain)
        moved = min(1.0, self.traffic) * (work.num_bytes + cast_bytes(work, low)) / bandwidth
        return total + max(work.flops / rate + attended, moved)

    def seconds(self, schedule: Schedule, share: float) -> Numbers:
        """The least of one microbatch in each segment, forward and backward.

        Where gradients of weights are tasks of their own, then without them, then of forward alone.

        ``share``: of the graph's work that one device does.
        """
        if self.cluster.device.measured is not None:
            count = 3 if schedule.splits_backward else 1
            return np.zeros(count * len(self.parts))  # factors of its own for every family
        work, launches = self._whole(schedule)
        return work * share + launches

    def _whole(self, schedule: Schedule) -> tuple[Numbers, Numbers]:
        """(seconds on one device, seconds of launches), listed as :meth:`seconds`."""
        kind = schedule.recompute, schedule.splits_backward
        if kind not in self._known:
            launch, none = self.cluster.device.launch_s, ((0.0, 0),) * 3
            out = []
            for twice, back, now in LISTED[: 3 if schedule.splits_backward else 1]:
                for s in self.parts:
                    nodes = self.graph.nodes[s.start : s.end]
                    again = recomputed(nodes, schedule) if s.is_block else frozenset()
                    work = fixed = 0.0
                    for node in nodes:
                        times = 1 + twice * (node.name in again), back, now
                        for n, (seconds, launches) in zip(
                            times, self._rows.get(node.name, none), strict=True
                        ):
                            work += n * seconds
                            fixed += n * launches * launch
                    out.append((work, fixed))
            columns = np.array(out, dtype=np.float64)
            self._known[kind] = columns[:, 0], columns[:, 1]
        return self._known[kind]

    def bytes(self, schedule: Schedule, optimizer: Optimizer) -> tuple[Numbers, Numbers, Numbers]:
        """(stored, kept for one microbatch, the same for W) of each segment, over all devices."""
        key = f"{schedule.recompute} {optimizer.name}"
        if key not in self._sizes:
            by_name = self.graph.by_name
            crossing = sum(by_name[o].num_bytes for o in crossing_nodes(self.graph, self.parts))
            stored, kept, waiting = [], [], []
            for s in self.parts:
                own = later = 0.0
                nodes = self.graph.nodes[s.start : s.end]
                again = recomputed(nodes, schedule) if s.is_block else frozenset()
                for node in nodes:
                    if node.op == "parameter":
                        elements = node.num_bytes // node.itemsize
                        state = optimizer.state_bytes(elements, node.dtype, node.itemsize)
                        own += node.num_bytes + (node.num_bytes + state) * node.differentiable
                    if node.name in self._apart:
                        later += self._later_bytes(node)
                stored.append(own)
                partly = not again or schedule.recompute in PARTLY
                kept.append(self._held(nodes, again, s.is_block) if partly else float(crossing))
                waiting.append(later)
            self._sizes[key] = np.array(stored), np.array(kept), np.array(waiting)
        return self._sizes[key]

    def _held(self, nodes: Sequence[Node], again: frozenset[str], is_block: bool) -> float:
        """Bytes of a segment's values that are kept for backward."""
        graph = self.graph
        gone = again | in_kernels(graph, nodes, self.style) if is_block else again
        names = list(read_again(graph, nodes, again))
        for node in nodes:
            if node.differentiable and not node.is_leaf and node.name not in again:
                names += [name for name in self._listed(node) if base(graph, name) not in gone]
        return sum(map(self._least_bytes, names), 0.0)

    def _listed(self, node: Node) -> list[str]:
        """Values of others that an operator keeps, and its own."""
        by_name, weights = self.graph.by_name, self._weights
        return [
            name
            for name in listed(node)
            if name not in weights and (name == node.name or not by_name[name].is_leaf)
        ]

    def _later_bytes(self, node: Node) -> float:
        """Of what an operator keeps until its W, as :mod:`autoshard.search.later` counts it."""
        names = self._listed(node) if keeps_apart(node, self.style) else []
        given = node.num_bytes if node.name in self._given else 0.0
        return sum(map(self._least_bytes, names), given)

    def _least_bytes(self, name: str) -> float:
        """Of one head for many queries there may be one in memory."""
        start = repeated(self.graph, self.graph.by_name[name])
        times = int(str(start.attrs["n"])) if start else 1
        share = self._shares.get(base(self.graph, name), 1.0)
        return share * self.graph.by_name[name].num_bytes / times
