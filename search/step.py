"""A step of many microbatches: recomputation, prefetched gathers, accumulation, pipeline stages.

One microbatch of a program is walked segment by segment (what stands before the repeated blocks,
each block, what stands after them), which gives forward and backward seconds of each. With one
stage the microbatches follow one another; with more the segments are laid out over the stages and
the schedule is simulated. Gradients of replicated weights travel once a step, during the last
microbatch's backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from autoshard.errors import RequestError
from autoshard.graph import ModelGraph, Node
from autoshard.plan import CollectiveGroup, Memory, Schedule, StepTime
from autoshard.program import Program
from autoshard.search.cost import CostModel
from autoshard.search.pipeline import Action, Chunk, Placed, simulate
from autoshard.search.price import _MemoryWalk, _Pricer

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


class _Walk(_Pricer):
    """One microbatch, segment by segment."""

    def __init__(self, model: CostModel, program: Program, schedule: Schedule) -> None:
        super().__init__(model, program, None, False)
        self.segments = segments(self.graph)
        self.again = [
            recomputed(self.graph.nodes[s.start : s.end], schedule) if s.is_block else frozenset()
            for s in self.segments
        ]

    def walk(self, *, buckets: bool) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of each segment; gradients in buckets are sent or not."""
        forward: list[float] = []
        for s in self.segments:
            began = self.now
            for node in self.graph.nodes[s.start : s.end]:
                self._node_forward(node)
            forward.append(self.now - began)
        began = self.now
        self._edge(self.program.loss_edge, False, "forward")
        forward[-1] += self.now - began
        sent = self._sent_after() if buckets else {}
        backward: list[float] = []
        began = self.now
        self._edge(self.program.loss_edge, True, "backward")
        for s, again in zip(reversed(self.segments), reversed(self.again), strict=True):
            nodes = self.graph.nodes[s.start : s.end]
            for node in nodes:
                if node.name in again:
                    self._node_forward(node, "backward")
            for node in reversed(nodes):
                self._node_backward(node, sent, again=node.name in again)
            backward.append(self.now - began)
            began = self.now
        backward[-1] += max(0.0, self.link_free - self.now)
        return forward, backward[::-1]


