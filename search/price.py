"""The exact figures of one program: step time by simulation, memory by a walk, its messages.

Two streams, computing and communicating. A message of an edge or of an operator blocks: computing
waits for it, and it waits for messages before it. Buckets of gradients do not block: they run
beside the rest of backward, and the optimizer waits for the last. Where the device was measured,
what runs beside a message is slowed by its ``contention``, and slows the message as much; fused
gradients are copied into their message and back. Everything is of the device at coordinate 0, which
holds the largest shards.

Memory is the sum of what stays all step (parameters, gradients, optimizer state: gradients count
in full, as they do where they are not freed between steps), what is kept for backward when the loss
has been computed, and what the fullest moment holds beyond that. Views share storage, and what an
operator keeps counts where the graph lists it: a graph lists each storage once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.graph import ModelGraph, Node
from autoshard.measured import Measured
from autoshard.plan import CollectiveGroup, Memory, StepTime
from autoshard.program import ALIASES, Edge, Program
from autoshard.search.cost import CostModel, OperatorCost, weight_values
from autoshard.sharding.collective import Collective, Phase
from autoshard.sharding.layout import Layout, gradient_half

Stream = Literal["compute", "communication"]


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of the timeline.

    Attributes:
        stream: what is busy.
        name: of the operator, or of the message and the value that moves.
        phase: of the step.
        start_s: seconds since the step began.
        seconds: how long.
        message: what is sent; None for an operator.
        issued_s: when the program came to the message; it starts later where the links are busy.
        is_fused: whether compute goes on beside the message.
    """

    stream: Stream
    name: str
    phase: Literal["forward", "backward", "optimizer"]
    start_s: float
    seconds: float
    message: Collective | None = None
    issued_s: float = 0.0
    is_fused: bool = False


@dataclass(frozen=True, slots=True)
class Priced:
    """What a program costs.

    Attributes:
        step_time: predicted seconds.
        memory: predicted bytes.
        collectives: its messages, grouped, in order of first occurrence.
        exposed_share: share of the fused gradients' seconds that compute does not hide.
        blocking_s: seconds with nothing hidden but all fused gradients: no schedule is faster.
        timeline: every event, where asked for.
    """

    step_time: StepTime
    memory: Memory
    collectives: tuple[CollectiveGroup, ...]
    exposed_share: float
    blocking_s: float
    timeline: tuple[Event, ...] = ()


def price(
    model: CostModel,
    program: Program,
    *,
    memory_limit: int | None = None,
    timeline: bool = False,
) -> Priced:
    """The exact figures of ``program``."""
    return _Pricer(model, program, memory_limit, timeline).run()


