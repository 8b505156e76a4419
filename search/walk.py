"""Bytes of one step of one device: every storage from birth to death, and the fullest moment.

What is followed is what the bundled runtime and torch's autograd do. Forward: a value lives until
its last use, an operand that was moved until its operator is done, and what autograd keeps until
its operator's backward is done. Backward: a gradient lives until the operator that takes it is
done; a parameter's stays; fused gradients are copied into a message each and stay there until
backward ends. Views share storage, and what is a view follows from strides, as in torch. Last comes
the optimizer's update.

Births and deaths are written down, and the fullest moment is looked up afterwards: what a storage
was for is known only when forward (is it kept?) or backward (is it a gradient?) is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod

from autoshard.cluster import Cluster
from autoshard.cluster.crossing import spread
from autoshard.graph import ModelGraph, Node
from autoshard.plan import Memory, ReserveParts
from autoshard.program import Edge, Program
from autoshard.search.cost import CostModel, weight_values
from autoshard.search.strides import Strides, contiguous, is_contiguous, viewed
from autoshard.search.work import APPEND, ATTENTION
from autoshard.search.working import Site, Working, kept_by_product, working
from autoshard.sharding.layout import Cut, Layout, Shape, forward_half, gradient_half
from autoshard.sharding.reshard import Step, step_bytes

STORED = 0
"""The storage of everything that is there all the time."""

RESHAPES = frozenset(
    f"aten.{name}"
    for name in ("reshape", "view", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
)
PERMUTES = frozenset({"aten.permute", "aten.transpose", "aten.t"})
SAME = frozenset({"autoshard.identity", "aten.alias", "aten.detach", APPEND})
PARTS = frozenset({"aten.slice", "aten.select"})
SUMS = frozenset({"aten.add", "aten.sub"})
ELEMENTWISE = SUMS | {
    *("aten.mul", "aten.div", "aten.neg", "aten.pow"),
    *("aten.relu", "aten.gelu", "aten.silu", "aten.tanh", "aten.sigmoid"),
}
"""Operators whose result lies in memory as their operand does."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor: which storage it is in, and how it lies there."""

    storage: int
    shape: Shape
    strides: Strides


