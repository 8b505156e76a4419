"""A step of many microbatches: recomputation, prefetched gathers, accumulation, pipeline stages.

One microbatch of a program is walked segment by segment (what stands before the repeated blocks,
each block, what stands after them), which gives forward and backward seconds of each::

    blocking messages + longer + contention x shorter of (computing, messages that run beside it)

With one stage the microbatches follow one another; with more the segments are laid out over the
stages and the schedule is simulated. Gradients of replicated weights travel once a step, during the
last microbatch's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from math import ceil, prod

from autoshard.errors import RequestError
from autoshard.graph import ModelGraph, Node
from autoshard.plan import Categories, CollectiveGroup, Memory, Schedule, StepTime
from autoshard.program import Edge, Program, shared_by
from autoshard.search.apart import halves, of_weights
from autoshard.search.cost import CostModel, Work
from autoshard.search.kept import PARTLY, cheap, in_kernels
from autoshard.search.pipeline import Action, Chunk, Placed, duration, simulate
from autoshard.search.price import _Pricer
from autoshard.search.stages import chunk_bounds, divides, held_microbatches
from autoshard.search.walk import STORED, MemoryWalk, reserve_parts
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
    ``reentrant``: all; ``selective``: those that make or read attention scores; ``pointwise``:
    norms, activations and what else is cheap, see :func:`autoshard.search.kept.cheap`.
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
    if kind == "pointwise":
        return cheap(nodes)
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


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a segment: computing waits for it, or it runs beside the segment's computing.

    It waits for messages before it that use one of its ``tiers``.
    """

    seconds: float
    is_beside: bool
    tiers: tuple[int, ...]


Ready = tuple[Key, int]
"""Bytes of a gradient that waits for a bucket and is complete."""

Happening = Work | Message | Ready
"""Of one pass through a segment, in order."""


