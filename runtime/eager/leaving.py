"""Taking down, on one rank, what a body leaves: its pieces of results and of modules' states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoshard.errors import SpecError
from autoshard.runtime.eager.arguments import map_tensors
from autoshard.runtime.eager.arrays import Array
from autoshard.runtime.eager.engine import Engine
from autoshard.runtime.eager.handlers import grad_meta
from autoshard.runtime.eager.pieces import ModuleState, OptimizerState, Piece
from autoshard.runtime.eager.tags import meta_of, set_meta
from autoshard.sharding.layout import Cut, Layout, Shape, fits, forward_half

OutLayout = Layout | Sequence[Layout | None] | Callable[[Shape], Layout] | None
"""How results leave; see :func:`run_body`."""


def piece_of(engine: Engine, tensor: Tensor, kind: str = "tensor") -> Piece:
    """What this rank holds of a tensor."""
    meta = meta_of(tensor)
    layout = engine.whole_layout if meta is None else forward_half(meta.layout)
    return Piece(
        local=tensor.detach().contiguous(),
        layout=layout,
        shape=tuple(tensor.shape) if meta is None else meta.shape,
        kind=kind,
        requires_grad=tensor.requires_grad,
    )


def gradient_of(engine: Engine, tensor: Tensor) -> Piece:
    """What this rank holds of a tensor's gradient."""
    grad = tensor.grad
    assert grad is not None
    meta = grad_meta(engine, tensor)
    if meta is not None:
        set_meta(grad, meta)
    return piece_of(engine, grad)


def output_of(engine: Engine, out: Any, out_layout: OutLayout) -> Any:
    """The function's result with pieces in the places of tensors, arrays and scalars."""
    count = 0

    def leave(value: Any) -> Any:
        nonlocal count
        kind = "tensor"
        if isinstance(value, Array):
            kind, value = "array", value.tensor
        elif isinstance(value, np.generic):
            return value
        if isinstance(value, np.ndarray):
            kind, value = "array", torch.from_numpy(np.ascontiguousarray(value))
        if not isinstance(value, Tensor):
            return value
        if kind == "array" and value.dim() == 0:
            kind = "scalar"
        index, count = count, count + 1
        wanted: Layout | None
        shape = engine.shape(value)
        if callable(out_layout):
            wanted = out_layout(shape)
        elif isinstance(out_layout, list):
            wanted = out_layout[index] if index < len(out_layout) else None
        else:
            wanted = out_layout  # type: ignore[assignment]
        if wanted is not None:
            fit(wanted, shape, f"result {index}")
            requires_grad = value.requires_grad
            value = engine.moved(value, forward_half(wanted))
            return replace(piece_of(engine, value, kind), requires_grad=requires_grad)
        return piece_of(engine, value, kind)

    return map_tensors(out, leave)


def module_state(engine: Engine, module: nn.Module) -> ModuleState:
    """A module as it is left."""
    parameters: dict[str, Piece] = {}
    buffers: dict[str, Piece] = {}
    gradients: dict[str, Piece] = {}
    training: dict[str, bool] = {}
    seen: set[int] = set()  # as named_parameters() and named_buffers() have them, in one walk
    for prefix, inner in module.named_modules():
        training[prefix] = inner.training
        start = f"{prefix}." if prefix else ""
        for name, parameter in inner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                parameters[start + name] = piece_of(engine, parameter)
                if parameter.grad is not None:
                    gradients[start + name] = gradient_of(engine, parameter)
        for name, buffer in inner._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                buffers[start + name] = piece_of(engine, buffer)
    return ModuleState(
        parameters=parameters, buffers=buffers, gradients=gradients, training=training
    )


def optimizer_state(engine: Engine, optimizer: Optimizer) -> OptimizerState:
    """An optimizer as it is left."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state: dict[int, Mapping[str, Any]] = {}
    place = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                state[place] = map_tensors(
                    dict(optimizer.state[parameter]),
                    lambda v: piece_of(engine, v) if isinstance(v, Tensor) else v,
                )
            place += 1
    return OptimizerState(groups=groups, state=state)


def fit(layout: Layout, shape: Shape, name: str = "a tensor") -> None:
    """Refuse a layout that a tensor of this shape cannot have."""
    for state in layout:
        if isinstance(state, Cut) and not fits(state, shape):
            raise SpecError(
                f"{name} of shape {list(shape)} cannot be cut as {state}: dim {state.dim} "
                f"{'does not exist' if state.dim >= len(shape) else 'has another size'}"
            )


__all__ = [
    "OutLayout",
    "fit",
    "gradient_of",
    "module_state",
    "optimizer_state",
    "output_of",
    "piece_of",
]
