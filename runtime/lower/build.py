"""From a program to the module of one device: one call an operator, one Function an edge."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.fx import Node as FxNode

from autoshard.candidates import op_call
from autoshard.errors import InputError, MeshError
from autoshard.graph import Node
from autoshard.program import ALIASES, Edge, Program
from autoshard.runtime.comm import Communicator
from autoshard.runtime.local import local_call
from autoshard.runtime.lower.edges import moving, steps_of
from autoshard.runtime.lower.module import LoweredModule
from autoshard.runtime.lower.regather import regathering
from autoshard.runtime.shards import take_shard
from autoshard.sharding.layout import Layout, R, forward_half, local_shape

Values = Mapping[str, Tensor] | Callable[[str], Tensor]
"""Whole tensors by name, or a function from the name to this device's shard."""

Watch = Callable[[tuple[str, int], Tensor], Tensor]
"""Told every operator's local result, as (name, -1), and operands, as (name, which); gives what is
to be used instead."""


def lower(
    program: Program,
    *,
    constants: Values,
    parameters: Values,
    buffers: Values,
    comm: Communicator,
    device: torch.device | str = "cpu",
    watch: Watch | None = None,
) -> LoweredModule:
    """The module that this device runs.

    Args:
        program: what is executed; the dtypes are those of its graph.
        constants: values of the graph's constants by name. A function gets the constant's name
            and gives the whole value.
        parameters: whole values by dotted name, or a function from the name to the local shard.
        buffers: the same, of the buffers that the step changes.
        comm: collectives of the program's mesh; its coordinate is this device's place.
        device: where it computes.
        watch: for finding faults: told every operator's local operands and result.

    Raises:
        InputError: a value is missing or has another shape.
        MeshError: ``comm`` is of another mesh than the program.
    """
    if comm.mesh != program.sizes or comm.axis_names != program.axis_names:
        raise MeshError(
            f"the program is for axes {program.axis_names} of sizes {program.sizes}, the "
            f"communicator has {comm.axis_names} of sizes {comm.mesh}"
        )
    device = torch.device(device)
    return _Lowering(program, constants, parameters, buffers, comm, device, watch).module()


