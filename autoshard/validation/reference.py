"""The training step on one device, unsharded, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from autoshard.graph import ModelGraph
from autoshard.normal.operators import run_operator
from autoshard.validation.values import WholeValues

Place = tuple[str, int]
"""An operator's result (its name, -1) or one of its operands (its name, which)."""


@dataclass(kw_only=True)
class Step:
    """What one training step gave; whole tensors, or one device's parts.

    Attributes:
        loss: the loss.
        outputs: by path.
        gradients: of parameters, by dotted name.
        buffers: after the step, by dotted name.
        forward: values, where they were watched.
        backward: gradients of these, where they were watched.
    """

    loss: Tensor
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    forward: dict[Place, Tensor] = field(default_factory=dict)
    backward: dict[Place, Tensor] = field(default_factory=dict)


class Watcher:
    """Keeps values and their gradients as they pass."""

    def __init__(self) -> None:
        self.forward: dict[Place, Tensor] = {}
        self.backward: dict[Place, Tensor] = {}

    def __call__(self, place: Place, value: Tensor) -> Tensor:
        """Note ``value``; what is returned is to be used instead of it."""
        self.forward[place] = value.detach().clone()
        if not value.requires_grad:
            return value

        def keep(gradient: Tensor) -> None:
            self.backward[place] = gradient.detach().clone()

        seen = value.view_as(value)  # its own place in backward: one use, not all uses
        seen.register_hook(keep)  # type: ignore[no-untyped-call]
        return seen


def run_unsharded(
    graph: ModelGraph, values: WholeValues, *, seed: int = 0, watch: bool = False
) -> Step:
    """One step of ``graph`` on whole values, on the CPU.

    Args:
        graph: what is computed, in its own dtypes.
        values: what it is computed on; not changed.
        seed: of the random numbers that operators draw.
        watch: whether to keep every operator's operands, result and their gradients.
    """
    torch.manual_seed(seed)
    watcher = Watcher() if watch else None
    parameters = {
        fqn: values.parameters[fqn].detach().clone().requires_grad_(node.differentiable)
        for fqn, node in graph.parameters.items()
    }
    buffers = {fqn: value.clone() for fqn, value in values.buffers.items()}
    computed: dict[str, Tensor] = {}
    for node in graph.nodes:
        if node.op == "input":
            value = values.inputs[str(node.attrs["path"])]
        elif node.op == "parameter":
            value = parameters[str(node.attrs["fqn"])]
        elif node.op == "buffer":
            value = buffers[str(node.attrs["fqn"])]
        elif node.op == "constant":
            value = values.constants[str(node.attrs["constant"])]
        else:
            operands = [computed[o] for o in node.operands]
            if not node.differentiable:
                operands = [o.detach() for o in operands]
            if watcher:
                operands = [watcher((node.name, i), o) for i, o in enumerate(operands)]
            value = run_operator(node.op, node.roles, operands, node.attrs, node.shape)
            if watcher:
                value = watcher((node.name, -1), value)
        computed[node.name] = value
    loss = computed[graph.loss]
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return Step(
        loss=loss.detach(),
        outputs={path: computed[name].detach() for path, name in graph.outputs},
        gradients={fqn: p.grad for fqn, p in parameters.items() if p.grad is not None},
        buffers=buffers,
        forward=watcher.forward if watcher else {},
        backward=watcher.backward if watcher else {},
    )
