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

import numpy as np
from numpy.typing import NDArray

from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph, Node
from autoshard.kernels import Style
from autoshard.plan import Schedule
from autoshard.search.bounds import rows_of, runs_of, ways
from autoshard.search.cost import VIEWS, repeated, weight_values
from autoshard.search.folded import listed_twice, standing
from autoshard.search.kept import PARTLY, base, in_kernels, listed, read_again
from autoshard.search.memory import Optimizer
from autoshard.search.roofline import attention_seconds
from autoshard.search.space import Arrangement
from autoshard.search.stages import alive_microbatches
from autoshard.search.step import crossing_nodes, recomputed, segments
from autoshard.search.storing import Storing
from autoshard.search.work import Pass, passes

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pace:
    """What all arrangements of one schedule share.

    Attributes:
        schedules: of a step, one for each kind of recomputation that blocks have; the optimizer's
            shards are left out. What is said of each segment is said for one after the other.
        rows: how often each way (rows) passes each segment of the short graph, there and back.
        first: the least that each way passes a chunk of the first stage.
        inside: how often each segment is in the first stage.
        parts: seconds of one microbatch in each segment, for the work alone.
        seconds: of the step, for the work alone.
        stored: bytes that the first stage stores, over all of its devices.
        alive: microbatches that the first stage keeps something for.
        kept: bytes that it keeps for backward, over all of its devices.
    """

    schedules: tuple[Schedule, ...]
    rows: Numbers
    first: Numbers
    inside: tuple[int, ...]
    parts: Numbers
    seconds: float
    stored: float
    alive: float
    kept: float

    def step(self, parts: Numbers, first_s: float) -> float:
        """Seconds of the longest way where segments take at least ``parts`` seconds.

        ``first_s`` is what one microbatch takes beside that in all segments of the first stage.
        """
        return float((self.rows @ parts + self.first * first_s).max())


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
    ) -> None:
        self.cluster, self.optimizer, self.style = cluster, optimizer, style
        # Those of parameters are among them.
        self._beside = bool({"data", "context"} & {*overlapped})
        self.limit = limit - cluster.reserve_bytes
        self._work = Work(graph, cluster, style)
        self._storing = Storing(graph, cluster)
        self._stands_for = standing(self._work.is_block, blocks)
        self._paces: dict[tuple[object, ...], Pace] = {}

    def pace(self, a: Arrangement) -> Pace:
        """What an arrangement shares with those of its schedule."""
        chunks = a.pipeline, a.virtual_stages, a.stage_blocks
        key = *chunks, a.microbatches, a.batch, a.recompute, a.recomputed_blocks
        if key not in self._paces:
            self._paces[key] = self._pace(a)
        return self._paces[key]

    def _pace(self, a: Arrangement) -> Pace:
        schedule = a.schedule(self.style).model_copy(update={"optimizer_shards": 1})
        is_block, stands_for = listed_twice(self._work.is_block, self._stands_for, schedule)
        schedules = tuple(
            schedule.model_copy(update={"recompute": kind, "recomputed_blocks": None})
            for kind in a.kinds
        )
        chains = ways(schedule)
        listed = rows_of(is_block, stands_for, chains, a.stage_blocks)
        rows = np.array(listed, dtype=np.float64)
        share = a.batch / self._work.graph.batch
        parts = np.concatenate([self._work.seconds(s, share / a.devices) for s in schedules])
        inside = np.zeros(len(is_block))
        whole = [is_block[i] for i in stands_for]
        for run in runs_of(whole, schedule)[:: schedule.stages]:
            for i in run:
                inside[stands_for[i]] += 1
        sizes = [self._work.bytes(s, self.optimizer) for s in schedules]
        stored, kept = (np.concatenate(column) for column in zip(*sizes, strict=True))
        return Pace(
            schedules=schedules,
            rows=rows,
            first=np.array([float(min(w.forward[:: schedule.stages])) for w in chains]),
            inside=tuple(int(n) for n in inside),
            parts=parts,
            seconds=float((rows @ parts).max()),
            stored=float(inside @ stored),
            alive=alive_microbatches(schedule, 0),
            kept=float(inside @ kept) * share,
        )

    def seconds(self, a: Arrangement) -> float:
        """Of the work alone; infinite where not even the bytes fit."""
        return inf if self.room(a) < 0 else self.pace(a).seconds

    def with_storing(self, a: Arrangement, parts: Numbers, room: float) -> float:
        """Of segments that take ``parts`` seconds each, and of the parameters beside that.

        ``parts``: of the segments with each of the arrangement's ``kinds``, one after the other.
        ``room``: bytes left on the first stage, see :meth:`room`.
        """
        pace = self.pace(a)
        first_s = self._storing.first_stage(pace.schedules, pace.inside, a.sizes, room)
        if first_s == inf:
            return inf
        each = np.concatenate([self._storing.each(s, a.sizes) for s in pace.schedules])
        if self._beside:
            # A segment takes as long as the longer of the two; of the first stage, all messages.
            return max(pace.step(np.maximum(parts, each), 0.0), pace.step(each, first_s))
        return pace.step(parts + each, first_s)

    def room(self, a: Arrangement, kept: Sequence[float] | None = None) -> float:
        """Bytes left on the first stage where everything is cut over all of its devices.

        ``kept``: what a device keeps of each segment at least, if that is known better; listed as
        those of :meth:`with_storing`.
        """
        pace = self.pace(a)
        held = pace.kept / a.devices if kept is None else float(np.dot(pace.inside, kept))
        return self.limit - pace.stored / a.devices - pace.alive * held


