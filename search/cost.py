"""What each choice costs: seconds and bytes of one operator, as values and as tables.

Seconds of a step, as the exact search sums them::

    sum over operators   roofline(local work, local bytes) forward and backward + own messages
    sum over edges       cheapest steps forward + cheapest steps of the gradient back
    sum over parameters  update by the optimizer

Bytes of a device: parameters, optimizer state, and what is kept for backward: what there is at the
turn from forward to backward, so never more than the fullest moment of the step
(``autoshard.search.walk``). Gradients come as what is kept goes. The
gradient of a replicated parameter travels in a bucket: it pays its share of a full bucket's
message, and of that the share ``exposed`` that compute does not hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.candidates import Candidates, Rules
from autoshard.cluster import Cluster, Device
from autoshard.graph import ModelGraph, Node
from autoshard.kernels import Products, Style
from autoshard.measured import BIAS, CUT
from autoshard.plan import Schedule
from autoshard.program import ALIASES, DEFAULT_BUCKET_BYTES, Program, internal_elements
from autoshard.search.fewer_bits import in_fewer_bits, kept_shares
from autoshard.search.kept import base, listed
from autoshard.search.memory import Optimizer, optimizer_of
from autoshard.search.paths import Floats, Halves, Ints, PairPrices
from autoshard.search.roofline import (
    Phase,
    adds_biases,
    pass_seconds,
    replayed_launch_s,
    update_seconds,
    waiting,
)
from autoshard.search.work import PRODUCTS, Pass, joined_bytes, passes
from autoshard.search.working import LOSS, Site, kept_by_product, working
from autoshard.sharding.layout import (
    Cut,
    Layout,
    R,
    Shape,
    forward_half,
    gradient_half,
    largest_shape,
)
from autoshard.sharding.reshard import Resharder
from autoshard.sharding.strategy import Strategy

VIEWS = frozenset(
    {
        "autoshard.identity",
        "aten.reshape",
        "aten.permute",
        "aten.transpose",
        "aten.expand",
        "aten.select",
        "aten.slice",
        "aten.unsqueeze",
        "aten.squeeze",
        "aten.alias",
        "aten.detach",
    }
)
"""Operator families that only look at their operand anew: no kernel, no bytes."""


@dataclass(frozen=True, slots=True)
class Work:
    """A pass of one operator, with what its seconds depend on beside the device.

    Attributes:
        work: the pass.
        phase: forward or backward.
        family: of the operator, for the factor of its memory-bound work.
        dtype: of the operator's result.
        itemsize: bytes of an element of it.
        is_scores: whether it makes attention scores, whose kernels are the same in every style.
        products: what products run in: the operator's own dtype, or one of fewer bits.
    """

    work: Pass
    phase: Phase
    family: str
    dtype: str
    itemsize: int
    is_scores: bool = False
    products: Products = "native"


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Seconds of one operator on the slowest device, messages apart.

    Attributes:
        forward_s: computing.
        backward_s: computing.
        internal_forward_s: messages.
        internal_backward_s: messages.
        beside_s: of the messages, those that run beside computing: (forward, backward).
    """

    forward_s: float
    backward_s: float
    internal_forward_s: float
    internal_backward_s: float
    beside_s: tuple[float, float] = (0.0, 0.0)