@dataclass(frozen=True, slots=True)
class Step:
    """What a step of several microbatches costs.

    Attributes:
        step_time: ``compute_s`` and ``communication_s`` are of one device, averaged over stages.
        memory: of the fullest stage.
        collectives: as one device of an average stage issues them, grouped; what goes from stage
            to stage is ``send``.
        timeline: every task of every stage; what follows the last are exposed gradients and the
            optimizer.
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
    model: CostModel, program: Program, schedule: Schedule, memory_limit: int | None = None
) -> Step:
    """The figures of a step of ``schedule``; the program is that of one microbatch.

    ``model`` is of the devices of one stage.

    Raises:
        RequestError: more stages than blocks, or a schedule that cannot be.
    """
    steady = _Walk(model, program, schedule)
    forward, backward = steady.walk(buckets=False)
    last = _Walk(model, program, schedule)
    exposed = sum(map(sum, last.walk(buckets=True))) - sum(forward) - sum(backward)
    m, p = schedule.microbatches, schedule.stages
    updates, sums = _updates(model, program, steady.segments, schedule)
    if m == 1:
        sums = [0.0] * len(sums)
    bounds = chunk_bounds(
        steady.segments,
        [f + b for f, b in zip(forward, backward, strict=True)],
        p * schedule.virtual_stages,
    )
    runs = [range(x, y) for x, y in pairwise(bounds)]
    sent_bytes = _crossing_bytes(model, program, steady.segments) if p > 1 else 0
    send_s = _send_seconds(model, schedule, sent_bytes) if p > 1 else 0.0
    chunks = [
        Chunk(
            forward_s=sum(forward[i] for i in run),
            backward_s=sum(backward[i] + sums[i] for i in run),
            send_s=send_s,
        )
        for run in runs
    ]
    if p == 1:
        timeline = _in_turn(chunks, m)
        done = m * sum(c.forward_s + c.backward_s for c in chunks)
    else:
        done, timeline = simulate(schedule.order, chunks, p, m)
    by_stage = [sum(updates[i] for run in runs[rank::p] for i in run) for rank in range(p)]
    slowest, whole = max(by_stage), sum(updates)
    late = exposed * (slowest / whole if whole else 1.0)
    total = done + late + slowest
    share = sum(forward) / ((sum(forward) + sum(backward)) or 1.0)
    compute_s = m * (steady.compute + sum(sums)) / p
    fused = _fused(last)
    groups = [_times(g, m / p) for g in _grouped(steady)] + [_times(g, 1 / p) for g in fused]
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
                0.0, m * sum(forward + backward + sums) / p + late - compute_s
            ),
            forward_s=done * share,
            backward_s=done * (1 - share) + late,
        ),
        memory=_memory(model, program, schedule, steady, runs, memory_limit),
        collectives=tuple(groups),
        timeline=tuple(timeline),
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


def _grouped(walk: _Walk) -> list[CollectiveGroup]:
    return [
        CollectiveGroup(
            op=op, axes=axes, phase=phase, count=int(n), total_bytes=int(size), seconds=seconds
        )
        for (op, axes, phase), (n, size, seconds) in walk.groups.items()
    ]


def _fused(walk: _Walk) -> list[CollectiveGroup]:
    """The fused gradients alone: what a walk with buckets has beyond one without."""
    program, out = walk.program, []
    for index in range(len(program.buckets)):
        message = program.bucket_collective(index, walk.origin)
        axes = tuple(program.axis_names.index(a) for a in message.axes)
        out.append(
            CollectiveGroup(
                op=message.op,
                axes=message.axes,
                phase="backward",
                count=1,
                total_bytes=message.num_bytes,
                seconds=walk.model.prices(message.op, axes, message.num_bytes),
            )
        )
    merged: dict[tuple[str, tuple[str, ...]], CollectiveGroup] = {}
    for g in out:
        before = merged.get((g.op, g.axes))
        merged[g.op, g.axes] = (
            g
            if before is None
            else g.model_copy(
                update={
                    "count": before.count + 1,
                    "total_bytes": before.total_bytes + g.total_bytes,
                    "seconds": before.seconds + g.seconds,
                }
            )
        )
    return list(merged.values())


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
    program: Program,
    schedule: Schedule,
    walked: _Walk,
    runs: list[range],
    limit: int | None,
) -> Memory:
    """Bytes of the fullest stage.

    A stage keeps what its blocks keep for each microbatch that has gone forward and not yet come
    back. Of a block that is recomputed only what enters it is kept, and one such block at a time
    is whole.
    """
    walk = _MemoryWalk(model, program)
    whole = walk.run(limit)
    graph, parts, p = program.graph, walked.segments, schedule.stages
    of = {n.name: i for i, s in enumerate(parts) for n in graph.nodes[s.start : s.end]}
    stored = [[0, 0, 0] for _ in parts]
    for node in graph.nodes:
        if node.is_leaf and node.op != "input":
            layout = program.strategies[node.name].result
            for kind, size in enumerate(model.stored_bytes(node, layout)):
                stored[of[node.name]][kind] += size
    kept, gathered = [0] * len(parts), [0] * len(parts)
    seen: set[str] = set()
    for name, storages in walk.saves.items():
        at = of[name]
        for storage in storages:
            if storage not in seen:
                seen.add(storage)
                (gathered if storage in walk.gathered else kept)[at] += walk.saved[storage]
    working = 0
    if schedule.recompute != "none":
        entering = _crossing_bytes(model, program, parts)
        for i, (s, again) in enumerate(zip(parts, walked.again, strict=True)):
            if not s.is_block or not again:
                continue
            if schedule.recompute == "selective":
                less = min(kept[i], _kept_by(walk, program, again))
                working, kept[i] = max(working, less), kept[i] - less
            else:
                working = max(working, kept[i] + gathered[i])
                kept[i], gathered[i] = min(kept[i], entering), 0
    virtual, m = schedule.virtual_stages, schedule.microbatches
    best: Memory | None = None
    for rank in range(p):
        inside = [i for run in runs[rank::p] for i in run]
        alive = _alive(schedule, rank, p, virtual, m)
        found = Memory(
            parameters_bytes=sum(stored[i][0] for i in inside),
            gradients_bytes=sum(stored[i][1] for i in inside),
            optimizer_bytes=sum(stored[i][2] for i in inside) // schedule.optimizer_shards,
            activations_bytes=round(alive * sum(kept[i] for i in inside)),
            gathered_bytes=round(alive * sum(gathered[i] for i in inside)),
            temporary_bytes=whole.temporary_bytes + working,
            reserve_bytes=whole.reserve_bytes,
            limit_bytes=limit,
        )
        if best is None or found.total_bytes > best.total_bytes:
            best = found
    assert best is not None
    return best


def _kept_by(walk: _MemoryWalk, program: Program, names: frozenset[str]) -> int:
    """Bytes that only these operators made and somebody keeps."""
    made = {walk.storage[n] for n in names}
    own = {s for n in names for s in walk.saves.get(n, ())}
    return sum(walk.saved[s] for s in (made | own) if s in walk.saved)


def _alive(schedule: Schedule, rank: int, stages: int, virtual: int, microbatches: int) -> float:
    """Most microbatches of a whole stage that are between forward and backward at a time."""
    if stages == 1:
        return 1.0
    if schedule.order == "gpipe":
        return float(microbatches)
    if schedule.order == "interleaved":
        chunks = (virtual - 1) * stages + 2 * (stages - 1 - rank) + 1
        return min(chunks, microbatches * virtual) / virtual
    return float(min(microbatches, stages - rank))


def _send_seconds(model: CostModel, schedule: Schedule, num_bytes: int) -> float:
    """From one stage to the next, over whatever the pipeline's axis crosses."""
    cluster = model.cluster
    whole = cluster.with_devices(cluster.devices * schedule.stages)
    prices = whole.collective_seconds((schedule.stages, cluster.devices))
    return prices("send_recv", (0,), num_bytes)