class MemoryWalk:
    """One step of a program, walked once.

    Attributes:
        moved: of each (operator, index of an operand) that was moved, the storage it came in.
        saves: by operator, the storages that autograd keeps for its backward, each once.
        sizes: bytes of each storage.
        kept: storages that are there when forward is over.
        gathered: storages of gathered parameters.
        given: by operator, the storage in which the gradient of its result came, and how often
            other gradients had been added to it in place by then.
        beyond_bytes: most that forward or backward holds beyond what is kept for backward and
            the gradients of parameters.
        turn_bytes: held when forward is over and backward begins, constants apart: what the tables
            of the search add up to.
    """

    def __init__(self, model: CostModel, program: Program) -> None:
        self.model, self.program = model, program
        self.graph: ModelGraph = program.graph
        self.weights = weight_values(self.graph)
        self.is_cpu = model.cluster.device.kind == "cpu"
        self.origin = (0,) * len(program.sizes)
        self.sizes = [0]
        self._holders = [1]
        self._log: list[tuple[int, int]] = []
        self._values: dict[str, Held] = {}
        self.moved: dict[tuple[str, int], int] = {}
        self._working: dict[str, Working] = {}
        self.saves: dict[str, list[int]] = {}
        self.gathered: set[int] = set()
        self.given: dict[str, tuple[int, int]] = {}
        self._added: Counter[int] = Counter()
        self._gradients: dict[str, int] = {}
        self._in_gradients: set[int] = set()
        self.kept: set[int] = set()
        self.beyond_bytes = self.turn_bytes = 0

    def run(self, limit: int | None) -> Memory:
        """Walk the step and find its fullest moment."""
        stored = [0, 0, 0]
        inputs = cached = 0
        for node in self.graph.nodes:
            if node.is_leaf and node.op != "constant":
                layout = self.program.strategies[node.name].result
                parts = self.model.stored_bytes(node, layout)
                if node.is_cache:
                    cached += parts[0]
                    continue
                if node.op == "input":
                    inputs += parts[0]
                    continue
                for i, num_bytes in enumerate(parts):
                    stored[i] += num_bytes
        self._forward()
        self.kept = {s for s, n in enumerate(self._holders) if n and s}
        turned = len(self._log)
        self._backward()
        ended = len(self._log)
        self._moment(self._update_bytes())
        at, extra = self._fullest(len(self._log))
        self.beyond_bytes = self._beyond(turned, ended)
        held = {"gradients": 0, "activations": 0, "gathered": 0, "temporary": extra}
        for storage, num_bytes in self._log[:at]:
            if storage >= 0:
                held[self._kind(storage)] += num_bytes
        beside = stored[0] + stored[2] + inputs + cached
        self.turn_bytes = beside + sum(self.sizes[s] for s in self.kept)
        return Memory(
            parameters_bytes=stored[0] + self._constant_bytes(),
            gradients_bytes=held["gradients"],
            optimizer_bytes=stored[2],
            activations_bytes=held["activations"] + inputs,
            kv_cache_bytes=cached,
            gathered_bytes=held["gathered"],
            temporary_bytes=held["temporary"],
            reserve_bytes=self.model.cluster.reserve_bytes,
            limit_bytes=limit,
            reserve=reserve_parts(self.model.cluster),
        )

    def storage_of(self, name: str) -> int:
        """The storage of an operator's result."""
        return self._values[name].storage

    def made_by(self, nodes: Iterable[Node]) -> dict[int, str]:
        """Of each storage that holds an operator's result: the first one, of ``nodes`` in order."""
        out: dict[int, str] = {}
        for node in nodes:
            out.setdefault(self.storage_of(node.name), node.name)
        return out

    # ---- storages ---------------------------------------------------------------------------

    def _new(self, num_bytes: int) -> int:
        self.sizes.append(num_bytes)
        self._holders.append(1)
        storage = len(self.sizes) - 1
        self._log.append((storage, num_bytes))
        return storage

    def _tensor(self, shape: Shape, itemsize: int) -> Held:
        return Held(self._new(prod(shape) * itemsize), shape, contiguous(shape))

    def _hold(self, storage: int) -> None:
        self._holders[storage] += 1

    def _drop(self, storage: int) -> None:
        if storage == STORED:
            return
        self._holders[storage] -= 1
        if not self._holders[storage]:
            self._log.append((storage, -self.sizes[storage]))

    def _moment(self, extra: int = 0) -> None:
        """Now there are ``extra`` bytes beside the storages."""
        self._log.append((-1, extra))

    def _kind(self, storage: int) -> str:
        if storage in self._in_gradients:
            return "gradients"
        if storage not in self.kept:
            return "temporary"
        return "gathered" if storage in self.gathered else "activations"

    def _fullest(self, until: int) -> tuple[int, int]:
        """Where in the log the sum is largest, and what was there beside storages."""
        now, most, found = 0, -1, (0, 0)
        for index, (storage, num_bytes) in enumerate(self._log[:until]):
            if storage >= 0:
                now += num_bytes
            extra = 0 if storage >= 0 else num_bytes
            if now + extra > most:
                most, found = now + extra, (index + 1, extra)
        return found

    def _beyond(self, turned: int, ended: int) -> int:
        kept = sum(self.sizes[s] for s in self.kept)
        now = most = 0
        for storage, num_bytes in self._log[:ended]:
            if storage < 0:
                most = max(most, now + num_bytes)
            elif storage not in self._in_gradients:
                now += num_bytes
                most = max(most, now)
        return max(0, most - kept)

    # ---- moving -----------------------------------------------------------------------------

    def _local(self, node: Node, layout: Layout) -> Shape:
        return self.model.local_shape(node, layout)

    def _move(self, value: Held, steps: Sequence[Step], node: Node) -> Held:
        """A value after some steps; the caller still holds what it gave, and holds the result."""
        self._hold(value.storage)
        for step in steps:
            after = self._step(value, step, node)
            self._drop(value.storage)
            value = after
        return value

    def _step(self, value: Held, step: Step, node: Node) -> Held:
        shape = self._local(node, step.after)
        item = node.itemsize
        match step.kind:
            case "mask":  # the first device keeps it
                self._hold(value.storage)
                return value
            case "slice":
                self._hold(value.storage)
                return Held(value.storage, shape, value.strides)
            case "all_reduce" | "embed":
                return self._tensor(shape, item)
        num_bytes = step_bytes(step, node.shape, item, self.program.sizes, self.origin)
        cut = step.before if step.kind == "all_gather" else step.after
        lies_first = all(self._leads(s, shape) for a, s in enumerate(cut) if a in step.axes)
        even = num_bytes == prod(shape) * item or step.kind != "all_gather"
        sent = None
        if step.kind == "all_gather":
            part = num_bytes // prod(self.program.sizes[a] for a in step.axes)
            if not is_contiguous(value.shape, value.strides) or part != prod(value.shape) * item:
                sent = self._new(part)
        elif not (lies_first and is_contiguous(value.shape, value.strides)):
            sent = self._new(num_bytes)
        received = self._new(prod(shape) * item if step.kind == "reduce_scatter" else num_bytes)
        if step.kind == "reduce_scatter" and self.is_cpu and not self._is_pair(step):
            # gloo reduces a copy of the whole, and gives each rank its part of that.
            self._drop(self._new(num_bytes))
        if sent is not None:
            self._drop(sent)
        if step.kind == "reduce_scatter" or (lies_first and even):
            return Held(received, shape, contiguous(shape))
        if even and len(step.axes) == 1:
            strides = self._joined(step, shape)
            if strides is not None:
                return Held(received, shape, strides)
        ordered = self._tensor(shape, item)
        self._drop(received)
        return ordered

    def _is_pair(self, step: Step) -> bool:
        """Whether two processes of one host exchange it (``autoshard.runtime.pairs``)."""
        per_node = self.model.cluster.devices_per_node
        members, _, nodes = spread(self.program.sizes, step.axes, per_node)
        return members == 2 and nodes == 1

    def _joined(self, step: Step, shape: Shape) -> Strides | None:
        """Strides of what came from the ranks of one axis, if it need not be put in order."""
        cut, parts = step.before[step.axes[0]], self.program.sizes[step.axes[0]]
        assert isinstance(cut, Cut)
        if cut.outer != 1 or shape[cut.dim] % parts:
            return None
        own = (*shape[: cut.dim], shape[cut.dim] // parts, *shape[cut.dim + 1 :])
        ranks, *rest = contiguous((parts, *own))
        split = (*own[: cut.dim], parts, *own[cut.dim :])
        return viewed(split, (*rest[: cut.dim], ranks, *rest[cut.dim :]), shape)

    @staticmethod
    def _leads(state: object, shape: Shape) -> bool:
        """Whether a cut dim has nothing before it, so that parts lie one after another."""
        return isinstance(state, Cut) and state.outer == 1 and prod(shape[: state.dim]) <= 1

    # ---- forward ----------------------------------------------------------------------------

    def _forward(self) -> None:
        program, graph = self.program, self.graph
        left = {
            n.name: sum(not program.edges[use].constant for use in graph.uses[n.name])
            for n in graph.nodes
        }
        outputs = [name for _, name in graph.outputs if graph.by_name[name].op != "constant"]
        for name in (*outputs, graph.loss):
            left[name] += 1
        for node in graph.nodes:
            if node.is_leaf:
                layout = forward_half(program.strategies[node.name].result)
                shape = self._local(node, layout)
                self._values[node.name] = Held(STORED, shape, contiguous(shape))
                continue
            self._node(node, left)
        loss = self._move(
            self._values[graph.loss], program.loss_edge.reshard.forward, graph.by_name[graph.loss]
        )
        for name in outputs:  # detached: they stay until the caller lets them go
            self._hold(self._values[name].storage)
        for name in (*outputs, graph.loss):
            self._used(name, left)
        self._hold(loss.storage)

    def _used(self, name: str, left: dict[str, int]) -> None:
        left[name] -= 1
        if not left[name]:
            self._drop(self._values[name].storage)

    def _node(self, node: Node, left: dict[str, int]) -> None:
        taken: list[Held] = []
        moved: list[int] = []
        unmoved: list[str] = []
        for index, operand in enumerate(node.operands):
            edge = self.program.edges[node.name, index]
            producer = self.graph.by_name[operand]
            if edge.constant:
                shape = self._local(producer, forward_half(edge.taken))
                taken.append(Held(STORED, shape, contiguous(shape)))
                continue
            value = self._values[operand]
            if edge.reshard.forward:
                value = self._move(value, edge.reshard.forward, producer)
                moved.append(value.storage)
                self.moved[node.name, index] = value.storage
                if (
                    value.storage != STORED
                    and operand in self.weights
                    and any(s.kind == "all_gather" for s in edge.reshard.forward)
                ):
                    self.gathered.add(value.storage)
                self._used(operand, left)
            else:
                unmoved.append(operand)
            taken.append(value)
        result = self._result(node, taken)
        found = self._working[node.name] = self._work(node, taken)
        self._values[node.name] = result
        if node.differentiable:
            self._save(node, taken, result, found)
        self._moment(found.forward_bytes)
        for storage in moved:
            self._drop(storage)
        for operand in unmoved:
            self._used(operand, left)
        if not left[node.name]:
            self._drop(result.storage)

    def _work(self, node: Node, taken: Sequence[Held]) -> Working:
        strategy = self.program.strategies[node.name]
        by_name = self.graph.by_name
        operands = [by_name[o] for o in node.operands]
        first = strategy.operands[0] if strategy.operands else ()
        return working(
            Site(
                node=node,
                operands=tuple(value.shape for value in taken),
                strides=tuple(value.strides for value in taken),
                item=operands[0].itemsize if operands else node.itemsize,
                result=self._local(node, strategy.result),
                cut=frozenset(s.dim for s in first if isinstance(s, Cut)),
                work=strategy.work,
                is_cpu=self.is_cpu,
            )
        )

    def _result(self, node: Node, taken: Sequence[Held]) -> Held:
        """The operator's result: a view, or a storage of its own."""
        shape = self._local(node, forward_half(self.program.strategies[node.name].result))
        first = taken[0] if taken else None
        strides: Strides | None = None
        if first is not None:
            if node.family in SAME:
                strides = first.strides
            elif node.family in RESHAPES:
                strides = viewed(first.shape, first.strides, shape)
            elif node.family in PERMUTES:
                strides = tuple(first.strides[d] for d in _order(node, len(first.shape)))
            elif node.family in PARTS and len(first.shape) == len(shape):
                strides = first.strides
            elif node.family in PARTS:
                dim = _whole(node, "dim") % len(first.shape)
                strides = (*first.strides[:dim], *first.strides[dim + 1 :])
            elif node.family in ("aten.expand", "aten.broadcast_to"):
                strides = _expanded(first, shape)
            elif node.family == "autoshard.repeat_kv":
                strides = _repeated(first, shape)
        if strides is not None and first is not None:
            self._hold(first.storage)
            return Held(first.storage, shape, strides)
        made = self._tensor(shape, node.itemsize)
        if node.family in ELEMENTWISE:
            like = next((t for t in taken if t.shape == shape), None)
            if like is not None and 0 not in like.strides:
                return Held(made.storage, shape, like.strides)
        if node.family == ATTENTION and first is not None and not node.attrs.get("dropout_p"):
            return Held(made.storage, shape, first.strides)  # as the query lies
        return made

    def _save(self, node: Node, taken: Sequence[Held], result: Held, found: Working) -> None:
        again = {
            self.moved.get((edge.consumer, edge.index))
            for edge in self.program.regathered.get(node.name, ())
        }
        roles = found.keeps
        if roles is None:
            grads = [self.program.edges[node.name, i].differentiable for i in range(len(taken))]
            roles = self.program.kept_roles(node) | kept_by_product(node, grads)
        kept: list[int] = []
        for role, value in (*zip(node.roles, taken, strict=True), ("result", result)):
            if role in roles and value.storage not in (STORED, *again, *kept):
                kept.append(value.storage)
                self._hold(value.storage)
        if found.kept_bytes:
            kept.append(self._new(found.kept_bytes))
        self.saves[node.name] = kept

    # ---- backward ---------------------------------------------------------------------------

    def _backward(self) -> None:
        program, graph = self.program, self.graph
        sent_after: dict[str, list[int]] = {}
        for index, bucket in enumerate(program.buckets):
            sent_after.setdefault(bucket.after, []).append(index)
        messages: list[int] = []
        loss = graph.by_name[graph.loss]
        pending: dict[str, Held] = {}
        if loss.differentiable:
            layout = gradient_half(program.strategies[loss.name].result)
            pending[loss.name] = self._tensor(self._local(loss, layout), loss.itemsize)
        for node in reversed(graph.nodes):
            if not node.differentiable or node.is_leaf:
                continue
            given = pending.pop(node.name, None)
            if given is not None:
                self.given[node.name] = given.storage, self._added[given.storage]
                self._backward_of(node, given, pending)
            for index in sent_after.get(node.name, ()):
                members = program.buckets[index].parameters
                if len(members) > 1 and self.model.style != "fused":
                    message = program.bucket_collective(index, self.origin)
                    messages.append(self._new(message.num_bytes))
        for storage in messages:
            self._drop(storage)

    def _backward_of(self, node: Node, given: Held, pending: dict[str, Held]) -> None:
        program, by_name = self.program, self.graph.by_name
        whole = [
            self._move(self._values[e.producer], e.reshard.forward, by_name[e.producer]).storage
            for e in program.regathered.get(node.name, ())
        ]
        edges = [program.edges[node.name, i] for i in range(len(node.operands))]
        found = [self._gradient(node, e, given) if e.differentiable else None for e in edges]
        self._moment(self._working[node.name].backward_bytes)
        for storage in (*whole, given.storage, *self.saves.get(node.name, ())):
            self._drop(storage)
        for edge, gradient in zip(edges, found, strict=True):
            if gradient is not None and not edge.backward_steps:
                self._arrive(edge, gradient, pending)
        for edge, gradient in reversed(list(zip(edges, found, strict=True))):
            if gradient is not None and edge.backward_steps:
                moved = self._move(gradient, edge.backward_steps, by_name[edge.producer])
                self._drop(gradient.storage)
                self._arrive(edge, moved, pending)

    def _gradient(self, node: Node, edge: Edge, given: Held) -> Held:
        """The gradient for one operand: a view of what came, or a storage of its own."""
        operand = self.graph.by_name[edge.producer]
        shape = self._local(operand, gradient_half(edge.taken))
        strides: Strides | None = None
        if node.family in SAME:
            strides = given.strides
        elif node.family in RESHAPES:
            strides = viewed(given.shape, given.strides, shape)
        elif node.family in PERMUTES:
            order = _order(node, len(shape))
            strides = tuple(given.strides[order.index(d)] for d in range(len(shape)))
        elif node.family in SUMS and shape == given.shape:
            is_same = node.family == "aten.add" or edge.index == 0
            strides = given.strides if is_same else None
        elif node.family == "aten.cat":
            strides = given.strides
        elif node.family == "aten.sum":
            strides = (0,) * len(shape)
        if strides is not None:
            self._hold(given.storage)
            return Held(given.storage, shape, strides)
        made = self._tensor(shape, operand.itemsize)
        if node.family == ATTENTION and len(shape) == 4:
            return Held(made.storage, shape, _by_position(shape))
        if node.family in ELEMENTWISE and shape == given.shape and 0 not in given.strides:
            return Held(made.storage, shape, given.strides)
        return made

    def _arrive(self, edge: Edge, gradient: Held, pending: dict[str, Held]) -> None:
        """A gradient reaches its value: the first is taken as it is, others are added to it."""
        name = edge.producer
        producer = self.graph.by_name[name]
        if producer.op == "parameter":
            self._arrive_at_parameter(producer, gradient)
            return
        before = pending.get(name)
        if before is None:
            pending[name] = gradient
            return
        if self._holders[before.storage] > 1 or 0 in before.strides:
            total = self._tensor(before.shape, producer.itemsize)
            self._drop(before.storage)
            pending[name] = total
        else:
            self._added[before.storage] += 1
        self._drop(gradient.storage)

    def _arrive_at_parameter(self, parameter: Node, gradient: Held) -> None:
        if parameter.name in self._gradients:
            self._drop(gradient.storage)
            return
        storage = gradient.storage
        if self._holders[storage] > 1 or not is_contiguous(gradient.shape, gradient.strides):
            storage = self._new(prod(gradient.shape) * parameter.itemsize)
            self._drop(gradient.storage)
        self._gradients[parameter.name] = storage
        self._in_gradients.add(storage)

    # ---- the rest ---------------------------------------------------------------------------

    def _constant_bytes(self) -> int:
        """Constants, as they are sliced for their uses."""
        found: dict[tuple[str, Layout], int] = {}
        for edge in self.program.edges.values():
            if edge.constant:
                producer = self.graph.by_name[edge.producer]
                layout = forward_half(edge.taken)
                found[edge.producer, layout] = self.model.local_bytes(producer, layout)
        return sum(found.values())

    def _update_bytes(self) -> int:
        """What the optimizer needs beside its state: see ``Optimizer.working_bytes``."""
        if not self.is_cpu:  # one kernel updates many tensors in place
            return 0
        most = 0
        for node in self.graph.nodes:
            if node.op == "parameter" and node.differentiable:
                layout = self.program.strategies[node.name].result
                elements = self.model.local_bytes(node, layout) // node.itemsize
                most = max(
                    most,
                    self.model.optimizer.working_bytes(elements, node.dtype, node.itemsize),
                )
        return most


def reserve_parts(cluster: Cluster) -> ReserveParts | None:
    """The cluster's reserve as a plan tells it."""
    return None if cluster.reserve is None else ReserveParts(**asdict(cluster.reserve))


def _whole(node: Node, name: str, default: int = 0) -> int:
    found = node.attrs.get(name, default)
    return found if isinstance(found, int) else default


def _order(node: Node, rank: int) -> list[int]:
    """Which dim of the operand each dim of the result is."""
    dims = node.attrs.get("dims")
    if isinstance(dims, tuple):
        return [d % rank for d in dims if isinstance(d, int)]
    order = list(range(rank))
    a, b = _whole(node, "dim0") % rank, _whole(node, "dim1", 1) % rank
    order[a], order[b] = order[b], order[a]
    return order


def _expanded(first: Held, shape: Shape) -> Strides:
    added = len(shape) - len(first.shape)
    return (0,) * added + tuple(
        0 if old == 1 and new != 1 else stride
        for old, new, stride in zip(first.shape, shape[added:], first.strides, strict=True)
    )


def _repeated(first: Held, shape: Shape) -> Strides | None:
    """Of [batch, head, ...] with each head so many times; a view where there is one head."""
    (batch, heads, *rest), strides = first.shape, first.strides
    times = shape[1] // heads if heads else 1
    return viewed((batch, heads, times, *rest), (*strides[:2], 0, *strides[2:]), shape)


def _by_position(shape: Shape) -> Strides:
    """Strides of [batch, head, position, width] that lies as [batch, position, head, width]."""
    batch, heads, positions, width = shape
    laid = contiguous((batch, positions, heads, width))
    return laid[0], laid[2], laid[1], laid[3]