class CostModel:
    """Costs of operators and values on one mesh.

    Args:
        graph: what is computed.
        cluster: what it runs on.
        sizes: sizes of the mesh's axes, each at least 2.
        rules: the graph's rules.
        optimizer: what keeps state for each parameter.
        resharder: finds the steps of edges.
        style: how operators between products are run; fused inference is one CUDA graph.
        beside: axes whose messages run beside computing, in tables of the search.
        products: what products of weights of blocks run in, see ``Schedule.products``.
    """

    def __init__(
        self,
        graph: ModelGraph,
        cluster: Cluster,
        sizes: Shape,
        rules: Rules,
        optimizer: Optimizer,
        resharder: Resharder | None = None,
        style: Style = "eager",
        beside: frozenset[int] = frozenset(),
        products: Products = "native",
    ) -> None:
        self.graph, self.cluster, self.sizes, self.beside = graph, cluster, sizes, beside
        self.rules, self.optimizer, self.style = rules, optimizer, style
        self.products = products
        self.low = in_fewer_bits(graph, products)
        self._shares = kept_shares(graph, products)
        self.prices = cluster.collective_seconds(sizes)
        self.resharder = resharder or Resharder(sizes, self.prices)
        self.waiting = waiting(cluster)
        self.traffic = cluster.device.kernels.traffic(style)
        self.is_replayed = style == "fused" and graph.mode != "train"
        self._known: dict[Work, float] = {}
        self.done: dict[object, tuple[tuple[Work, ...], object, object]] = {}
        """What operators do, as steps that share this model found it."""
        self._around: dict[str, object] = {}
        self._bytes: dict[tuple[Shape, int, Layout], int] = {}
        self._shapes: dict[tuple[Shape, Layout], Shape] = {}

    @classmethod
    def of(
        cls, program: Program, cluster: Cluster, optimizer: str, schedule: Schedule
    ) -> CostModel:
        """The costs of a finished program, run as ``schedule`` says; ``optimizer`` by name."""
        return cls(
            program.graph,
            cluster,
            program.sizes,
            program.rules,
            optimizer_of(optimizer),
            program.resharder,
            schedule.style,
            products=schedule.products,
        )

    def on(self, device: Device) -> CostModel:
        """The same costs with another device on the same links."""
        out = copy(self)
        out.cluster = replace(self.cluster, device=device)
        out.traffic = device.kernels.traffic(self.style)
        out._known, out.done = {}, {}
        return out

    def local_bytes(self, node: Node, layout: Layout) -> int:
        """Bytes of the largest shard of a node's result in ``layout``."""
        key = (node.shape, node.itemsize, layout)
        found = self._bytes.get(key)
        if found is None:
            found = node.itemsize
            for size in largest_shape(node.shape, layout, self.sizes):
                found *= size
            self._bytes[key] = found
        return found

    def operator(self, node: Node, strategy: Strategy) -> OperatorCost:
        """Seconds of an operator (not a leaf)."""
        inner, beside = [0.0, 0.0], [0.0, 0.0]
        rule = self.rules[node.name]
        origin = (0,) * len(self.sizes)
        for internal in rule.internal:
            axes = tuple(a for a, c in enumerate(strategy.choices) if c.factor in internal.when)
            if not axes or (internal.phase == "backward" and not node.differentiable):
                continue
            count = internal_elements(rule.sizes, internal, strategy, self.sizes, origin)
            seconds = self.prices(internal.op, axes, count * internal.itemsize)
            inner[internal.phase == "backward"] += seconds
            if self.beside.issuperset(axes):
                beside[internal.phase == "backward"] += seconds
        forward, backward = self.works(node, strategy)
        return OperatorCost(
            forward_s=self.seconds(forward),
            backward_s=self.seconds(backward),
            internal_forward_s=inner[0],
            internal_backward_s=inner[1],
            beside_s=(beside[0], beside[1]),
        )

    def works(
        self, node: Node, strategy: Strategy, wants: tuple[bool, ...] | None = None
    ) -> tuple[Work, Work]:
        """What an operator (not a leaf) does on one device, forward and backward.

        ``wants``: operands whose gradients its backward makes; None: all that have one.
        """
        if node.family in VIEWS:
            joined = joined_bytes(
                node, self.local_shape(node, strategy.result), self._gradients(node)
            )
            back = Pass(num_bytes=joined, launches=bool(joined))
            return (
                Work(Pass(), "forward", node.family, node.dtype, node.itemsize),
                Work(back, "forward", "aten.add", node.dtype, node.itemsize),
            )
        by_name = self.graph.by_name
        operands = [by_name[name] for name in node.operands]
        if wants is None:
            wants = tuple(node.differentiable and o.differentiable for o in operands)
        bias = self._is_bias(node, operands)
        free = bias and not adds_biases(self.cluster)
        forward, backward = passes(
            node,
            tuple(
                self.local_shape(o, layout)
                for o, layout in zip(operands, strategy.operands, strict=True)
            ),
            tuple(o.itemsize for o in operands),
            self.local_shape(node, strategy.result),
            wants,
            strategy.work,
            bias=free,
        )
        scores = len(node.shape) > 3 and node.shape[-1] == node.shape[-2]
        family = BIAS if bias else node.family + CUT * self.is_parted(node, strategy)
        products = self.products if node.name in self.low else "native"
        return (
            Work(forward, "forward", family, node.dtype, node.itemsize, scores, products),
            Work(backward, "backward", family, node.dtype, node.itemsize, scores, products),
        )

    def kept_share(self, name: str) -> float:
        """The share of a value's bytes that products which run in fewer bits keep of it."""
        return self._shares.get(base(self.graph, name), 1.0) if self._shares else 1.0

    def is_parted(self, node: Node, strategy: Strategy) -> bool:
        """Whether the operator has messages of its own in the middle."""
        return any(
            (internal.phase == "forward" or node.differentiable)
            and any(c.factor in internal.when for c in strategy.choices)
            for internal in self.rules[node.name].internal
        )

    def surroundings(self, node: Node) -> object:
        """What a node's seconds depend on beside itself: equal for nodes that cost the same."""
        if node.name not in self._around:
            self._around[node.name] = self._surroundings(node)
        return self._around[node.name]

    def _surroundings(self, node: Node) -> object:
        operands = [self.graph.by_name[o] for o in node.operands]
        wants = tuple(o.differentiable for o in operands)
        around = self._gradients(node), wants, self._is_bias(node, operands)
        if not self.low:
            return around
        return *around, node.name in self.low, tuple(map(self.kept_share, listed(node)))

    def _gradients(self, node: Node) -> int:
        """How many uses of a value send a gradient back."""
        if not node.differentiable:
            return 0
        by_name = self.graph.by_name
        return sum(by_name[u].differentiable for u, _ in self.graph.uses[node.name])

    @staticmethod
    def _is_bias(node: Node, operands: list[Node]) -> bool:
        return (
            node.family == "aten.add"
            and len(operands) == 2
            and operands[1].op == "parameter"
            and operands[0].family in PRODUCTS
        )

    def seconds(self, done: Work) -> float:
        """Seconds of a pass on this cluster's device."""
        found = self._known.get(done)
        if found is None:
            kernels = self.cluster.device.kernels
            found = self._known[done] = self.waiting * pass_seconds(
                self.cluster,
                done.work,
                done.phase,
                family=done.family,
                dtype=done.dtype,
                itemsize=done.itemsize,
                traffic=kernels.scores if done.is_scores else self.traffic,
                products=done.products,
                attention=kernels.attention_gain(self.style),
                launch_s=replayed_launch_s(self.cluster.device) if self.is_replayed else None,
                splits=self.graph.mode != "train",
            )
        return found

    def local_shape(self, node: Node, layout: Layout) -> Shape:
        """Largest shard of a node's result in ``layout``."""
        key = (node.shape, layout)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = tuple(largest_shape(node.shape, layout, self.sizes))
        return found

    def update_seconds(self, node: Node, layout: Layout) -> float:
        """Seconds of the optimizer's update of a parameter stored in ``layout``."""
        if node.op != "parameter" or not node.differentiable:
            return 0.0
        elements = self.local_bytes(node, layout) // node.itemsize
        traffic = self.optimizer.traffic_bytes(elements, node.dtype, node.itemsize)
        return self.waiting * update_seconds(self.cluster, traffic)

    def stored_bytes(self, node: Node, layout: Layout) -> tuple[int, int, int]:
        """(itself, gradient, optimizer state) of a leaf stored in ``layout``."""
        itself = self.local_bytes(node, layout)
        if node.op != "parameter" or not node.differentiable:
            return itself, 0, 0
        elements = itself // node.itemsize
        return itself, itself, self.optimizer.state_bytes(elements, node.dtype, node.itemsize)


