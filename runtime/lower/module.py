"""The module that one device runs: local operators, explicit collectives, local shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule

from autoshard.errors import InputError
from autoshard.program import Program
from autoshard.runtime.comm import Communicator, Pending
from autoshard.runtime.lower.buckets import GradientBuckets
from autoshard.runtime.lower.checkpoint import box_placements, to_dtensor, whole_placements
from autoshard.runtime.moves import reshard
from autoshard.runtime.shards import take_shard
from autoshard.sharding.layout import Layout, R, Shape, forward_half


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter, or a buffer that the step changes, as this device holds it.

    Attributes:
        local: the shard.
        layout: how the whole lies on the mesh.
        shape: of the whole.
    """

    local: Tensor
    layout: Layout
    shape: Shape


class LoweredModule(GraphModule):
    """A model's training step on one device of a mesh.

    Parameters are this device's shards, under the names they have in the model. ``forward`` takes
    local inputs in the order of ``input_paths`` (:meth:`shard_inputs` cuts whole ones) and gives
    ``(loss, outputs)``: the loss is whole, the outputs are this device's shards by path, detached.
    After ``loss.backward()`` every ``.grad`` is whole, in the layout of its parameter.

    Attributes:
        program: what is executed.
        comm: its collectives; ``comm.coordinate`` is this device's place.
        device: where it computes.
    """

    program: Program
    comm: Communicator
    device: torch.device
    _fqns: dict[str, str]
    _buckets: GradientBuckets

    def __init__(
        self,
        root: nn.Module,
        graph: Graph,
        *,
        program: Program,
        comm: Communicator,
        device: torch.device,
        fqns: dict[str, str],
        leaves: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__(root, graph, "LoweredModule")
        for name, owner in root.named_modules():  # copied, but as part of the state
            self.get_submodule(
                name
            )._non_persistent_buffers_set |= owner._non_persistent_buffers_set
        self.program, self.comm, self.device, self._fqns = program, comm, device, fqns
        first = [not any(comm.coordinate[a] for a in b.axes) for b in program.buckets]

        def send(flat: Tensor, index: int) -> Pending:
            bucket = program.buckets[index]
            return comm.start(
                "all_reduce",
                flat,
                bucket.axes,
                phase="backward",
                value=bucket.parameters[0],
                async_op=True,
            )

        self._buckets = GradientBuckets(
            [[leaves[name] for name in b.parameters] for b in program.buckets], first, send
        )

    # ---- inputs and outputs -----------------------------------------------------------------

    @property
    def input_paths(self) -> tuple[str, ...]:
        """The order in which ``forward`` takes inputs."""
        return tuple(self.program.graph.inputs)

    @property
    def output_layouts(self) -> dict[str, Layout]:
        """The layout of each output, by path."""
        whole = (R,) * len(self.program.sizes)
        graph = self.program.graph
        return {
            path: forward_half(self.program.loss_edge.taken)
            if name == graph.loss
            else whole
            if graph.by_name[name].op == "constant"
            else forward_half(self.program.strategies[name].result)
            for path, name in graph.outputs
        }

    def shard_inputs(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """This device's share of the whole (global) inputs, in the order ``forward`` takes them.

        Raises:
            InputError: an input is missing, or has another shape than the plan was made for.
        """
        graph = self.program.graph
        if missing := [p for p in self.input_paths if p not in inputs]:
            raise InputError(f"inputs {missing} are missing; the model takes {self.input_paths}")
        out = []
        for path, node in graph.inputs.items():
            whole = inputs[path]
            if tuple(whole.shape) != node.shape:
                raise InputError(
                    f"input {path!r} has shape {list(whole.shape)}, the plan was made for "
                    f"{list(node.shape)}; pass whole (global) inputs of that shape, or plan again"
                )
            layout = self.program.strategies[node.name].result
            shard = take_shard(whole, layout, self.program.sizes, self.comm.coordinate)
            out.append(shard.to(device=self.device, dtype=getattr(torch, node.dtype)))
        return tuple(out)

    # ---- gradients --------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, fused gradients stay local sums; the first backward outside sends them."""
        with self._buckets.deferred():
            yield

    # ---- stored values ----------------------------------------------------------------------

    def stored(self) -> dict[str, Stored]:
        """Every parameter, and every buffer that the step changes, by its name in the model."""
        graph, out = self.program.graph, {}
        for node in graph.nodes:
            if node.op in ("parameter", "buffer"):
                fqn = str(node.attrs["fqn"])
                local = self._stored_tensor(fqn)
                layout = forward_half(self.program.strategies[node.name].result)
                out[fqn] = Stored(local, layout, node.shape)
        return out

    def _stored_tensor(self, fqn: str) -> Tensor:
        owner, _, name = self._fqns[fqn].rpartition(".")
        found = getattr(self.get_submodule(owner), name)
        assert isinstance(found, Tensor)
        return found

    @torch.no_grad()
    def whole(self, local: Tensor, layout: Layout, shape: Shape) -> Tensor:
        """The whole tensor from each device's part; all devices must ask for it together."""
        recorder, self.comm.recorder = self.comm.recorder, None
        try:
            target = (R,) * len(self.program.sizes)
            _, steps = self.program.resharder.path(
                shape, local.element_size(), forward_half(layout), target
            )
            return reshard(local, steps, shape, self.comm)
        finally:
            self.comm.recorder = recorder

    def full_state_dict(self) -> dict[str, Tensor]:
        """Parameters and changed buffers, whole, under every name they have in the model."""
        out = {
            fqn: self.whole(s.local.detach(), s.layout, s.shape) for fqn, s in self.stored().items()
        }
        aliases = self.program.graph.aliases
        return out | {other: out[fqn] for other, fqn in aliases.items() if fqn in out}

    def full_gradients(self) -> dict[str, Tensor]:
        """Gradients of all parameters that have one, whole."""
        return {
            fqn: self.whole(s.local.grad, s.layout, s.shape)
            for fqn, s in self.stored().items()
            if s.local.grad is not None
        }

    def dtensor_state_dict(self, mesh: DeviceMesh) -> dict[str, DTensor]:
        """Parameters and changed buffers as DTensors, for ``torch.distributed.checkpoint``.

        They share this module's memory, but for those whose shards are no boxes of the whole:
        these are whole copies. After loading into them call :meth:`load_dtensor_state_dict`.

        Args:
            mesh: torch's mesh of the program's axes.
        """
        out = {}
        for fqn, s in self.stored().items():
            local = s.local.detach()
            placements = box_placements(s.shape, s.layout, self.program.sizes)
            if placements is None:
                placements = whole_placements(self.program.sizes)
                local = self.whole(local, s.layout, s.shape).clone()
            out[fqn] = to_dtensor(local, s.shape, placements, mesh)
        return out

    @torch.no_grad()
    def load_dtensor_state_dict(self, state: Mapping[str, DTensor]) -> None:
        """Take over what was loaded into :meth:`dtensor_state_dict`'s tensors.

        Raises:
            InputError: a value is missing, or its shard has another shape.
        """
        for fqn, s in self.stored().items():
            if fqn not in state:
                raise InputError(f"the state has no {fqn!r}")
            local = state[fqn].to_local()
            if tuple(local.shape) == s.shape != tuple(s.local.shape):
                local = take_shard(local, s.layout, self.program.sizes, self.comm.coordinate)
            if local.shape != s.local.shape:
                raise InputError(
                    f"{fqn!r}: this device holds {list(s.local.shape)}, the state has a shard of "
                    f"{list(local.shape)}; load into dtensor_state_dict() of this module"
                )
            if local.data_ptr() != s.local.data_ptr():
                s.local.copy_(local)