def _updates(
    model: CostModel, program: Program, parts: list[Segment], schedule: Schedule
) -> tuple[list[float], list[float]]:
    """Seconds of the optimizer, and of adding one microbatch's gradients, of each segment."""
    updates, sums = [], []
    bandwidth = model.cluster.copy_bytes_per_second
    for s in parts:
        update = adding = 0.0
        for node in program.graph.nodes[s.start : s.end]:
            if node.op != "parameter" or not node.differentiable:
                continue
            layout = program.strategies[node.name].result
            seconds = model.update_seconds(node, layout)
            update += seconds / schedule.optimizer_shards
            elements = model.local_bytes(node, layout) / node.itemsize
            adding += elements * (node.itemsize + 2 * MASTER_BYTES) / bandwidth
        updates.append(update)
        sums.append(adding)
    return updates, sums


def chunk_bounds(parts: list[Segment], seconds: list[float], chunks: int) -> list[int]:
    """Number of the first segment of each chunk, and the number of segments at the end.

    Blocks that divide evenly do; where two more would, what stands before and after the blocks
    counts as a block each; else the slowest chunk is made as fast as can be.
    """
    blocks = [i for i, s in enumerate(parts) if s.is_block]
    count = len(blocks)
    if chunks > max(1, count):
        raise RequestError(
            f"the model has {count} repeated blocks, which cannot fill {chunks} stages; use "
            f"pipeline and virtual stages whose product is at most {count}"
        )
    if chunks == 1:
        return [0, len(parts)]
    if count % chunks == 0:
        each = count // chunks
        firsts = [blocks[i * each] for i in range(chunks)]
    elif count and (count + 2) % chunks == 0 and chunks > 1:
        each = (count + 2) // chunks
        firsts = [blocks[0]] + [blocks[i * each - 1] for i in range(1, chunks)]
    else:
        firsts = _balanced(seconds, chunks)
    return [0, *firsts[1:], len(parts)]


def _balanced(seconds: list[float], chunks: int) -> list[int]:
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
