"""A step of many microbatches: recomputation, prefetched gathers, accumulation, pipeline stages.

One microbatch of a program is walked segment by segment (what stands before the repeated blocks,
each block, what stands after them), which gives forward and backward seconds of each. With one
stage the microbatches follow one another; with more the segments are laid out over the stages and
the schedule is simulated. Gradients of replicated weights travel once a step, during the last
microbatch's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, prod
from typing import Literal

from autoshard.errors import RequestError
from autoshard.graph import ModelGraph, Node
from autoshard.plan import CollectiveGroup, Memory, Schedule, StepTime
from autoshard.program import Program
from autoshard.search.cost import CostModel
from autoshard.search.pipeline import Action, Chunk, Placed, simulate
from autoshard.search.price import _MemoryWalk, _Pricer
from autoshard.sharding.collective import Phase
from autoshard.sharding.layout import local_shape

MASTER_BYTES = 4
"""Gradients of several microbatches are summed in float32."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of nodes; blocks may be recomputed and begin a stage."""

    start: int
    end: int
    is_block: bool


def segments(graph: ModelGraph) -> list[Segment]:
    """The whole graph as blocks and what stands between them."""
    runs = sorted(
        (start, start + repeat.length) for repeat in graph.repeats for start in repeat.starts
    )
    out: list[Segment] = []
    at = 0
    for start, end in runs:
        if start > at:
            out.append(Segment(at, start, False))
        out.append(Segment(start, end, True))
        at = end
    if at < len(graph.nodes):
        out.append(Segment(at, len(graph.nodes), False))
    return out


def recomputed(nodes: tuple[Node, ...], schedule: Schedule) -> frozenset[str]:
    """Operators of a block that backward computes again.

    ``full``: those that lead to what backward reads, as torch's checkpoint stops there;
    ``reentrant``: all; ``selective``: those that make or read attention scores.
    """
    kind = schedule.recompute
    if kind == "none":
        return frozenset()
    operators = [n for n in nodes if not n.is_leaf]
    if kind == "reentrant":
        return frozenset(n.name for n in operators)
    if kind == "selective":
        scores = {n.name for n in operators if _is_scores(n)}
        return frozenset(scores)
    by_name = {n.name: n for n in nodes}
    wanted = set()
    for node in operators:
        if not node.differentiable:
            continue
        for role in node.saved:
            wanted.add(node.name if role == "result" else node.operands[node.roles.index(role)])
        if node.saved_extra_bytes:
            wanted.add(node.name)
    again: set[str] = set()
    for node in reversed(operators):
        if node.name in wanted:
            again.add(node.name)
            wanted.update(o for o in node.operands if o in by_name)
    return frozenset(again)


def _is_scores(node: Node) -> bool:
    return len(node.shape) == 4 and node.shape[-1] == node.shape[-2]


Key = tuple[tuple[int, ...], str]
"""Mesh axes and dtype: gradients that may share a bucket."""

Happening = tuple[Literal["work", "message"], float] | tuple[Literal["ready"], tuple[Key, int]]
"""Of one backward: seconds of computing, of a blocking message, or bytes of a gradient that waits
for a bucket and is complete."""


@dataclass(slots=True)
class Part:
    """One segment of one microbatch.

    Attributes:
        is_block: whether it is a repeated block.
        forward_s: forward.
        backward_s: backward, recomputation included, buckets left out.
        compute_s: the part of both that is computing.
        update_s: of the optimizer, once a step.
        adding_s: of adding one microbatch's gradients to the sum.
        happenings: its backward in order.
        groups: count, bytes and seconds of its messages, by operation, axes and phase.
        stored: bytes of parameters, gradients and optimizer state.
        kept: bytes kept for backward, for each microbatch.
        gathered: the same, of gathered weights.
        working: bytes that come back while it is recomputed.
    """

    is_block: bool
    forward_s: float = 0.0
    backward_s: float = 0.0
    compute_s: float = 0.0
    update_s: float = 0.0
    adding_s: float = 0.0
    happenings: list[Happening] = field(default_factory=list)
    groups: dict[tuple[str, tuple[str, ...], Phase], list[float]] = field(default_factory=dict)
    stored: tuple[int, int, int] = (0, 0, 0)
    kept: int = 0
    gathered: int = 0
    working: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """One microbatch, segment by segment.

    Attributes:
        parts: the segments in order.
        crossing_bytes: what one block hands to the next.
        temporary_bytes: what the fullest moment holds beyond what is kept.
    """

    parts: tuple[Part, ...]
    crossing_bytes: int
    temporary_bytes: int

    def with_blocks(self, count: int) -> Measured:
        """The same with ``count`` blocks in a row: the second one stands for those between.

        Raises:
            ValueError: fewer than three blocks here, not all in one row, or a smaller ``count``.
        """
        blocks = [i for i, part in enumerate(self.parts) if part.is_block]
        if len(blocks) == count:
            return self
        if len(blocks) < 3 or count < 3 or blocks != list(range(blocks[0], blocks[-1] + 1)):
            raise ValueError(f"{len(blocks)} blocks cannot stand for {count}")
        first, last = blocks[0], blocks[-1]
        middle = (self.parts[first + 1],) * (count - 2)
        parts = (*self.parts[: first + 1], *middle, *self.parts[last:])
        return Measured(parts, self.crossing_bytes, self.temporary_bytes)