def weight_values(graph: ModelGraph) -> frozenset[str]:
    """Parameters, and what only views them.

    What is kept of these for backward costs nothing unless it was gathered.
    """
    out: set[str] = set()
    for node in graph.nodes:
        if node.op == "parameter" or (node.op in ALIASES and node.operands[0] in out):
            out.add(node.name)
    return frozenset(out)


def keepers(graph: ModelGraph, weights: frozenset[str]) -> dict[tuple[str, int], int]:
    """Of each use of a weight: how many operators keep it for backward, itself or behind views."""
    kept: dict[object, set[str]] = {}

    def call(node: Node) -> object:
        grads = tuple(graph.by_name[o].differentiable for o in node.operands)
        return node.op, node.roles, tuple(sorted(node.attrs.items())), grads

    for node in graph.nodes:
        if node.differentiable and not node.is_leaf:
            kept.setdefault(call(node), set()).update(node.saved)
    out: dict[tuple[str, int], int] = {}
    for node in reversed(graph.nodes):
        for index, operand in enumerate(node.operands):
            if operand not in weights:
                continue
            if node.op in ALIASES:
                out[node.name, index] = sum(out.get(u, 0) for u in graph.uses[node.name])
            else:
                out[node.name, index] = int(
                    node.differentiable and node.roles[index] in kept[call(node)]
                )
    return out