@dataclass(slots=True)
class Part:
    """One segment of one microbatch.

    Attributes:
        is_block: whether it is a repeated block.
        forward: what happens in forward.
        backward: what happens in backward, recomputation included.
        weights: the part of it that makes gradients of weights only, where that is a task of its
            own; it is not in ``backward`` then.
        forward_s: forward.
        backward_s: backward, recomputation and ``weights`` included, buckets left out.
        weight_s: of ``weights``.
        compute_s: the part of both that is computing.
        apart_s: what messages beside its last pass add to that.
        update_s: of the optimizer, once a step.
        adding_s: of adding one microbatch's gradients to the sum.
        groups: count, bytes and seconds of its messages, by operation, axes and phase.
        stored: bytes of parameters, gradients and optimizer state.
        kept: bytes kept for backward, for each microbatch.
        gathered: the same, of gathered weights.
        working: bytes that come back while it is recomputed.
        waiting: bytes that ``weights`` needs, for each microbatch between the two tasks.
    """

    is_block: bool
    forward: list[Happening] = field(default_factory=list)
    backward: list[Happening] = field(default_factory=list)
    weights: list[Happening] | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    compute_s: float = 0.0
    apart_s: float = 0.0
    update_s: float = 0.0
    adding_s: float = 0.0
    groups: dict[tuple[str, tuple[str, ...], Phase], list[float]] = field(default_factory=dict)
    stored: tuple[int, int, int] = (0, 0, 0)
    kept: int = 0
    gathered: int = 0
    working: int = 0
    waiting: int = 0

    @property
    def last(self) -> list[Happening]:
        """The pass that completes gradients of weights."""
        return self.backward if self.weights is None else self.weights


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
            RequestError: fewer than three blocks here, not all in one row, or a smaller ``count``.
        """
        blocks = [i for i, part in enumerate(self.parts) if part.is_block]
        if len(blocks) == count:
            return self
        if len(blocks) < 3 or count < 3 or blocks != list(range(blocks[0], blocks[-1] + 1)):
            raise RequestError(
                f"{len(blocks)} blocks cannot stand for {count}: give the model with as many, or "
                f"with 3 equal ones in a row that stand for more"
            )
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
        self.of_weights = of_weights(self.graph) if schedule.splits_backward else None
        apart = self.of_weights is not None
        self.parts = [Part(s.is_block, weights=[] if apart else None) for s in self.segments]
        self._part = self.parts[0]
        self._happenings: list[Happening] = []
        self._works: dict[str, tuple[Work, ...]] = {}

    def measure(self) -> Measured:
        """Walk forward and backward once, then the memory."""
        for s, part in zip(self.segments, self.parts, strict=True):
            self._enter(part, part.forward)
            for node in self.graph.nodes[s.start : s.end]:
                self._node_forward(node)
            if part is self.parts[-1]:
                self._edge(self.program.loss_edge, False, "forward")
        waits = self._waiting()
        for s, again, part in zip(
            reversed(self.segments), reversed(self.again), reversed(self.parts), strict=True
        ):
            self._enter(part, part.backward)
            if part is self.parts[-1]:
                self._edge(self.program.loss_edge, True, "backward")
            nodes = self.graph.nodes[s.start : s.end]
            for node in nodes:
                if node.name in again:
                    self._node_forward(node, "backward")
            for node in reversed(nodes):
                self._waits = waits.get(node.name, [])
                self._node_backward(node, {}, again=node.name in again)
        self._updates()
        crossing = _crossing_bytes(self.model, self.program, self.segments)
        found = Measured(tuple(self.parts), crossing, self._memory(crossing))
        return retimed(self.model, found)

    def _enter(self, part: Part, happenings: list[Happening]) -> None:
        self.groups, self._part, self._happenings = part.groups, part, happenings

    def _node_forward(self, node: Node, phase: Phase = "forward") -> None:
        if node.is_leaf:
            return
        for index in range(len(node.operands)):
            self._edge(self.program.edges[node.name, index], False, phase)
        self._internal(node, "forward")
        self._happenings.append(self._done(node)[0])

    def _computed_backward(self, node: Node) -> None:
        _, back, *later = self._done(node)
        with self._in_weights(node.name):
            self._internal(node, "backward")
            self._happenings.append(back)
        if later and self._part.weights is not None:
            self._part.weights += later

    def _edge(self, edge: Edge, back: bool, phase: Phase) -> None:
        if not (edge.reshard.backward if back else edge.reshard.forward):
            return
        with self._in_weights(edge.producer if back else None):
            super()._edge(edge, back, phase)

    @contextmanager
    def _in_weights(self, name: str | None) -> Iterator[None]:
        """What happens now belongs to gradients of weights, where ``name`` is one of those."""
        before = self._happenings
        if self.of_weights is not None and name in self.of_weights:
            self._happenings = self._part.last
        yield
        self._happenings = before

    def _done(self, node: Node) -> tuple[Work, ...]:
        """What an operator does: forward, backward, and apart from it for weights."""
        known = self._works.get(node.name)
        if known is not None:
            return known
        apart = self.of_weights is not None and self._splits(node)
        strategy = self.program.strategies[node.name]
        key = (self._kind(node), self._part.is_block, apart)
        if key not in self.model.done:
            found: tuple[Work, ...] = self.model.works(node, strategy)
            if apart and self.of_weights is not None:
                own, later = (
                    self.model.works(node, strategy, wants)[1]
                    for wants in halves(self.graph, node, self.of_weights)
                )
                found = (found[0], own, later)
            # With what the key has the numbers of, so that nothing else gets these.
            self.model.done[key] = found, strategy, self.program.rules[node.name]
        out = self._works[node.name] = self.model.done[key][0]
        return out

    def _splits(self, node: Node) -> bool:
        """Whether a part of its backward belongs to gradients of weights, and not all of it."""
        assert self.of_weights is not None
        return node.name not in self.of_weights and any(
            halves(self.graph, node, self.of_weights)[1]
        )

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
                    shape = local_shape(parameter.shape, edge.produced, program.sizes, self.origin)
                    size = prod(shape) * parameter.itemsize
                    out.setdefault(node.name, []).append(((axes, parameter.dtype), size))
        return out

    def _sent(self, node: Node, sent_after: object) -> None:
        self._part.last.extend(self._waits)

    def _message(
        self,
        op: str,
        axes: tuple[int, ...],
        num_bytes: int,
        phase: Phase,
        value: str,
        seconds: float,
    ) -> None:
        self._count(op, axes, num_bytes, phase, seconds)
        overlapped = self.schedule.overlapped
        beside = bool(axes) and all(self.program.axis_names[a] in overlapped for a in axes)
        self._happenings.append(Message(seconds, beside, self.model.prices.tiers_of(axes)))

    def _updates(self) -> None:
        """Seconds of the optimizer, and of adding one microbatch's gradients; bytes stored."""
        model, bandwidth = self.model, self.model.cluster.copy_bytes_per_second
        for s, part in zip(self.segments, self.parts, strict=True):
            stored = [0, 0, 0]
            for node in self.graph.nodes[s.start : s.end]:
                if not node.is_leaf or node.op == "input":
                    continue
                layout = self.program.strategies[node.name].result
                shards = shared_by(
                    self.program.axis_names,
                    self.program.sizes,
                    layout,
                    self.schedule.optimizer_shards,
                )
                itself, gradient, state = model.stored_bytes(node, layout)
                for kind, size in enumerate((itself, gradient, state // shards)):
                    stored[kind] += size
                if node.op != "parameter" or not node.differentiable:
                    continue
                part.update_s += model.update_seconds(node, layout) / shards
                elements = model.local_bytes(node, layout) / node.itemsize
                part.adding_s += elements * (node.itemsize + 2 * MASTER_BYTES) / bandwidth
            part.stored = (stored[0], stored[1], stored[2])

    def _memory(self, entering: int) -> int:
        """Bytes that each segment keeps; the temporary ones.

        Of a block that is recomputed only what enters it is kept, and one such block at a time is
        whole. Where only a part of it is, what that part reads is kept.
        """
        walk = MemoryWalk(self.model, self.program)
        walk.run(None)
        if self.of_weights is not None:
            self._waiting_bytes(walk, self.of_weights)
        of = {
            n.name: part
            for s, part in zip(self.segments, self.parts, strict=True)
            for n in self.graph.nodes[s.start : s.end]
        }
        seen: set[int] = set()
        shares = self._kept_shares(walk)
        for name, storages in walk.saves.items():
            for storage in storages:
                if storage in seen:
                    continue
                seen.add(storage)
                if storage in walk.gathered:
                    of[name].gathered += walk.sizes[storage]
                else:
                    of[name].kept += round(walk.sizes[storage] * shares.get(storage, 1.0))
        made = walk.made_by(n for n in self.graph.nodes if not n.is_leaf)
        for part, again in zip(self.parts, self.again, strict=True):
            if not again:
                continue
            if self.schedule.recompute in PARTLY:
                own = {s for name in again for s in walk.saves.get(name, ())}
                gone = {s for s in walk.kept if made.get(s) in again or (s in own - made.keys())}
                reads = {walk.storage_of(o) for n in again for o in self.graph.by_name[n].operands}
                stay = {s for s in reads - {STORED} - seen if made.get(s) not in again}
                part.working, added = (
                    sum(round(walk.sizes[s] * shares.get(s, 1.0)) for s in storages)
                    for storages in (gone & seen - walk.gathered, stay)
                )
                part.kept += added - part.working
                seen |= stay
            else:
                part.working = part.kept + part.gathered
                part.kept, part.gathered = min(part.kept, entering), 0
        return walk.beyond_bytes

    def _waiting_bytes(self, walk: MemoryWalk, weights: frozenset[str]) -> None:
        """Bytes that gradients of weights need: operands, and the gradient of the result."""
        shares = self._kept_shares(walk)
        seen: set[tuple[int, int]] = set()
        for s, part in zip(self.segments, self.parts, strict=True):
            for node in self.graph.nodes[s.start : s.end]:
                if node.is_leaf or node.name not in walk.given or not self._splits(node):
                    continue
                kept = [(i, 0) for i in walk.saves.get(node.name, ()) if i not in walk.gathered]
                for storage in (walk.given[node.name], *kept):
                    if storage not in seen:
                        seen.add(storage)
                        share = shares.get(storage[0], 1.0)
                        part.waiting += round(walk.sizes[storage[0]] * share)

    def _kept_shares(self, walk: MemoryWalk) -> dict[int, float]:
        """Of storages of which less than all is kept for backward, how much is.

        Fused kernels compute again what lies between two operators of theirs, and a product in
        fewer bits keeps its operand in those, as it was made or as it came.
        """
        out: dict[int, float] = {}
        for node in self.graph.nodes:
            if not node.is_leaf and (share := self.model.kept_share(node.name)) < 1.0:
                out[walk.storage_of(node.name)] = share
        for (name, index), storage in walk.moved.items():
            if (share := self.model.kept_share(self.graph.by_name[name].operands[index])) < 1.0:
                out[storage] = share
        for s in self.segments:
            if s.is_block:
                nodes = self.graph.nodes[s.start : s.end]
                for name in in_kernels(self.graph, nodes, self.schedule.style):
                    out[walk.storage_of(name)] = 0.0
        return out


def measure(model: CostModel, program: Program, schedule: Schedule) -> Measured:
    """The figures of each segment of one microbatch."""
    return _Walk(model, program, schedule).measure()


def retimed(model: CostModel, measured: Measured) -> Measured:
    """The same segments with the seconds of the cost model's device."""
    known: dict[int, Part] = {}
    times = _times_of(model, [q for p in measured.parts for q in (p.forward, p.backward, p.last)])
    for part in measured.parts:
        if id(part) not in known:
            forward, there, _ = _seconds(model, part.forward, times)
            backward, back, apart = _seconds(model, part.backward, times)
            later = computing = 0.0
            if part.weights is not None:
                later, computing, apart = _seconds(model, part.weights, times)
            known[id(part)] = replace(
                part,
                forward_s=forward,
                backward_s=backward + later,
                weight_s=later,
                compute_s=there + back + computing,
                apart_s=apart,
            )
    return replace(measured, parts=tuple(known[id(part)] for part in measured.parts))


def _times_of(model: CostModel, passes: Iterable[Sequence[Happening]]) -> dict[int, float]:
    """Seconds of all computing of some passes, by id: most of it is there many times."""
    works = {id(h): h for p in {id(p): p for p in passes}.values() for h in p}
    return {i: model.seconds(h) for i, h in works.items() if isinstance(h, Work)}


def _seconds(
    model: CostModel, happenings: Sequence[Happening], times: Mapping[int, float]
) -> tuple[float, float, float]:
    """Seconds of a pass, those of computing, and what messages beside it add to computing."""
    computing = waiting = beside = 0.0
    for h in happenings:
        if isinstance(h, Work):
            computing += times[id(h)]
        elif isinstance(h, Message):
            if h.is_beside:
                beside += h.seconds
            else:
                waiting += h.seconds
    apart = model.cluster.device.kernels.beside(computing, beside) - computing
    return computing + waiting + apart, computing, apart


def measured_step(measure: Callable[[Schedule], Measured], schedule: Schedule) -> Measured:
    """The figures of each segment of one microbatch of the whole model.

    Args:
        measure: those of the graph as it is, see :func:`measure`.
        schedule: how a step is run.

    Raises:
        RequestError: blocks that the graph cannot stand for.
    """
    found = measure(schedule)
    if schedule.blocks is not None:
        found = found.with_blocks(schedule.blocks)
    again = schedule.recomputed_blocks
    if again is None or schedule.recompute == "none":
        return found
    kept = measure(schedule.model_copy(update={"recompute": "none"}))
    if schedule.blocks is not None:
        kept = kept.with_blocks(schedule.blocks)
    return mixed(kept, found, again_of([part.is_block for part in found.parts], schedule))


def kinds_of(schedule: Schedule) -> tuple[Schedule, ...]:
    """Schedules of blocks that are all alike: without what is recomputed of some, and with it."""
    if schedule.recomputed_blocks is None:
        return (schedule,)
    alike = schedule.model_copy(update={"recomputed_blocks": None})
    return alike.model_copy(update={"recompute": "none"}), alike


def again_of(is_block: Sequence[bool], schedule: Schedule) -> frozenset[int]:
    """Blocks of the whole model that are recomputed, by number of the segment.

    Raises:
        RequestError: more than there are.
    """
    blocks = frozenset(i for i, repeated in enumerate(is_block) if repeated)
    some = schedule.recomputed_blocks
    if some is None:
        return blocks
    if some > len(blocks):
        raise RequestError(
            f"recomputed_blocks is {some}, and the model has {len(blocks)} repeated blocks; name "
            f"at most {len(blocks)}"
        )
    return blocks - later_blocks(is_block, schedule, len(blocks) - some)


def later_blocks(is_block: Sequence[bool], schedule: Schedule, count: int) -> frozenset[int]:
    """``count`` of the blocks of the whole model, by number of the segment.

    Ranks have the same share of them, and so have the chunks of a rank, as far as blocks divide;
    where they do not, the last chunks of each rank have one more. Of a chunk they are the last
    blocks. So chunks that are passed one after another take equally long as long as can be, which
    waits least. Evenly one after another where the division into stages depends on seconds.
    """
    p, chunks = schedule.stages, schedule.stages * schedule.virtual_stages
    blocks = [i for i, repeated in enumerate(is_block) if repeated]
    if not blocks:
        return frozenset()
    if schedule.stage_blocks is None and not divides(len(blocks), chunks):
        share = [n * count // len(blocks) for n in range(len(blocks) + 1)]
        return frozenset(
            i for i, (low, high) in zip(blocks, pairwise(share), strict=True) if high > low
        )
    bounds = chunk_bounds(is_block, [0.0] * len(is_block), chunks, schedule.stage_blocks)
    each = [[i for i in blocks if low <= i < high] for low, high in pairwise(bounds)]
    chosen: list[int] = []
    seen = 0
    for rank in range(p):
        own = each[rank::p]
        size = sum(map(len, own))
        seen += size
        here = seen * count // len(blocks) - len(chosen)
        numbers = [len(chunk) * here // max(1, size) for chunk in own]
        for k in reversed(range(len(own))):
            if numbers[k] < len(own[k]) and sum(numbers) < here:
                numbers[k] += 1
            chosen += own[k][len(own[k]) - numbers[k] :]
    return frozenset(chosen)


def mixed(rest: Measured, some: Measured, chosen: frozenset[int]) -> Measured:
    """The segments of ``rest``, but where ``chosen`` those of ``some``.

    Of programs that are alike outside of blocks, and in what one block hands to the next.
    """
    parts = tuple(
        b if i in chosen else a for i, (a, b) in enumerate(zip(rest.parts, some.parts, strict=True))
    )
    temporary_bytes = max(rest.temporary_bytes, some.temporary_bytes)
    return Measured(parts, rest.crossing_bytes, temporary_bytes)


Sent = tuple[int, tuple[int, ...], int]
"""A fused message: the place in its part's last pass, mesh axes and bytes."""

STEADY = 1e-12
"""Share of a part's seconds below which what is still on its way is as before."""


def buckets(
    parts: Sequence[Part], bucket_bytes: int, model: CostModel
) -> tuple[float, list[tuple[tuple[int, ...], int, float]]]:
    """(seconds that fused gradients add to the last backward, (axes, bytes, seconds) of each).

    Buckets are filled and sent as :class:`autoshard.program.Program` does it. Each tier of the
    cluster carries one message after another, and others beside those of other tiers: gradients
    that go from node to node run beside what the devices of a node send one another. Where
    gradients of weights are a task of their own, that task alone hides them.

    Parts that are alike, which most blocks are, are looked at until one leaves as much on its way
    as the one before it did.
    """
    sent = _sent(parts, bucket_bytes)
    if not any(sent):
        return 0.0, []
    messages: list[tuple[tuple[int, ...], int, float]] = []
    memo: dict[tuple[tuple[int, ...], int], float] = {}
    known: dict[int, list[tuple[int, Message | float | None]]] = {}
    times = _times_of(model, [part.last for part in parts])
    total = steady = 0.0
    free: dict[int, float] = {}
    backwards = zip(reversed(parts), reversed(sent), strict=True)
    for _, group in groupby(backwards, key=lambda pair: (id(pair[0]), pair[1])):
        alike = list(group)
        part, sends = alike[0]
        for _, axes, size in sends:
            if (axes, size) not in memo:
                memo[axes, size] = model.prices("all_reduce", axes, size)
        if id(part) not in known:
            known[id(part)] = _merged(part.last, times)
        left = len(alike)
        while left:
            seconds, after = _passed(model, known[id(part)], sends, memo, free)
            seconds += part.apart_s
            after = {tier: max(0.0, until - seconds) for tier, until in after.items()}
            is_steady = after.keys() == free.keys() and all(
                abs(until - free[tier]) <= STEADY * seconds for tier, until in after.items()
            )
            count, free = left if is_steady else 1, after
            total += count * seconds
            left -= count
        steady += len(alike) * (part.backward_s if part.weights is None else part.weight_s)
        messages += len(alike) * [(axes, size, memo[axes, size]) for _, axes, size in sends]
    return total + max(free.values(), default=0.0) - steady, messages


def _sent(parts: Sequence[Part], bucket_bytes: int) -> list[tuple[Sent, ...]]:
    """The fused messages of each part."""
    out: list[list[Sent]] = [[] for _ in parts]
    filled: dict[Key, int] = {}
    last: dict[Key, tuple[int, int]] = {}
    ready: dict[int, list[tuple[int, Ready]]] = {}
    for i in range(len(parts) - 1, -1, -1):
        here = id(parts[i])
        if here not in ready:
            ready[here] = [(j, h) for j, h in enumerate(parts[i].last) if isinstance(h, tuple)]
        for j, (key, size) in ready[here]:
            filled[key] = filled.get(key, 0) + size
            last[key] = i, j
            if filled[key] >= bucket_bytes:
                out[i].append((j, key[0], filled.pop(key)))
    for key, size in filled.items():
        i, j = last[key]
        out[i].append((j, key[0], size))
    return [tuple(sorted(sends, key=lambda sent: sent[0])) for sends in out]


def _merged(
    happenings: Sequence[Happening], times: Mapping[int, float]
) -> list[tuple[int, Message | float | None]]:
    """(place, what happens) of a pass: a message that blocks, or seconds that go by.

    None where a gradient is ready. Computing between two others is one.
    """
    out: list[tuple[int, Message | float | None]] = []
    computing = 0.0
    for j, h in enumerate(happenings):
        if isinstance(h, Work):
            computing += times[id(h)]
            continue
        if isinstance(h, Message) and h.is_beside:
            continue
        if computing:
            out.append((j, computing))
            computing = 0.0
        out.append((j, h if isinstance(h, Message) else None))
    return [*out, (len(happenings), computing)]


def _passed(
    model: CostModel,
    merged: Sequence[tuple[int, Message | float | None]],
    sends: Sequence[Sent],
    seconds: Mapping[tuple[tuple[int, ...], int], float],
    free: Mapping[int, float],
) -> tuple[float, dict[int, float]]:
    """(seconds of a part's last pass, when each tier is free after it), from its beginning on."""
    now, until = 0.0, dict(free)
    todo = iter((*sends, (-1, (), 0)))
    place, axes, size = next(todo)
    for j, h in merged:
        if isinstance(h, float):
            now += h
        elif h is not None:
            now = max([now, *(until.get(t, 0.0) for t in h.tiers)]) + h.seconds
            until.update(dict.fromkeys(h.tiers, now))
        elif place == j:
            tiers = model.prices.tiers_of(axes)
            start = max([now, *(until.get(t, 0.0) for t in tiers)])
            until.update(dict.fromkeys(tiers, start + seconds[axes, size]))
            place, axes, size = next(todo)
    return now, until


@dataclass(frozen=True, slots=True)
class Step:
    """What a step of several microbatches costs.

    Attributes:
        step_time: ``compute_s`` and ``communication_s`` are of one device, averaged over stages.
        memory: of the fullest stage.
        collectives: as one device of an average stage issues them, grouped; what goes from stage
            to stage is ``send``.
        timeline: every task of every stage, where asked for; what follows the last are exposed
            gradients and the optimizer.
        chunks: what a task of each chunk of the model costs.
        bounds: of each chunk the number of its first segment, and their number at the end.
        late_s: exposed seconds of the gradients that travel once a step.
        updates_s: of the optimizer, of each stage.
        sent_bytes: of one message from stage to stage.
    """

    step_time: StepTime
    memory: Memory
    collectives: tuple[CollectiveGroup, ...]
    timeline: tuple[Placed, ...]
    chunks: tuple[Chunk, ...]
    bounds: tuple[int, ...]
    late_s: float
    updates_s: tuple[float, ...]
    sent_bytes: int


def price_step(
    model: CostModel,
    program: Program,
    schedule: Schedule,
    memory_limit: int | None = None,
    *,
    timeline: bool = False,
) -> Step:
    """The figures of a step of ``schedule``; the program is that of one microbatch.

    ``model`` is of the devices of one stage; every task is listed where ``timeline`` asks for it.

    Raises:
        RequestError: more stages than blocks, or a schedule that cannot be.
    """
    found = measured_step(partial(measure, model, program), schedule)
    return compose(model, program, schedule, found, memory_limit, timeline=timeline)


def compose(
    model: CostModel,
    program: Program,
    schedule: Schedule,
    measured: Measured,
    memory_limit: int | None = None,
    *,
    timeline: bool = False,
) -> Step:
    """The figures of a step whose segments are ``measured``; see :func:`price_step`."""
    parts, m, p = measured.parts, schedule.microbatches, schedule.stages
    apart = schedule.splits_backward
    exposed, fused = buckets(parts, program.bucket_bytes, model)
    sums = [part.adding_s if m > 1 else 0.0 for part in parts]
    bounds = chunk_bounds(
        [part.is_block for part in parts],
        [part.forward_s + part.backward_s for part in parts],
        p * schedule.virtual_stages,
        schedule.stage_blocks,
    )
    runs = [range(x, y) for x, y in pairwise(bounds)]
    sent_bytes = measured.crossing_bytes if p > 1 else 0
    send_s = send_seconds(model, schedule, sent_bytes) if p > 1 else 0.0
    chunks = [
        Chunk(
            forward_s=sum(parts[i].forward_s for i in run),
            backward_s=sum(parts[i].backward_s + sums[i] for i in run),
            weight_s=sum(parts[i].weight_s + sums[i] for i in run) if apart else 0.0,
            send_s=send_s,
        )
        for run in runs
    ]
    placed: list[Placed] = []
    if p == 1:
        placed = _in_turn(chunks, m) if timeline else []
        done = m * sum(c.forward_s + c.backward_s for c in chunks)
    elif timeline:
        done, placed = simulate(schedule.order, chunks, p, m)
    else:
        done = duration(schedule.order, chunks, p, m)
    by_stage = [sum(parts[i].update_s for run in runs[rank::p] for i in run) for rank in range(p)]
    slowest, whole = max(by_stage), sum(part.update_s for part in parts)
    late = exposed * (slowest / whole if whole else 1.0)
    total = done + late + slowest
    forward, backward = sum(q.forward_s for q in parts), sum(q.backward_s for q in parts)
    share = forward / ((forward + backward) or 1.0)
    compute_s = m * (sum(part.compute_s for part in parts) + sum(sums)) / p
    groups = [_times(g, m / p) for g in _grouped(parts)]
    groups += [_times(g, 1 / p) for g in _fused(program, fused)]
    if p > 1:
        per_stage = 2 * m * (len(chunks) - 1) / p
        for phase in ("forward", "backward"):
            groups.append(
                CollectiveGroup(
                    op="send",
                    axes=("pipeline",),
                    phase=phase,
                    count=round(per_stage / 2),
                    total_bytes=round(per_stage / 2 * sent_bytes),
                    seconds=per_stage / 2 * send_s,
                )
            )
    return Step(
        step_time=StepTime(
            total_s=total,
            compute_s=compute_s,
            optimizer_s=slowest,
            communication_s=sum(g.seconds for g in groups),
            exposed_communication_s=max(
                0.0, m * (forward + backward + sum(sums)) / p + late - compute_s
            ),
            forward_s=done * share,
            backward_s=done * (1 - share) + late,
        ),
        memory=_memory(model, schedule, measured, runs, memory_limit),
        collectives=tuple(groups),
        timeline=tuple(placed),
        chunks=tuple(chunks),
        bounds=tuple(bounds),
        late_s=late,
        updates_s=tuple(by_stage),
        sent_bytes=sent_bytes,
    )


def _in_turn(chunks: list[Chunk], microbatches: int) -> list[Placed]:
    """One stage: the microbatches one after another, each forward and backward."""
    out: list[Placed] = []
    now = 0.0
    for m in range(microbatches):
        for task, seconds in (
            ("F", sum(c.forward_s for c in chunks)),
            ("B", sum(c.backward_s for c in chunks)),
        ):
            out.append(Placed(0, Action(task, 0, m), now, seconds))  # type: ignore[arg-type]
            now += seconds
    return out


def _grouped(parts: Sequence[Part]) -> list[CollectiveGroup]:
    merged: dict[tuple[str, tuple[str, ...], Phase], list[float]] = {}
    alike = [list(group) for _, group in groupby(parts, key=id)]
    for phase in ("forward", "backward"):
        for group in alike if phase == "forward" else reversed(alike):
            for key, row in group[0].groups.items():
                if key[2] == phase:
                    total = merged.setdefault(key, [0.0, 0.0, 0.0])
                    for i, value in enumerate(row):
                        total[i] += len(group) * value
    return [
        CollectiveGroup(
            op=op, axes=axes, phase=phase, count=int(n), total_bytes=int(size), seconds=seconds
        )
        for (op, axes, phase), (n, size, seconds) in merged.items()
    ]


def _fused(
    program: Program, messages: Sequence[tuple[tuple[int, ...], int, float]]
) -> list[CollectiveGroup]:
    """The fused gradients."""
    merged: dict[tuple[int, ...], list[float]] = {}
    for axes, size, seconds in messages:
        row = merged.setdefault(axes, [0, 0, 0.0])
        for i, value in enumerate((1, size, seconds)):
            row[i] += value
    return [
        CollectiveGroup(
            op="all_reduce",
            axes=tuple(program.axis_names[a] for a in axes),
            phase="backward",
            count=int(n),
            total_bytes=int(size),
            seconds=seconds,
        )
        for axes, (n, size, seconds) in merged.items()
    ]


def _times(group: CollectiveGroup, factor: float) -> CollectiveGroup:
    return group.model_copy(
        update={
            "count": ceil(group.count * factor),
            "total_bytes": round(group.total_bytes * factor),
            "seconds": group.seconds * factor,
        }
    )


def _memory(
    model: CostModel,
    schedule: Schedule,
    measured: Measured,
    runs: list[range],
    limit: int | None,
) -> Memory:
    """Bytes of the fullest stage, and of each.

    A stage keeps what its blocks keep for each microbatch that has gone forward and not yet come
    back, and what gradients of weights need for each that has come back and waits for them.
    """
    parts, p = measured.parts, schedule.stages
    working = max((part.working for part in parts), default=0)
    rows = zip(*((*q.stored, q.kept, q.gathered, q.waiting) for q in parts), strict=True)
    before = [[0, *accumulate(row)] for row in rows]
    stages = []
    for rank in range(p):
        itself, gradients, state, kept, gathered, waiting = (
            sum(row[run.stop] - row[run.start] for run in runs[rank::p]) for row in before
        )
        alive, later = max(
            held_microbatches(schedule, rank),
            key=lambda held: held[0] * (kept + gathered) + held[1] * waiting,
        )
        stages.append(
            Categories(
                parameters_bytes=itself,
                gradients_bytes=gradients,
                optimizer_bytes=state,
                activations_bytes=round(alive * kept + later * waiting),
                gathered_bytes=round(alive * gathered),
                temporary_bytes=measured.temporary_bytes + working,
            )
        )
    fullest = max(stages, key=lambda stage: stage.allocated_bytes)
    return Memory(
        **fullest.model_dump(),
        reserve_bytes=model.cluster.reserve_bytes,
        limit_bytes=limit,
        reserve=reserve_parts(model.cluster),
        stages=tuple(stages) if p > 1 else (),
    )


def send_seconds(model: CostModel, schedule: Schedule, num_bytes: int) -> float:
    """From one stage to the next, over whatever the pipeline's axis crosses."""
    cluster = model.cluster
    whole = cluster.with_devices(cluster.devices * schedule.stages)
    prices = whole.collective_seconds((schedule.stages, cluster.devices))
    return prices("send_recv", (0,), num_bytes)


def crossing_nodes(graph: ModelGraph, parts: Sequence[Segment]) -> list[str]:
    """What one block hands to the next."""
    blocks = [s for s in parts if s.is_block]
    if len(blocks) < 2:
        return []
    first, second = blocks[0], blocks[1]
    inside = {n.name for n in graph.nodes[first.start : first.end]}
    taken = {
        o: None
        for n in graph.nodes[second.start : second.end]
        for o in n.operands
        if o in inside and not graph.by_name[o].is_leaf
    }
    return list(taken)


def _crossing_bytes(model: CostModel, program: Program, parts: Sequence[Segment]) -> int:
    """Bytes of what one block hands to the next, of one device."""
    by_name = program.graph.by_name
    return sum(
        model.local_bytes(by_name[o], program.strategies[o].result)
        for o in crossing_nodes(program.graph, parts)
    )