class _Walk(_Pricer):
    """One microbatch, segment by segment; gradients in buckets are noted, not sent."""

    def __init__(self, model: CostModel, program: Program, schedule: Schedule) -> None:
        super().__init__(model, program, None, False)
        self.schedule = schedule
        self.segments = segments(self.graph)
        self.again = [
            recomputed(self.graph.nodes[s.start : s.end], schedule) if s.is_block else frozenset()
            for s in self.segments
        ]
        self.parts = [Part(s.is_block) for s in self.segments]
        self._happenings: list[Happening] = []

    def measure(self) -> Measured:
        """Walk forward and backward once, then the memory."""
        for s, part in zip(self.segments, self.parts, strict=True):
            began, computed = self._enter(part)
            for node in self.graph.nodes[s.start : s.end]:
                self._node_forward(node)
            if part is self.parts[-1]:
                self._edge(self.program.loss_edge, False, "forward")
            part.forward_s, part.compute_s = self.now - began, self.compute - computed
        waits = self._waiting()
        for s, again, part in zip(
            reversed(self.segments), reversed(self.again), reversed(self.parts), strict=True
        ):
            began, computed = self._enter(part)
            self._happenings = part.happenings
            if part is self.parts[-1]:
                self._edge(self.program.loss_edge, True, "backward")
            nodes = self.graph.nodes[s.start : s.end]
            for node in nodes:
                if node.name in again:
                    self._node_forward(node, "backward")
            for node in reversed(nodes):
                self._waits = waits.get(node.name, [])
                self._node_backward(node, {}, again=node.name in again)
            part.backward_s = self.now - began
            part.compute_s += self.compute - computed
        self._updates()
        crossing = _crossing_bytes(self.model, self.program, self.segments)
        return Measured(tuple(self.parts), crossing, self._memory(crossing))

    def _enter(self, part: Part) -> tuple[float, float]:
        self.groups = part.groups
        return self.now, self.compute

    def _waiting(self) -> dict[str, list[tuple[Key, int]]]:
        """Gradients that wait for a bucket, by the operator whose backward completes them."""
        out: dict[str, list[tuple[Key, int]]] = {}
        program = self.program
        for node in self.graph.nodes:
            for index in range(len(node.operands)):
                edge = program.edges[node.name, index]
                if edge.bucket is not None:
                    axes = program.buckets[edge.bucket].axes
                    parameter = self.graph.by_name[edge.producer]
                    shape = local_shape(
                        parameter.shape, edge.produced, program.sizes, self.origin
                    )
                    size = prod(shape) * parameter.itemsize
                    out.setdefault(node.name, []).append(((axes, parameter.dtype), size))
        return out

    def _work(self, name: str, phase: Phase, seconds: float) -> None:
        super()._work(name, phase, seconds)
        if phase == "backward":
            self._happenings.append(("work", seconds))

    def _sent(self, node: Node, sent_after: object) -> None:
        self._happenings += [("ready", wait) for wait in self._waits]

    def _message(
        self,
        op: str,
        axes: tuple[int, ...],
        num_bytes: int,
        phase: Phase,
        value: str,
        seconds: float,
    ) -> None:
        super()._message(op, axes, num_bytes, phase, value, seconds)
        if phase == "backward":
            self._happenings.append(("message", seconds))

    def chunk_bounds(is_block: Sequence[bool], seconds: Sequence[float], chunks: int) -> list[int]:
    """Number of the first segment of each chunk, and the number of segments at the end.

    Blocks that divide evenly do; where two more would, what stands before and after the blocks
    counts as a block each; else the slowest chunk is made as fast as can be.
    """
    blocks = [i for i, repeated in enumerate(is_block) if repeated]
    count = len(blocks)
    if chunks > max(1, count):
        raise RequestError(
            f"the model has {count} repeated blocks, which cannot fill {chunks} stages; use "
            f"pipeline and virtual stages whose product is at most {count}"
        )
    if chunks == 1:
        return [0, len(is_block)]
    if count % chunks == 0:
        each = count // chunks
        firsts = [blocks[i * each] for i in range(chunks)]
    elif count and (count + 2) % chunks == 0 and chunks > 1:
        each = (count + 2) // chunks
        firsts = [blocks[0]] + [blocks[i * each - 1] for i in range(1, chunks)]
    else:
        firsts = _balanced(seconds, chunks)
    return [0, *firsts[1:], len(is_block)]


def _balanced(seconds: Sequence[float], chunks: int) -> list[int]:
    """Least largest sum of consecutive runs: dynamic programming over cuts."""
    n = len(seconds)
    total = [0.0]
    for s in seconds:
        total.append(total[-1] + s)
    best = [total[i] for i in range(n + 1)]
    cuts: list[list[int]] = []
    for _ in range(1, chunks):
        new, cut = [float("inf")] * (n + 1), [0] * (n + 1)
        for end in range(1, n + 1):
            for at in range(end):
                value = max(best[at], total[end] - total[at])
                if value < new[end]:
                    new[end], cut[end] = value, at
        best = new
        cuts.append(cut)
    firsts, end = [], n
    for cut in reversed(cuts):
        end = cut[end]
        firsts.append(end)
    return [0, *reversed(firsts)]


def _crossing_bytes(model: CostModel, program: Program, parts: list[Segment]) -> int:
    """Bytes of what one block hands to the next, of one device."""
    graph = program.graph
    blocks = [s for s in parts if s.is_block]
    if len(blocks) < 2:
        return 0
    first, second = blocks[0], blocks[1]
    inside = {n.name for n in graph.nodes[first.start : first.end]}
    taken = {
        o
        for n in graph.nodes[second.start : second.end]
        for o in n.operands
        if o in inside and not graph.by_name[o].is_leaf
    }
    return sum(model.local_bytes(graph.by_name[o], program.strategies[o].result) for o in taken)