class Work:
    """Seconds and bytes that each segment takes at least.

    Args:
        graph: see :class:`Floors`.
        cluster: what it runs on.
        style: how operators between products are run.
    """

    def __init__(self, graph: ModelGraph, cluster: Cluster, style: Style = "eager") -> None:
        self.graph, self.cluster = graph, cluster
        kernels = cluster.device.kernels
        self.traffic, self.attention_gain = kernels.traffic(style), kernels.attention_gain(style)
        self.style, self._weights = style, weight_values(graph)
        self.parts = segments(graph)
        self.is_block = tuple(part.is_block for part in self.parts)
        by_name = graph.by_name
        self._rows: dict[str, tuple[float, float, int, int]] = {}
        for node in graph.nodes:
            if node.is_leaf or node.family in VIEWS:
                continue
            operands = [by_name[o] for o in node.operands]
            forward, backward = passes(
                node,
                tuple(o.shape for o in operands),
                tuple(o.itemsize for o in operands),
                node.shape,
                tuple(node.differentiable and o.differentiable for o in operands),
                1.0,
                bias=any(o.op == "parameter" for o in operands),
            )
            self._rows[node.name] = (
                self._seconds(forward, node.dtype, node.itemsize),
                self._seconds(backward, node.dtype, node.itemsize),
                forward.launches,
                backward.launches,
            )
        self._known: dict[str, tuple[Numbers, Numbers]] = {}
        self._sizes: dict[str, tuple[Numbers, Numbers]] = {}

    def _seconds(self, work: Pass, dtype: str, itemsize: int) -> float:
        rate, bandwidth = self.cluster.flops_per_second(dtype), self.cluster.copy_bytes_per_second
        total = sum(
            max(2.0 * p.batch * p.m * p.n * p.k / rate, p.elements * itemsize / bandwidth)
            for p in work.products
        )
        attended = attention_seconds(self.cluster, work, dtype, self.attention_gain)
        traffic = min(1.0, self.traffic)
        return total + max(work.flops / rate + attended, traffic * work.num_bytes / bandwidth)

    def seconds(self, schedule: Schedule, share: float) -> Numbers:
        """The least of one microbatch in each segment, forward and backward.

        ``share``: of the graph's work that one device does.
        """
        if self.cluster.device.measured is not None:
            return np.zeros(len(self.parts))  # factors of its own for every family
        work, launches = self._whole(schedule)
        return work * share + launches

    def _whole(self, schedule: Schedule) -> tuple[Numbers, Numbers]:
        """(seconds on one device, seconds of launches) of each segment."""
        kind = schedule.recompute
        if kind not in self._known:
            out = []
            launch = self.cluster.device.launch_s
            for s in self.parts:
                nodes = self.graph.nodes[s.start : s.end]
                again = recomputed(nodes, schedule) if s.is_block else frozenset()
                work = fixed = 0.0
                for node in nodes:
                    forward, backward, there, back = self._rows.get(node.name, (0.0, 0.0, 0, 0))
                    times = 1 + (node.name in again)
                    work += times * forward + backward
                    fixed += (times * there + back) * launch
                out.append((work, fixed))
            columns = np.array(out, dtype=np.float64)
            self._known[kind] = columns[:, 0], columns[:, 1]
        return self._known[kind]

    def bytes(self, schedule: Schedule, optimizer: Optimizer) -> tuple[Numbers, Numbers]:
        """(stored, kept for one microbatch) of each segment, over all devices."""
        key = f"{schedule.recompute} {optimizer.name}"
        if key not in self._sizes:
            by_name = self.graph.by_name
            crossing = sum(by_name[o].num_bytes for o in crossing_nodes(self.graph, self.parts))
            stored, kept = [], []
            for s in self.parts:
                own = 0.0
                nodes = self.graph.nodes[s.start : s.end]
                again = recomputed(nodes, schedule) if s.is_block else frozenset()
                for node in nodes:
                    if node.op == "parameter":
                        elements = node.num_bytes // node.itemsize
                        state = optimizer.state_bytes(elements, node.dtype, node.itemsize)
                        own += node.num_bytes + (node.num_bytes + state) * node.differentiable
                stored.append(own)
                partly = not again or schedule.recompute in PARTLY
                kept.append(self._held(nodes, again, s.is_block) if partly else float(crossing))
            self._sizes[key] = np.array(stored), np.array(kept)
        return self._sizes[key]

    def _held(self, nodes: Sequence[Node], again: frozenset[str], is_block: bool) -> float:
        """Bytes of a segment's values that are kept for backward."""
        graph, weights = self.graph, self._weights
        gone = again | in_kernels(graph, nodes, self.style) if is_block else again
        names = list(read_again(graph, nodes, again))
        for node in nodes:
            if not node.differentiable or node.is_leaf or node.name in again:
                continue
            names += [
                name
                for name in listed(node)
                if name not in weights
                and (name == node.name or not graph.by_name[name].is_leaf)
                and base(graph, name) not in gone
            ]
        return sum(map(self._least_bytes, names), 0.0)

    def _least_bytes(self, name: str) -> float:
        """Of one head for many queries there may be one in memory."""
        start = repeated(self.graph, self.graph.by_name[name])
        return self.graph.by_name[name].num_bytes / (int(str(start.attrs["n"])) if start else 1)