REPEAT = "autoshard.repeat_kv"
"""Each head of keys or values, as often as there are heads of queries for it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Uses of activations that are kept for backward: (operator, index of an operand).

    A node does not list what an operator before it kept already.

    Attributes:
        listed: by an operator that lists it, or by one that takes it through views.
        unlisted: by a product that does not list it. Where it is moved for this use, itself or
            through views, it is a copy of its own.
    """

    listed: frozenset[tuple[str, int]]
    unlisted: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, graph: ModelGraph, weights: frozenset[str]) -> Kept:
        """Of all uses in a graph."""
        listed: set[tuple[str, int]] = set()
        unlisted: set[tuple[str, int]] = set()
        for node in reversed(graph.nodes):
            if not node.differentiable or node.is_leaf:
                continue
            saved = frozenset(node.saved)
            grads = [graph.by_name[o].differentiable for o in node.operands]
            others = kept_by_product(node, grads) - saved
            if node.op in ALIASES:
                uses = graph.uses[node.name]
                if any(use in listed for use in uses):
                    saved = frozenset(node.roles)
                elif any(use in unlisted for use in uses):
                    others = frozenset(node.roles)
            for index, (role, operand) in enumerate(zip(node.roles, node.operands, strict=True)):
                if operand in weights or graph.by_name[operand].is_leaf:
                    continue
                if role in saved:
                    listed.add((node.name, index))
                elif role in others:
                    unlisted.add((node.name, index))
        return cls(frozenset(listed), frozenset(unlisted))


def kept_bytes(model: CostModel, node: Node, strategy: Strategy, weights: frozenset[str]) -> float:
    """Bytes that an operator keeps for backward, gathered weights apart."""
    if not node.differentiable:
        return 0.0
    total = node.saved_extra_bytes * strategy.work
    for role in node.saved:
        if role == "result":
            total += model.kept_share(node.name) * model.local_bytes(node, strategy.result)
        else:
            index = node.roles.index(role)
            producer = model.graph.by_name[node.operands[index]]
            if producer.name not in weights and not producer.is_leaf:
                total += stored_bytes(model, producer, strategy.operands[index])
    return total


def temporary_bytes(model: CostModel, node: Node, strategy: Strategy) -> float:
    """Bytes that an operator which comes last takes for a while, beside all that is kept."""
    operands = [model.graph.by_name[o] for o in node.operands]
    first = strategy.operands[0]
    found = working(
        Site(
            node=node,
            operands=tuple(
                model.local_shape(o, forward_half(layout))
                for o, layout in zip(operands, strategy.operands, strict=True)
            ),
            strides=(),
            item=operands[0].itemsize,
            result=model.local_shape(node, forward_half(strategy.result)),
            cut=frozenset(s.dim for s in first if isinstance(s, Cut)),
            work=strategy.work,
            is_cpu=model.cluster.device.kind == "cpu",
        )
    )
    gradient = model.local_bytes(operands[0], first) if operands[0].differentiable else 0
    return max(0.0, found.forward_bytes - found.kept_bytes, found.backward_bytes + gradient)


def stored_bytes(model: CostModel, value: Node, layout: Layout) -> float:
    """Bytes of memory behind a device's part of a value, as it is kept for backward."""
    again = seen_again(model, value, forward_half(layout))
    return model.kept_share(value.name) * model.local_bytes(value, layout) / again


