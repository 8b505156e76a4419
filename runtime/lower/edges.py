"""One edge of a program on one device: its steps, worked out beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.graph import Node
from autoshard.program import Edge
from autoshard.runtime.comm import Communicator
from autoshard.runtime.moves import prepare
from autoshard.sharding.collective import Phase
from autoshard.sharding.reshard import Step

Run = Callable[[Tensor], Tensor]


def steps_of(steps: Sequence[Step], node: Node, comm: Communicator, phase: Phase) -> Run:
    """The steps, one after another, as one function of this device's part of ``node``'s value."""
    name = node.name
    ready = [prepare(step, node.shape, comm.mesh, comm.coordinate) for step in steps]
    if len(ready) == 1:
        single = ready[0]

        def once(tensor: Tensor) -> Tensor:
            return single(tensor, comm, phase, name)

        return once

    def several(tensor: Tensor) -> Tensor:
        for step in ready:
            tensor = step(tensor, comm, phase, name)
        return tensor

    return several


class _Move(torch.autograd.Function):
    """A value by the forward steps of an edge, its gradient by the backward steps."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Run | None, backward: Run | None) -> Tensor:
        ctx.back = backward
        out = tensor if forward is None else forward(tensor)
        return tensor.view_as(tensor) if out is tensor else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0]
        return (gradient if ctx.back is None else ctx.back(gradient)), None, None


def moving(edge: Edge, node: Node, comm: Communicator) -> Run:
    """What runs for ``edge``, whose value is that of ``node``: one function of the local part."""
    forward = (
        steps_of(edge.reshard.forward, node, comm, "forward") if edge.reshard.forward else None
    )
    steps = edge.backward_steps
    if not edge.differentiable:
        assert forward is not None
        return forward
    backward = steps_of(steps, node, comm, "backward") if steps else None

    def move(tensor: Tensor) -> Tensor:
        return _Move.apply(tensor, forward, backward)  # type: ignore[no-untyped-call, no-any-return]

    return move
