"""What one device executes for a planned graph: operators, edges, fused gradients, in order.

The search prices a :class:`Program`, the runtime lowers the very same one, and
:meth:`Program.collectives` lists what it issues, so the predicted and the issued list can be
compared item by item. The order of the backward half is the exact reverse of the forward half:
autograd runs the node that was made last first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from autoshard.candidates import Rules
from autoshard.graph import ModelGraph, Node
from autoshard.sharding.collective import Collective, Phase
from autoshard.sharding.layout import (
    Cut,
    Layout,
    R,
    Shape,
    chunk,
    local_shape,
)
from autoshard.sharding.reshard import Reshard, Resharder, Step, step_bytes
from autoshard.sharding.rule import Internal
from autoshard.sharding.strategy import Strategy

ALIASES = frozenset(
    {
        "autoshard.identity",
        "aten.reshape.default",
        "aten.permute.default",
        "aten.expand.default",
        "aten.select.int",
        "aten.slice.Tensor",
    }
)
"""Operators whose result may share its operand's storage."""

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""Size at which fused gradients are sent: torch's DistributedDataParallel uses 25 MiB."""


DATA_AXES = ("replica", "data", "expert", "context")
"""Axes whose devices may share the optimizer of a replicated parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One use of a value: how it gets from the layout it has to the layout it is taken in.

    Attributes:
        producer: node whose result is used.
        consumer: node that uses it; empty for the loss on its way to the caller.
        index: which operand of the consumer.
        produced: layout that the producer gives.
        taken: layout that the consumer takes.
        differentiable: whether a gradient flows back along it.
        reshard: the steps, both ways.
        constant: the producer is a constant, sliced once at lowering; nothing moves at run time.
        bucket: index of the fused message that its gradient travels in, or None.
        regather: whether the gathered value is dropped after use and gathered again in backward.
    """

    producer: str
    consumer: str
    index: int
    produced: Layout
    taken: Layout
    differentiable: bool
    reshard: Reshard
    constant: bool = False
    bucket: int | None = None
    regather: bool = False

    @property
    def backward_steps(self) -> tuple[Step, ...]:
        """Steps that the edge itself takes in backward; none where a bucket takes them."""
        return () if self.bucket is not None else self.reshard.backward


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of parameters that travel as one all_reduce.

    Attributes:
        axes: mesh axes (indices) that it is summed over.
        dtype: of the gradients.
        parameters: node names, in the order their gradients become ready.
        after: consumer whose backward completes the last of them.
    """

    axes: tuple[int, ...]
    dtype: str
    parameters: tuple[str, ...]
    after: str


class Program:
    """A graph with a strategy for every node, on a mesh: all edges, in order.

    Args:
        graph: what is computed.
        axis_names: names of the mesh's axes.
        sizes: their sizes; axes of size 1 never occur in a layout but may stand here.
        strategies: the chosen strategy of every node, over the same axes.
        resharder: finds the steps; the same prices give the same steps everywhere.
        regather: (consumer, operand index) of the edges whose gathered value is dropped.
        bucket_bytes: size at which fused gradients are sent, local bytes.
        rules: the graph's rules, if at hand.
    """

    def __init__(
        self,
        graph: ModelGraph,
        axis_names: tuple[str, ...],
        sizes: Shape,
        strategies: Mapping[str, Strategy],
        resharder: Resharder,
        *,
        regather: frozenset[tuple[str, int]] = frozenset(),
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        rules: Rules | None = None,
    ) -> None:
        self.graph, self.axis_names, self.sizes = graph, axis_names, sizes
        self.strategies, self.resharder = strategies, resharder
        self.regather, self.bucket_bytes = regather, bucket_bytes
        self.rules = rules or Rules(graph)
        plain = {
            (node.name, index): self._edge(node, index)
            for node in graph.nodes
            for index in range(len(node.operands))
        }
        self.buckets = self._fuse(plain)
        in_bucket = {name: i for i, b in enumerate(self.buckets) for name in b.parameters}
        self.edges: dict[tuple[str, int], Edge] = {
            key: _in_bucket(edge, in_bucket.get(edge.producer)) for key, edge in plain.items()
        }

    def regathering(self) -> Program:
        """The same program, each gathered parameter dropped after use and gathered again."""
        by_name = self.graph.by_name
        return Program(
            self.graph,
            self.axis_names,
            self.sizes,
            self.strategies,
            self.resharder,
            regather=frozenset(
                (node.name, index)
                for node in self.graph.nodes
                for index, operand in enumerate(node.operands)
                if by_name[operand].op == "parameter"
            ),
            bucket_bytes=self.bucket_bytes,
            rules=self.rules,
        )

    def _edge(self, node: Node, index: int) -> Edge:
        producer = self.graph.by_name[node.operands[index]]
        produced = self.strategies[producer.name].result
        taken = self.strategies[node.name].operands[index]
        differentiable = producer.differentiable and node.differentiable
        constant = producer.op == "constant"
        reshard = (
            Reshard((), (), 0.0, 0.0)
            if constant
            else self.resharder.edge(
                producer.shape,
                producer.itemsize,
                produced,
                taken,
                differentiable,
                deferrable=producer.op == "parameter",
            )
        )
        return Edge(
            producer=producer.name,
            consumer=node.name,
            index=index,
            produced=produced,
            taken=taken,
            differentiable=differentiable,
            reshard=reshard,
            constant=constant,
            regather=(node.name, index) in self.regather
            and any(s.kind == "all_gather" for s in reshard.forward)
            and not self._runs_whole(node),
        )

    def _runs_whole(self, node: Node) -> bool:
        """Whether an operator without a rule takes the value, straight or through a view.

        It may keep for backward what it likes, in any order, so nothing can be foretold of
        gathering again for it.
        """
        if node.op in ALIASES:
            return any(
                self._runs_whole(self.graph.by_name[u]) for u, _ in self.graph.uses[node.name]
            )
        return node.family in self.rules.without

    def _fuse(self, edges: Mapping[tuple[str, int], Edge]) -> tuple[Bucket, ...]:
        """Buckets in the order they are sent: that in which their last gradient is ready."""
        open_: dict[tuple[tuple[int, ...], str], list[str]] = {}
        filled: dict[tuple[tuple[int, ...], str], int] = {}
        closed: list[Bucket] = []
        last: dict[tuple[tuple[int, ...], str], str] = {}
        origin = (0,) * len(self.sizes)
        for node in reversed(self.graph.nodes):
            for index in range(len(node.operands)):
                edge = edges[node.name, index]
                parameter = self.graph.by_name[edge.producer]
                if not (parameter.op == "parameter" and is_deferred(edge.reshard)):
                    continue
                key = (edge.reshard.backward[0].axes, parameter.dtype)
                open_.setdefault(key, []).append(parameter.name)
                size = prod(local_shape(parameter.shape, edge.produced, self.sizes, origin))
                filled[key] = filled.get(key, 0) + size * parameter.itemsize
                last[key] = node.name
                if filled[key] >= self.bucket_bytes:
                    closed.append(Bucket(*key, tuple(open_.pop(key)), node.name))
                    del filled[key]
        closed += [Bucket(*key, tuple(names), last[key]) for key, names in open_.items()]
        place = {n.name: i for i, n in enumerate(self.graph.nodes)}
        order = sorted(range(len(closed)), key=lambda i: (-place[closed[i].after], i))
        return tuple(closed[i] for i in order)

    @cached_property
    def loss_edge(self) -> Edge:
        """How the loss reaches the caller: whole on every device, and so is its gradient.

        What inference gives stays where it is: replicas need not wait for each other.
        """
        loss = self.graph.by_name[self.graph.loss]
        produced = self.strategies[loss.name].result
        whole = (R,) * len(self.sizes) if self.graph.mode == "train" else produced
        return Edge(
            producer=loss.name,
            consumer="",
            index=0,
            produced=produced,
            taken=whole,
            differentiable=loss.differentiable,
            reshard=self.resharder.edge(
                loss.shape, loss.itemsize, produced, whole, loss.differentiable
            ),
        )

    # ---- what it issues ---------------------------------------------------------------------

    def collectives(self, coordinate: Sequence[int]) -> list[Collective]:
        """Every collective that the device at ``coordinate`` issues in one step, in order."""
        return [*self.forward_collectives(coordinate), *self.backward_collectives(coordinate)]

    def forward_collectives(self, coordinate: Sequence[int]) -> list[Collective]:
        """The forward half: edges left to right, then what the operator issues itself; the loss."""
        out: list[Collective] = []
        for node in self.graph.nodes:
            for index in range(len(node.operands)):
                edge = self.edges[node.name, index]
                out += self._steps(edge.producer, edge.reshard.forward, coordinate, "forward")
            out += self._internal(node, coordinate, "forward")
        loss = self.loss_edge
        return out + self._steps(loss.producer, loss.reshard.forward, coordinate, "forward")

    def backward_collectives(self, coordinate: Sequence[int]) -> list[Collective]:
        """The backward half: the reverse, with fused gradients where they are complete."""
        sent_after: dict[str, list[int]] = {}
        for index, bucket in enumerate(self.buckets):
            sent_after.setdefault(bucket.after, []).append(index)
        loss = self.loss_edge
        out = self._steps(loss.producer, loss.backward_steps, coordinate, "backward")
        for node in reversed(self.graph.nodes):
            if not node.differentiable or node.is_leaf:
                continue
            for edge in self.regathered.get(node.name, ()):
                out += self._steps(edge.producer, edge.reshard.forward, coordinate, "backward")
            out += self._internal(node, coordinate, "backward")
            out += [self.bucket_collective(i, coordinate) for i in sent_after.get(node.name, ())]
            for index in reversed(range(len(node.operands))):
                edge = self.edges[node.name, index]
                out += self._steps(edge.producer, edge.backward_steps, coordinate, "backward")
        return out

    @cached_property
    def regathered(self) -> dict[str, list[Edge]]:
        """Edges whose value is gathered again before an operator's backward, by operator.

        An operator gathers again what it kept for backward, also where the gathered value reached
        it through operators that only view it.
        """
        out: dict[str, list[Edge]] = {}
        for edge in self.edges.values():
            if edge.regather:
                for saver in self._savers(edge):
                    out.setdefault(saver, []).append(edge)
        return out

    def _savers(self, edge: Edge) -> list[str]:
        found: list[str] = []
        todo = [(edge.consumer, edge.index)]
        while todo:
            name, index = todo.pop()
            node = self.graph.by_name[name]
            if node.op in ALIASES:
                todo += [
                    use
                    for use in self.graph.uses[name]
                    if self.edges[use].reshard.is_nothing or not self.edges[use].reshard.forward
                ]
            elif node.differentiable and node.roles[index] in self.kept_roles(node):
                found.append(name)
        return found

    def kept_roles(self, node: Node) -> frozenset[str]:
        """Roles that autograd keeps for backward of a differentiable operator.

        A node does not list what an operator before it kept already, but all of a kind keep the
        same: where an operand is moved for each use, each use keeps its own copy.
        """
        return self._kept[node.name]

    def _call(self, node: Node) -> object:
        grads = tuple(self.graph.by_name[o].differentiable for o in node.operands)
        return node.op, node.roles, tuple(sorted(node.attrs.items())), grads

    @cached_property
    def _kept(self) -> dict[str, frozenset[str]]:
        """Roles that autograd keeps for backward, by operator.

        A node does not list what an operator before it kept already. Where a weight is used
        twice, each use gathers it anew and keeps its own, so all calls of a kind count.
        """
        operators = [n for n in self.graph.nodes if n.differentiable and not n.is_leaf]
        calls = {node.name: self._call(node) for node in operators}
        of_call: dict[object, frozenset[str]] = {}
        for node in operators:
            call = calls[node.name]
            of_call[call] = of_call.get(call, frozenset()) | frozenset(node.saved)
        return {name: of_call[call] for name, call in calls.items()}

    def bucket_collective(self, index: int, coordinate: Sequence[int]) -> Collective:
        """The fused message of one bucket."""
        bucket = self.buckets[index]
        total = 0
        for name in bucket.parameters:
            node = self.graph.by_name[name]
            shape = local_shape(node.shape, self.strategies[name].result, self.sizes, coordinate)
            total += prod(shape) * node.itemsize
        names = tuple(self.axis_names[a] for a in bucket.axes)
        return Collective("all_reduce", names, total, "backward", bucket.parameters[0])

    def _steps(
        self, value: str, steps: Sequence[Step], coordinate: Sequence[int], phase: Phase
    ) -> list[Collective]:
        node = self.graph.by_name[value]
        return [
            Collective(
                step.kind,  # type: ignore[arg-type]  # only messages reach this
                tuple(self.axis_names[a] for a in step.axes),
                step_bytes(step, node.shape, node.itemsize, self.sizes, coordinate),
                phase,
                value,
            )
            for step in steps
            if step.is_message
        ]

    def _internal(self, node: Node, coordinate: Sequence[int], phase: Phase) -> list[Collective]:
        if node.is_leaf:
            return []
        rule = self.rules[node.name]
        out: list[Collective] = []
        for internal in rule.internal:
            if internal.phase != phase:
                continue
            axes = self.internal_axes(node.name, internal)
            if axes:
                size = internal_elements(
                    rule.sizes, internal, self.strategies[node.name], self.sizes, coordinate
                )
                names = tuple(self.axis_names[a] for a in axes)
                out.append(
                    Collective(internal.op, names, size * internal.itemsize, phase, node.name)
                )
        return out

    def internal_axes(self, name: str, internal: Internal) -> tuple[int, ...]:
        """Axes whose cut makes an operator issue ``internal``."""
        return tuple(
            axis
            for axis, choice in enumerate(self.strategies[name].choices)
            if choice.factor in internal.when
        )


def shared_by(axis_names: Sequence[str], sizes: Shape, layout: Layout, shards: int) -> int:
    """Of ``shards`` devices that share an optimizer, how many share a parameter's work.

    Those along whose axes the parameter is cut have their own parts of it already.
    """
    for name, size, state in zip(axis_names, sizes, layout, strict=True):
        if name in DATA_AXES and isinstance(state, Cut):
            shards //= size
    return max(1, shards)


def internal_elements(
    sizes: Mapping[str, int],
    internal: Internal,
    strategy: Strategy,
    mesh: Shape,
    coordinate: Sequence[int],
) -> int:
    """Elements of an operator's own message on the device at ``coordinate``."""
    total = internal.count
    for factor in internal.elements:
        local = sizes[factor]
        for axis, choice in enumerate(strategy.choices):
            if choice.factor == factor:
                n = mesh[axis] if choice.n % mesh[axis] == 0 else choice.n
                start, stop = chunk(n, mesh[axis], coordinate[axis])
                local = local // n * (stop - start)
        total *= local
    return total


def is_deferred(reshard: Reshard) -> bool:
    """Whether a parameter's gradient may wait for others: one all_reduce back, nothing forth."""
    return (
        not reshard.forward
        and len(reshard.backward) == 1
        and reshard.backward[0].kind == "all_reduce"
    )


def _in_bucket(edge: Edge, bucket: int | None) -> Edge:
    if bucket is None or not is_deferred(edge.reshard):
        return edge
    return replace(edge, bucket=bucket)