def seen_again(model: CostModel, value: Node, half: Layout) -> int:
    """How often a device's part of a value shows the same memory: one head for many queries."""
    start = repeated(model.graph, value)
    if start is None:
        return 1
    heads = model.local_shape(value, half)[1]
    return heads if heads <= int(str(start.attrs["n"])) else 1


def repeated(graph: ModelGraph, value: Node) -> Node | None:
    """What repeats the heads of a value, itself or as it is looked at anew."""
    start = graph.by_name[base(graph, value.name)]
    return start if start.family == REPEAT and start.shape[:2] == value.shape[:2] else None


@dataclass(slots=True)
class EdgeTable:
    """Costs of an edge, by strategy of producer (rows) and consumer (columns).

    Attributes:
        seconds: forward and backward steps, deferred gradients apart.
        deferred: seconds of gradients that wait for a bucket; None where there are none.
        floor: the least that they can take: their share of the largest bucket.
        gathered: bytes of a gathered weight that is kept for backward; None where there are none.
        again: seconds of gathering it again instead.
        forward: the part of ``seconds`` that is spent in forward; None: all of it.
        kept: bytes that are kept for backward because of how the operand comes, beside those of the
            node's own part; None where there are none.
        beside: the parts of forward, of backward and of ``again`` that run beside computing; None
            where nothing does.
    """

    seconds: Floats
    deferred: Floats | None = None
    floor: Floats | None = None
    gathered: Floats | None = None
    again: Floats | None = None
    forward: Floats | None = None
    kept: Floats | None = None
    beside: tuple[Floats, Floats, Floats] | None = None

    def value(self, exposed: float, per_byte: float, *, floor: bool = False) -> Floats:
        """The table at one price of exposed gradients and of memory."""
        out = self.seconds
        late = self.floor if floor else self.deferred
        if late is not None and exposed:
            out = out + exposed * late
        if self.gathered is not None and per_byte and self.again is not None:
            out = out + np.minimum(per_byte * self.gathered, self.again)
        if self.kept is not None and per_byte:
            out = out + per_byte * self.kept
        return out


@dataclass(slots=True)
class UnaryTable:
    """Costs of a node by strategy.

    Attributes:
        seconds: all of it.
        backward: the part that a message may hide behind: computing in backward.
        num_bytes: what stays on the device.
        forward: the part of ``seconds`` that is spent in forward.
        forward_compute: the part of that which is computing.
        temporary: bytes that there are for a while beside all that is kept; None where others, of
            other nodes, may be gone by then.
        beside: messages of forward and of backward that run beside computing; None where none do.
    """

    seconds: Floats
    backward: Floats
    num_bytes: Floats
    forward: Floats
    forward_compute: Floats
    temporary: Floats | None = None
    beside: tuple[Floats, Floats] | None = None

    def value(self, exposed: float, per_byte: float) -> Floats:
        """The table at one price of exposed gradients and of memory."""
        out = self.seconds - exposed * self.backward if exposed else self.seconds
        return out + per_byte * self.num_bytes if per_byte else out


@dataclass(slots=True)
class _Columns:
    """The halves that a strategy list gives a tensor: distinct numbers, and which row has which."""

    forward: Ints
    gradient: Ints
    forward_row: Ints
    gradient_row: Ints


@dataclass(slots=True, kw_only=True)
class Tables:
    """The whole additive problem of one graph on one mesh.

    Attributes:
        variables: nodes that choose, in graph order; constants do not.
        lists: strategies of each variable.
        unary: which of ``unary_tables`` each variable has.
        edges: (producer, consumer, operand index, which of ``edge_tables``), by variable number.
    """

    variables: tuple[str, ...]
    lists: tuple[list[Strategy], ...]
    unary: tuple[int, ...]
    unary_tables: tuple[UnaryTable, ...]
    edges: tuple[tuple[int, int, int, int], ...]
    edge_tables: tuple[EdgeTable, ...]
    place: Mapping[str, int] = field(default_factory=dict)