class _Lowering:
    def __init__(
        self,
        program: Program,
        constants: Values,
        parameters: Values,
        buffers: Values,
        comm: Communicator,
        device: torch.device,
        watch: Watch | None,
    ) -> None:
        self.program, self.graph = program, program.graph
        self.constants, self.parameters, self.buffers = constants, parameters, buffers
        self.comm, self.device, self.watch = comm, device, watch
        self.coordinate = comm.coordinate
        self.fx, self.root = Graph(), nn.Module()
        self.values: dict[str, FxNode] = {}
        self.detached: dict[str, FxNode] = {}
        self.slices: dict[object, FxNode] = {}
        self.fqns: dict[str, str] = {}
        self.leaves: dict[str, nn.Parameter] = {}

    def module(self) -> LoweredModule:
        for node in self.graph.nodes:
            if node.op == "input":
                self.values[node.name] = self.fx.placeholder(_identifier(node.name))
        for node in self.graph.nodes:
            if node.op in ("parameter", "buffer"):
                self._stored(node)
            elif not node.is_leaf:
                self.values[node.name] = self._operator(node)
        loss = self._taken(self.program.loss_edge)
        outputs = {path: self._output(name, loss) for path, name in self.graph.outputs}
        self.fx.output((loss, outputs))
        self.fx.lint()
        return LoweredModule(
            self.root,
            self.fx,
            program=self.program,
            comm=self.comm,
            device=self.device,
            fqns=self.fqns,
            leaves=self.leaves,
        )

    # ---- stored values ----------------------------------------------------------------------

    def _stored(self, node: Node) -> None:
        fqn = str(node.attrs["fqn"])
        source = self.parameters if node.op == "parameter" else self.buffers
        shard = self._shard(fqn, source, node, self.program.strategies[node.name].result)
        value: Tensor = shard
        if node.op == "parameter":
            value = self.leaves[node.name] = nn.Parameter(shard, requires_grad=node.differentiable)
        self.fqns[fqn] = self._attach(fqn, value, persistent=True)
        self.values[node.name] = self.fx.get_attr(self.fqns[fqn])

    def _shard(self, name: str, source: Values, node: Node, layout: Layout) -> Tensor:
        expected = local_shape(node.shape, layout, self.program.sizes, self.coordinate)
        if callable(source):
            shard = source(name)
            if tuple(shard.shape) != expected:
                raise InputError(
                    f"{node.op} {name!r}: this device holds {list(expected)} of "
                    f"{list(node.shape)} ({layout}), found a shard of {list(shard.shape)}"
                )
        else:
            if name not in source:
                raise InputError(f"the value of {node.op} {name!r} is missing")
            whole = source[name].detach()
            if tuple(whole.shape) != node.shape:
                raise InputError(
                    f"{node.op} {name!r} has shape {list(whole.shape)}, the plan was made for "
                    f"{list(node.shape)}"
                )
            shard = take_shard(whole, layout, self.program.sizes, self.coordinate)
        dtype = getattr(torch, node.dtype)
        return shard.to(device=self.device, dtype=dtype)

    def _attach(self, name: str, value: Tensor, *, persistent: bool) -> str:
        """Store a value at a dotted name, made different from what modules have already."""
        *parents, last = name.split(".")
        owner, path = self.root, []
        for part in parents:
            part = _free(owner, part, LoweredModule if owner is self.root else nn.Module)
            path.append(part)
            child = owner._modules.get(part)
            if child is None:
                child = nn.Module()
                owner.add_module(part, child)
            owner = child
        last = _free(owner, last, LoweredModule if owner is self.root else nn.Module)
        if isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        else:
            owner.register_buffer(last, value, persistent=persistent)
        return ".".join([*path, last])

    def _constant(self, node: Node, layout: Layout) -> FxNode:
        """A constant in the layout that a consumer takes it in; equal shards are one buffer."""
        name = str(node.attrs["constant"])
        key = (name, forward_half(layout))
        if key not in self.slices:
            whole = self.constants(name) if callable(self.constants) else self.constants[name]
            shard = take_shard(whole, layout, self.program.sizes, self.coordinate)
            shard = shard.to(device=self.device, dtype=getattr(torch, node.dtype))
            where = self._attach(f"constants.c{len(self.slices)}", shard, persistent=False)
            self.slices[key] = self.fx.get_attr(where)
        return self.slices[key]

    # ---- edges ------------------------------------------------------------------------------

    def _taken(self, edge: Edge) -> FxNode:
        """The value of an edge as its consumer takes it."""
        producer = self.graph.by_name[edge.producer]
        if edge.constant:
            return self._constant(producer, edge.taken)
        value = self.values[edge.producer]
        if producer.differentiable and not edge.differentiable:
            value = self._detached(edge.producer)
        if not edge.reshard.forward and not edge.backward_steps:
            return value
        return self.fx.call_function(moving(edge, producer, self.comm), (value,))

    def _detached(self, name: str) -> FxNode:
        if name not in self.detached:
            self.detached[name] = self.fx.call_function(
                torch.ops.aten.detach.default, (self.values[name],)
            )
        return self.detached[name]

    # ---- operators --------------------------------------------------------------------------

    def _operator(self, node: Node) -> FxNode:
        edges = [self.program.edges[node.name, i] for i in range(len(node.operands))]
        operands = [
            self._watched((node.name, i), self._taken(edge)) for i, edge in enumerate(edges)
        ]
        if node.op == "autoshard.identity":
            if edges[0].bucket is None:
                return self._watched((node.name, -1), operands[0])
            # Its own place in backward: the bucket is sent when this gradient is complete.
            return self._watched(
                (node.name, -1), self.fx.call_method("view_as", (operands[0],) * 2)
            )
        strategy = self.program.strategies[node.name]
        run = local_call(
            op_call(self.graph, node),
            strategy.operands,
            strategy.result,
            self.program.sizes,
            self.coordinate,
            reducer=self.comm,
            value=node.name,
            device=self.device,
        )
        again = self.program.regathered.get(node.name, ())
        if again:
            places, shards, gathers = self._regathered(node, again)
            run = regathering(run, len(operands), places, gathers)
            operands += shards
        return self._watched((node.name, -1), self._call(node, run, operands))

    def _call(self, node: Node, run: Callable[..., Any], operands: Sequence[FxNode]) -> FxNode:
        target: Any = run
        kwargs: dict[str, Any] = {}
        if isinstance(run, partial) and not run.args:
            target, kwargs = run.func, dict(run.keywords)
        is_torch = isinstance(target, torch._ops.OpOverload)
        if not is_torch and not getattr(target, "__name__", "<").isidentifier():
            target = _named(target, _identifier(node.family))
        name = _identifier(node.name)  # a traceback shows the line, and so the operator
        return self.fx.create_node("call_function", target, tuple(operands), kwargs, name)

    def _regathered(
        self, node: Node, edges: Sequence[Edge]
    ) -> tuple[list[int], list[FxNode], list[Callable[[Tensor], Tensor]]]:
        """Which operands are not kept, the shards they come from, and how to gather these."""
        sources = [self._gathered_by(node.name, index) for index in range(len(node.operands))]
        places = [sources.index((edge.consumer, edge.index)) for edge in edges]
        shards = [self.values[edge.producer] for edge in edges]
        gathers = [
            steps_of(edge.reshard.forward, self.graph.by_name[edge.producer], self.comm, "backward")
            for edge in edges
        ]
        return places, shards, gathers

    def _gathered_by(self, name: str, index: int) -> tuple[str, int]:
        """The edge that brings an operand, followed back through operators that only view it."""
        while not self.program.edges[name, index].regather:
            producer = self.graph.by_name[self.graph.by_name[name].operands[index]]
            if producer.op not in ALIASES:
                break
            name, index = producer.name, 0
        return name, index

    def _watched(self, place: tuple[str, int], value: FxNode) -> FxNode:
        if self.watch is None:
            return value
        return self.fx.call_function(_watcher(self.watch, place), (value,))

    # ---- results ----------------------------------------------------------------------------

    def _output(self, name: str, loss: FxNode) -> FxNode:
        node = self.graph.by_name[name]
        if node.op == "constant":
            return self._constant(node, (R,) * len(self.program.sizes))
        value = loss if name == self.graph.loss else self.values[name]
        return self.fx.call_function(torch.ops.aten.detach.default, (value,))


def _identifier(name: str) -> str:
    text = re.sub(r"\W", "_", name)
    return text if text.isidentifier() else f"v_{text}"


def _free(owner: nn.Module, name: str, cls: type) -> str:
    """``name``, with an underscore where modules of ``cls`` have such an attribute already."""
    taken = set(owner._parameters) | set(owner._buffers)
    while hasattr(cls, name) or name in taken or name in cls.__annotations__:
        name += "_"
    return name


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of its own with a name that code can use."""

    def call(*tensors: Tensor) -> Any:
        return run(*tensors)

    call.__name__ = name
    return call


def _watcher(watch: Watch, place: tuple[str, int]) -> Callable[[Tensor], Tensor]:
    def watched(value: Tensor) -> Tensor:
        return watch(place, value)

    return watched