class _Pricer:
    def __init__(
        self, model: CostModel, program: Program, memory_limit: int | None, timeline: bool
    ) -> None:
        self.model, self.program, self.limit = model, program, memory_limit
        self.graph: ModelGraph = program.graph
        self.origin = (0,) * len(program.sizes)
        self.measured = model.cluster.device.measured or Measured()
        self.keep_events = timeline
        self.events: list[Event] = []
        self.now = 0.0
        self.link_free = 0.0
        self.compute = self.communication = self.fused = 0.0
        self.groups: dict[tuple[str, tuple[str, ...], Phase], list[float]] = {}
        self._operators: dict[object, OperatorCost] = {}
        self._messages: dict[tuple[int, bool], list[tuple[str, tuple[int, ...], int, float]]] = {}

    def run(self) -> Priced:
        """Simulate one step, then walk its memory."""
        program = self.program
        self._work("step", "forward", self.measured.step_s)
        self._forward()
        forward_s = self.now
        self._backward()
        self._finish_buckets()
        waited = max(self.now, self.link_free)
        backward_s = waited - forward_s
        update = self._optimizer_seconds()
        self._event("compute", "optimizer", "optimizer", waited, update)
        total = waited + update
        exposed = max(0.0, total - self.compute - update)
        step = StepTime(
            total_s=total,
            compute_s=self.compute,
            optimizer_s=update,
            communication_s=self.communication,
            exposed_communication_s=exposed,
            forward_s=forward_s,
            backward_s=backward_s,
        )
        blocking = self.communication - self.fused
        share = (exposed - blocking) / self.fused if self.fused else 0.0
        return Priced(
            step_time=step,
            memory=_MemoryWalk(self.model, program).run(self.limit),
            collectives=tuple(
                CollectiveGroup(
                    op=op,
                    axes=axes,
                    phase=phase,
                    count=int(count),
                    total_bytes=int(num_bytes),
                    seconds=seconds,
                )
                for (op, axes, phase), (count, num_bytes, seconds) in self.groups.items()
            ),
            exposed_share=min(1.0, max(0.0, share)),
            blocking_s=self.compute + update + blocking,
            timeline=tuple(self.events),
        )

    # ---- the two halves ---------------------------------------------------------------------

    def _forward(self) -> None:
        for node in self.graph.nodes:
            self._node_forward(node)
        self._edge(self.program.loss_edge, False, "forward")

    def _node_forward(self, node: Node, phase: Phase = "forward") -> None:
        """``phase`` is backward where the operator is computed a second time."""
        if node.is_leaf:
            return
        for index in range(len(node.operands)):
            self._edge(self.program.edges[node.name, index], False, phase)
        cost = self._operator(node)
        self._internal(node, "forward")
        self._work(node.name, phase, cost.forward_s)

    def _backward(self) -> None:
        sent_after = self._sent_after()
        self._edge(self.program.loss_edge, True, "backward")
        for node in reversed(self.graph.nodes):
            self._node_backward(node, sent_after)

    def _sent_after(self) -> dict[str, list[int]]:
        """Buckets by the operator after whose backward they are sent."""
        out: dict[str, list[int]] = {}
        for index, bucket in enumerate(self.program.buckets):
            out.setdefault(bucket.after, []).append(index)
        return out

    def _node_backward(
        self, node: Node, sent_after: Mapping[str, Sequence[int]], *, again: bool = False
    ) -> None:
        """``again`` where forward was just computed a second time, so what it gathered is there."""
        if not node.differentiable or node.is_leaf:
            return
        program = self.program
        if not again:
            for edge in program.regathered.get(node.name, ()):
                self._edge(edge, False, "backward")
        cost = self._operator(node)
        self._internal(node, "backward")
        self._work(node.name, "backward", cost.backward_s)
        self._sent(node, sent_after)
        for index in reversed(range(len(node.operands))):
            edge = program.edges[node.name, index]
            if edge.bucket is None:
                self._edge(edge, True, "backward")

    def _sent(self, node: Node, sent_after: Mapping[str, Sequence[int]]) -> None:
        """What is sent once a node's own backward is done."""
        for index in sent_after.get(node.name, ()):
            message = self.program.bucket_collective(index, self.origin)
            self._copy(message, len(self.program.buckets[index].parameters))
            self._bucket(message)

    def _operator(self, node: Node) -> OperatorCost:
        strategy = self.program.strategies[node.name]
        # Nodes of one kind share their rule and their strategies.
        key = (
            id(self.program.rules[node.name]),
            id(strategy),
            node.flops_forward,
            node.flops_backward,
            node.dtype,
            node.differentiable,
            node.op,
            self.model.surroundings(node),
        )
        found = self._operators.get(key)
        if found is None:
            found = self._operators[key] = self.model.operator(node, strategy)
        return found

    def _edge(self, edge: Edge, back: bool, phase: Phase) -> None:
        steps = edge.reshard.backward if back else edge.reshard.forward
        if not steps:
            return
        key = (id(edge.reshard), back)
        found = self._messages.get(key)
        if found is None:
            found = self._messages[key] = []
            listed = self.program._steps(edge.producer, steps, self.origin, phase)
            for message in listed:
                axes = tuple(self.program.axis_names.index(a) for a in message.axes)
                seconds = self.model.prices(message.op, axes, message.num_bytes)
                found.append((message.op, axes, message.num_bytes, seconds))
        for op, axes, num_bytes, seconds in found:
            self._message(op, axes, num_bytes, phase, edge.producer, seconds)

    def _internal(self, node: Node, phase: Phase) -> None:
        if not self.program.rules[node.name].internal:
            return
        for message in self.program._internal(node, self.origin, phase):
            axes = tuple(self.program.axis_names.index(a) for a in message.axes)
            seconds = self.model.prices(message.op, axes, message.num_bytes)
            self._message(message.op, axes, message.num_bytes, phase, node.name, seconds)

    def _count(
        self, op: str, axes: tuple[int, ...], num_bytes: int, phase: Phase, seconds: float
    ) -> None:
        names = tuple(self.program.axis_names[a] for a in axes)
        row = self.groups.setdefault((op, names, phase), [0.0, 0.0, 0.0])
        row[0] += 1
        row[1] += num_bytes
        row[2] += seconds
        self.communication += seconds

    def _copy(self, message: Collective, parameters: int) -> None:
        """Half of a bucket's copies; a single gradient is its own message."""
        copies = self.measured.gradient_copies / 2 if parameters > 1 else 0.0
        seconds = 2 * copies * message.num_bytes / self.model.cluster.copy_bytes_per_second
        self._work(f"fused {message.value}", "backward", seconds)

    def _finish_buckets(self) -> None:
        """The optimizer waits for the last message, and gradients are copied out of theirs."""
        buckets = self.program.buckets
        if not buckets or not self.measured.gradient_copies:
            return
        self.now = max(self.now, self.link_free)
        for index, bucket in enumerate(buckets):
            message = self.program.bucket_collective(index, self.origin)
            self._copy(message, len(bucket.parameters))

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
        issued = self.now
        start = max(issued, self.link_free)
        self.now = self.link_free = start + seconds
        if self.keep_events:
            names = tuple(self.program.axis_names[a] for a in axes)
            message = Collective(op, names, num_bytes, phase, value)  # type: ignore[arg-type]
            name = f"{op} {value}"
            self._event("communication", name, phase, start, seconds, message, issued)

    def _bucket(self, message: Collective) -> None:
        axes = tuple(self.program.axis_names.index(a) for a in message.axes)
        seconds = self.model.prices(message.op, axes, message.num_bytes)
        self._count(message.op, axes, message.num_bytes, "backward", seconds)
        self.fused += seconds
        start = max(self.now, self.link_free)
        self.link_free = start + seconds
        name = f"fused {message.op} {message.value}"
        self._event("communication", name, "backward", start, seconds, message, self.now, True)

    def _work(self, name: str, phase: Phase, seconds: float) -> None:
        if not seconds:
            return
        slowed = seconds
        if contention := self.measured.contention:
            both = min(seconds, max(0.0, self.link_free - self.now))
            slowed += contention * both
            self.link_free += contention * both
        if self.keep_events:
            self._event("compute", name, phase, self.now, slowed)
        self.compute += seconds
        self.now += slowed

    def _event(
        self,
        stream: Stream,
        name: str,
        phase: Literal["forward", "backward", "optimizer"],
        start: float,
        seconds: float,
        message: Collective | None = None,
        issued: float = 0.0,
        is_fused: bool = False,
    ) -> None:
        if self.keep_events and seconds:
            self.events.append(
                Event(stream, name, phase, start, seconds, message, issued, is_fused)
            )

    def _optimizer_seconds(self) -> float:
        total = 0.0
        for node in self.graph.nodes:
            if node.op == "parameter":
                layout = self.program.strategies[node.name].result
                total += self.model.update_seconds(node, layout)
        return total