def build_tables(
    model: CostModel, candidates: Candidates, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Tables:
    """Tables of every node and edge; equal ones are built once and shared."""
    return _Builder(model, candidates, bucket_bytes).build()


class _Builder:
    def __init__(self, model: CostModel, candidates: Candidates, bucket_bytes: int) -> None:
        self.model, self.candidates, self.bucket_bytes = model, candidates, bucket_bytes
        self.graph = model.graph
        self.weights = weight_values(self.graph)
        self.keeps = keepers(self.graph, self.weights)
        self.kept = Kept.of(self.graph, self.weights)
        self.halves = Halves(model.resharder)
        self._columns: dict[tuple[int, int], _Columns] = {}
        self._pairs: dict[Layout, tuple[int, int]] = {}

    def build(self) -> Tables:
        names = tuple(n.name for n in self.graph.nodes if n.op != "constant")
        place = {name: i for i, name in enumerate(names)}
        unary_of: dict[object, int] = {}
        unary_tables: list[UnaryTable] = []
        unary: list[int] = []
        edge_of: dict[object, int] = {}
        jobs: list[tuple[Node, Node, int]] = []
        edges: list[tuple[int, int, int, int]] = []
        for name in names:
            node = self.graph.by_name[name]
            key = self._unary_key(node)
            if key not in unary_of:
                unary_of[key] = len(unary_tables)
                unary_tables.append(self._unary(node))
            unary.append(unary_of[key])
            for index, operand in enumerate(node.operands):
                if operand not in place:
                    continue
                producer = self.graph.by_name[operand]
                edge_key = self._edge_key(producer, node, index)
                if edge_key not in edge_of:
                    edge_of[edge_key] = len(jobs)
                    jobs.append((producer, node, index))
                edges.append((place[operand], place[name], index, edge_of[edge_key]))
        return Tables(
            variables=names,
            lists=tuple(self.candidates[n] for n in names),
            unary=tuple(unary),
            unary_tables=tuple(unary_tables),
            edges=tuple(edges),
            edge_tables=tuple(self._edges(jobs)),
            place=place,
        )

    def _unary_key(self, node: Node) -> object:
        return (
            id(self.candidates[node.name]),
            self.candidates.proposals.class_of(node.name),
            node.differentiable,
            node.flops_backward,
            node.saved,
            node.name == self.graph.loss,
            self.model.surroundings(node),
        )

    def _unary(self, node: Node) -> UnaryTable:
        rows = self.candidates[node.name]
        seconds, num_bytes = np.zeros(len(rows)), np.zeros(len(rows))
        backward = np.zeros(len(rows))
        forward, forward_compute = np.zeros(len(rows)), np.zeros(len(rows))
        beside = np.zeros((2, len(rows)))
        for i, strategy in enumerate(rows):
            if node.is_leaf:
                seconds[i] = self.model.update_seconds(node, strategy.result)
                itself, _, state = self.model.stored_bytes(node, strategy.result)
                num_bytes[i] = itself + state
                continue
            cost = self.model.operator(node, strategy)
            seconds[i] = (
                cost.forward_s
                + cost.backward_s
                + cost.internal_forward_s
                + cost.internal_backward_s
            )
            backward[i] = cost.backward_s
            forward[i] = cost.forward_s + cost.internal_forward_s
            forward_compute[i] = cost.forward_s
            beside[:, i] = cost.beside_s
            num_bytes[i] = kept_bytes(self.model, node, strategy, self.weights)
            if node.name == self.graph.loss and self.graph.mode == "train":
                reshard = self.model.resharder.edge(
                    node.shape,
                    node.itemsize,
                    strategy.result,
                    (R,) * len(self.model.sizes),
                    node.differentiable,
                )
                seconds[i] += reshard.forward_s + reshard.backward_s
                forward[i] += reshard.forward_s
                # Counted beside computing whatever its axes: a bound, and next to nothing.
                beside[:, i] += (reshard.forward_s, reshard.backward_s)
        temporary = None
        if node.family == LOSS and node.differentiable:
            temporary = np.array([temporary_bytes(self.model, node, s) for s in rows])
        return UnaryTable(
            seconds,
            backward,
            num_bytes,
            forward,
            forward_compute,
            temporary,
            (beside[0], beside[1]) if self.model.beside else None,
        )

    def _edge_key(self, producer: Node, consumer: Node, index: int) -> object:
        return (
            id(self.candidates[producer.name]),
            id(self.candidates[consumer.name]),
            index,
            producer.shape,
            producer.itemsize,
            producer.differentiable and consumer.differentiable,
            producer.op == "parameter",
            self.keeps.get((consumer.name, index)),
            (consumer.name, index) in self.kept.listed,
            (consumer.name, index) in self.kept.unlisted,
            not consumer.is_leaf and index in self.model.rules[consumer.name].mutates,
            self.model.kept_share(producer.name),
        )

    def _half_numbers(self, layout: Layout) -> tuple[int, int]:
        found = self._pairs.get(layout)
        if found is None:
            number = self.halves.number
            found = number(forward_half(layout)), number(gradient_half(layout))
            self._pairs[layout] = found
        return found

    def _column(self, rows: list[Strategy], index: int) -> _Columns:
        """Halves of the result (index -1) or of an operand over a strategy list."""
        key = (id(rows), index)
        if key not in self._columns:
            pairs = [self._half_numbers(s.result if index < 0 else s.operands[index]) for s in rows]
            forward, forward_row = _numbered([there for there, _ in pairs])
            gradient, gradient_row = _numbered([back for _, back in pairs])
            self._columns[key] = _Columns(forward, gradient, forward_row, gradient_row)
        return self._columns[key]

    def _edges(self, jobs: list[tuple[Node, Node, int]]) -> list[EdgeTable]:
        sides = [
            (
                self._column(self.candidates[producer.name], -1),
                self._column(self.candidates[consumer.name], index),
            )
            for producer, consumer, index in jobs
        ]
        if not jobs:
            return []
        prices = PairPrices(self.halves, self.model.beside)
        tickets: list[tuple[int, int | None]] = []
        for (producer, consumer, _), (given, taken) in zip(jobs, sides, strict=True):
            shape, size = producer.shape, producer.itemsize
            there = prices.want(shape, size, given.forward, taken.forward)
            back = None
            if producer.differentiable and consumer.differentiable:
                back = prices.want(shape, size, taken.gradient, given.gradient)
            tickets.append((there, back))
        prices.price()
        return [
            self._edge(*job, *side, prices, *ticket)
            for job, side, ticket in zip(jobs, sides, tickets, strict=True)
        ]

    def _edge(
        self,
        producer: Node,
        consumer: Node,
        index: int,
        given: _Columns,
        taken: _Columns,
        prices: PairPrices,
        there: int,
        back: int | None,
    ) -> EdgeTable:
        rows, columns = given.forward_row, taken.forward_row
        to = prices.table(there)
        forward = to[rows[:, None], columns[None, :]]
        if index in self.model.rules[consumer.name].mutates:
            same = given.forward[:, None] == taken.forward[None, :]
            return EdgeTable(np.where(same[rows[:, None], columns[None, :]], 0.0, np.inf))
        table = EdgeTable(forward)
        if back is not None:
            of = taken.gradient_row[None, :], given.gradient_row[:, None]
            gradient = prices.table(back)[of]
            if producer.op == "parameter":
                gradient = self._defer(producer, given, taken, gradient, table)
            table.seconds, table.forward = forward + gradient, forward
        held = self._kept(producer, (consumer.name, index), given, taken, to)
        if held is not None:
            table.kept = held[rows[:, None], columns[None, :]]
        if times := self.keeps.get((consumer.name, index)):
            must = self.halves.gathers(given.forward, taken.forward)
            if must.any():
                self._gathered(producer, taken, must[rows[:, None], columns[None, :]], table)
                table.again = np.where(must[rows[:, None], columns[None, :]], times * forward, 0.0)
        if self.model.beside:
            self._beside(given, taken, prices, there, back, table)
        return table

    def _beside(
        self,
        given: _Columns,
        taken: _Columns,
        prices: PairPrices,
        there: int,
        back: int | None,
        table: EdgeTable,
    ) -> None:
        """The parts of an edge's messages that run beside computing."""
        rows, columns = given.forward_row, taken.forward_row
        forward = prices.beside(there)[rows[:, None], columns[None, :]]
        backward, again = np.zeros_like(forward), np.zeros_like(forward)
        if back is not None:
            of = taken.gradient_row[None, :], given.gradient_row[:, None]
            backward = prices.beside(back)[of]
            if table.deferred is not None:
                backward = np.where(table.deferred > 0, 0.0, backward)
        if table.again is not None:
            # As often as all of it is gathered again.
            whole = table.seconds if table.forward is None else table.forward
            sent = (whole > 0) & np.isfinite(table.again)
            times = np.divide(table.again, whole, out=np.zeros_like(whole), where=sent)
            again = times * forward
        table.beside = forward, backward, again

    def _kept(
        self, value: Node, use: tuple[str, int], given: _Columns, taken: _Columns, to: Floats
    ) -> Floats | None:
        """What is kept beside the consumer's own part, by halves of producer and consumer."""
        share = self.model.kept_share(value.name)
        own = share * self._local_bytes(value, taken.forward)[None, :]
        if use in self.kept.unlisted:
            # What is sent is received into memory of its own.
            return np.where(to > 0, own, 0.0)
        if use not in self.kept.listed:
            return None
        if repeated(self.graph, value) is not None:
            layouts = [self.halves.layouts[h] for h in taken.forward.tolist()]
            again = np.array([seen_again(self.model, value, half) for half in layouts])
            return np.where(to > 0, own * (1 - 1 / again)[None, :], 0.0)
        # A slice is a view: it keeps all of what it is cut from.
        whole = share * self._local_bytes(value, given.forward)[:, None]
        return np.where((to == 0) & (whole > own), whole - own, 0.0)

    def _defer(
        self, node: Node, given: _Columns, taken: _Columns, gradient: Floats, table: EdgeTable
    ) -> Floats:
        """Seconds of the gradient, those that wait for a bucket taken out and put apart."""
        masks = self.halves.deferrable(taken.gradient, given.gradient)
        masks = masks[taken.gradient_row[None, :], given.gradient_row[:, None]]
        still = given.forward[:, None] == taken.forward[None, :]
        masks = np.where(still[given.forward_row[:, None], taken.forward_row[None, :]], masks, 0)
        if not masks.any():
            return gradient
        sizes = self._local_bytes(node, given.forward)[given.forward_row]
        table.deferred = np.zeros_like(gradient)
        table.floor = np.zeros_like(gradient)
        for mask in np.unique(masks[masks > 0]).tolist():
            axes = tuple(a for a in range(len(self.model.sizes)) if mask >> a & 1)
            full = self.model.prices("all_reduce", axes, self.bucket_bytes) / self.bucket_bytes
            seconds = np.array(
                [
                    self.model.prices("all_reduce", axes, int(n))
                    if n >= self.bucket_bytes
                    else full * n
                    for n in sizes
                ]
            )
            table.deferred = np.where(masks == mask, seconds[:, None], table.deferred)
            # A bucket holds less than a full one and the gradient that closed it; that is this one
            # where it is as large as a bucket. A larger message costs less a byte.
            slope = min(b for _, b in self.model.prices.lines("all_reduce", axes))
            least = np.array(
                [
                    self.model.prices("all_reduce", axes, int(n) + self.bucket_bytes)
                    * (n / (n + self.bucket_bytes))
                    if n >= self.bucket_bytes
                    else slope * n
                    for n in sizes
                ]
            )
            table.floor = np.where(masks == mask, least[:, None], table.floor)
        return np.where(masks > 0, 0.0, gradient)

    def _gathered(
        self, node: Node, taken: _Columns, must: NDArray[np.bool_], table: EdgeTable
    ) -> None:
        sizes = self._local_bytes(node, taken.forward)[taken.forward_row]
        table.gathered = np.where(must, sizes[None, :], 0.0)

    def _local_bytes(self, node: Node, halves: Ints) -> Ints:
        """Bytes of a device's part of a value in each of some halves."""
        sizes = [self.halves.local_bytes(node.shape, node.itemsize, h) for h in halves.tolist()]
        return np.array(sizes, np.int64)


def _numbered(values: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the values, each once and in order; which of them each is): of few, faster than numpy's."""
    found = sorted(set(values))
    place = {value: i for i, value in enumerate(found)}
    return np.array(found, np.int64), np.array([place[v] for v in values], np.int64)
