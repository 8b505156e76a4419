"""The exact figures of one program: step time by simulation, memory by a walk, its messages.

Two streams, computing and communicating. A message of an edge or of an operator blocks: computing
waits for it, and it waits for messages before it. Buckets of gradients do not block: they run
beside the rest of backward, and the optimizer waits for the last. Where the device was measured,
what runs beside a message is slowed by its ``contention``, and slows the message as much; fused
gradients are copied into their message and back. Everything is of the device at coordinate 0, which
holds the largest shards.

Memory is walked in ``autoshard.search.walk``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.graph import ModelGraph, Node
from autoshard.measured import Measured
from autoshard.plan import CollectiveGroup, Memory, StepTime
from autoshard.program import Edge, Program
from autoshard.search.cost import CostModel, OperatorCost
from autoshard.search.walk import MemoryWalk
from autoshard.sharding.collective import Collective, Phase

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
            memory=MemoryWalk(self.model, program).run(self.limit),
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
        self._computed_backward(node)
        self._sent(node, sent_after)
        for index in reversed(range(len(node.operands))):
            edge = program.edges[node.name, index]
            if edge.bucket is None:
                self._edge(edge, True, "backward")

    def _computed_backward(self, node: Node) -> None:
        """A node's own backward."""
        cost = self._operator(node)
        self._internal(node, "backward")
        self._work(node.name, "backward", cost.backward_s)

    def _sent(self, node: Node, sent_after: Mapping[str, Sequence[int]]) -> None:
        """What is sent once a node's own backward is done."""
        for index in sent_after.get(node.name, ()):
            message = self.program.bucket_collective(index, self.origin)
            self._copy(message, len(self.program.buckets[index].parameters))
            self._bucket(message)

    def _operator(self, node: Node) -> OperatorCost:
        strategy = self.program.strategies[node.name]
        key = self._kind(node)
        found = self._operators.get(key)
        if found is None:
            found = self._operators[key] = self.model.operator(node, strategy)
        return found

    def _kind(self, node: Node) -> object:
        """Equal for nodes that cost the same: they share their rule and their strategies."""
        strategy = self.program.strategies[node.name]
        return (
            id(self.program.rules[node.name]),
            id(strategy),
            node.flops_forward,
            node.flops_backward,
            node.dtype,
            node.differentiable,
            node.op,
            self.model.surroundings(node),
        )

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