class _MemoryWalk:
    """Bytes of the fullest moment of one step."""

    def __init__(self, model: CostModel, program: Program) -> None:
        self.model, self.program, self.graph = model, program, program.graph
        self.weights = weight_values(self.graph)
        self._bytes: dict[tuple[int, str, object], int] = {}

    def run(self, limit: int | None) -> Memory:
        """Walk forward, then backward."""
        stored = [0, 0, 0]
        inputs = 0
        for node in self.graph.nodes:
            if not node.is_leaf:
                continue
            layout = self.program.strategies[node.name].result
            if node.op == "input":
                inputs += self.model.local_bytes(node, layout)
                continue
            for i, num_bytes in enumerate(self.model.stored_bytes(node, layout)):
                stored[i] += num_bytes
        self._storages()
        peak = self._walk()
        kept = sum(b for s, b in self.saved.items() if s not in self.gathered)
        gathered = sum(b for s, b in self.saved.items() if s in self.gathered)
        return Memory(
            parameters_bytes=stored[0],
            gradients_bytes=stored[1],
            optimizer_bytes=stored[2],
            activations_bytes=kept + inputs,
            gathered_bytes=gathered,
            temporary_bytes=max(0, peak - kept - gathered),
            reserve_bytes=self.model.cluster.reserve_bytes,
            limit_bytes=limit,
        )

    def _local(self, node: Node, layout: Layout) -> int:
        return self.model.local_bytes(node, layout)

    def _storages(self) -> None:
        """Which storage each value and each moved operand has, and what is kept for backward."""
        program, by_name = self.program, self.graph.by_name
        self.storage: dict[str, str] = {}
        self.size: dict[str, int] = {}
        self.copy: dict[tuple[str, int], str] = {}
        self.gathered: set[str] = set()
        self.saved: dict[str, int] = {}
        self.savers: dict[str, int] = {}
        self.saves: dict[str, list[str]] = {}
        again = self.program.regathered
        dropped = {(edge.consumer, edge.index) for edges in again.values() for edge in edges}
        for node in self.graph.nodes:
            strategy = program.strategies[node.name]
            if node.is_leaf:
                self.storage[node.name], self.size[node.name] = node.name, 0
                continue
            for index, operand in enumerate(node.operands):
                edge = program.edges[node.name, index]
                sliced = all(s.kind == "slice" for s in edge.reshard.forward)
                if sliced and by_name[operand].is_leaf:
                    continue  # a view of what is there all step
                if edge.reshard.forward and not edge.constant:
                    name = f"{operand} for {node.name}.{index}"
                    self.copy[node.name, index] = name
                    self.size[name] = self._local(by_name[operand], edge.taken)
                    if operand in self.weights and any(
                        s.kind == "all_gather" for s in edge.reshard.forward
                    ):
                        self.gathered.add(name)
            first = self._taken(node, 0) if node.operands else node.name
            if node.op in ALIASES:
                self.storage[node.name] = first
            else:
                self.storage[node.name] = node.name
                self.size[node.name] = self._local(node, strategy.result)
            if not node.differentiable:
                continue
            kept: dict[str, int] = {}
            for role in node.saved:
                if role == "result":
                    kept[self.storage[node.name]] = self._local(node, strategy.result)
                    continue
                index = node.roles.index(role)
                name = self._taken(node, index)
                if self.size.get(name, 0):
                    if name in kept:  # another part of the same storage
                        name = f"{role} of {node.name}"
                    kept[name] = self._local(
                        by_name[node.operands[index]], strategy.operands[index]
                    )
            if node.saved_extra_bytes:
                kept[f"statistics of {node.name}"] = int(node.saved_extra_bytes * strategy.work)
            for name, num_bytes in kept.items():
                if name in self.gathered:
                    if self._is_dropped(name, dropped):
                        continue
                elif name in self.saved or self.size.get(name, num_bytes) != num_bytes:
                    # A node lists only what nothing before it kept: this view was a copy.
                    name = f"{name} copied for {node.name}"
                self.size[name] = num_bytes
                self.saved[name] = self.size[name]
                self.savers[name] = self.savers.get(name, 0) + 1
                self.saves.setdefault(node.name, []).append(name)

    def _is_dropped(self, name: str, dropped: set[tuple[str, int]]) -> bool:
        return any(self.copy.get(key) == name for key in dropped)

    def _taken(self, node: Node, index: int) -> str:
        return self.copy.get((node.name, index)) or self.storage[node.operands[index]]

    def _walk(self) -> int:
        program, by_name = self.program, self.graph.by_name
        last: dict[str, str] = {}
        for node in self.graph.nodes:
            for index in range(len(node.operands)):
                last[self._taken(node, index)] = node.name
                last[self.storage[node.operands[index]]] = node.name
        ends: dict[str, list[str]] = {}
        for storage, name in last.items():
            ends.setdefault(name, []).append(storage)
        live: dict[str, int] = {}
        total = peak = 0
        # Forward: results live until their last use, moved operands too; what is kept stays.
        for node in self.graph.nodes:
            if node.is_leaf:
                continue
            fresh = [
                self.copy[node.name, i]
                for i in range(len(node.operands))
                if (node.name, i) in self.copy
            ]
            fresh.append(self.storage[node.name])
            fresh += self.saves.get(node.name, ())
            for storage in fresh:
                if storage not in live and self.size.get(storage, 0):
                    live[storage] = self.size[storage]
                    total += self.size[storage]
            peak = max(peak, total)
            done = ends.get(node.name, [])
            if self.storage[node.name] not in last:
                done = [*done, self.storage[node.name]]
            for storage in done:
                if storage in live and storage not in self.saved:
                    total -= live.pop(storage)
        # Backward: gradients live from their first summand to their own operator's backward.
        total = sum(self.saved.values())
        peak = max(peak, total)
        waiting = dict(self.savers)
        gradients: dict[str, int] = {}
        loss = by_name[self.graph.loss]
        gradients[loss.name] = self._gradient_bytes(loss, program.strategies[loss.name].result)
        total += gradients[loss.name]
        for node in reversed(self.graph.nodes):
            if not node.differentiable or node.is_leaf:
                continue
            moment = total
            for edge in program.regathered.get(node.name, ()):
                moment += self._local(by_name[edge.producer], edge.taken)
            for index, operand in enumerate(node.operands):
                edge = program.edges[node.name, index]
                if not edge.differentiable:
                    continue
                producer = by_name[operand]
                taken = self._gradient_bytes(producer, edge.taken)
                moved = bool(edge.reshard.backward)
                if node.op not in ALIASES or moved:
                    moment += taken
                if producer.op == "parameter":
                    continue
                given = self._gradient_bytes(producer, edge.produced) if moved else taken
                if moved:
                    moment += given
                if operand not in gradients:
                    gradients[operand] = given
                    total += given
            peak = max(peak, moment)
            total -= gradients.pop(node.name, 0)
            for storage in self.saves.get(node.name, ()):
                waiting[storage] -= 1
                if not waiting[storage]:
                    total -= self.saved[storage]
        return peak

    def _gradient_bytes(self, node: Node, layout: Layout) -> int:
        return self.model.local_bytes(node, gradient_half(layout))
