"""What a call leaves on one rank: its pieces of tensors, in the places of the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autoshard.sharding.layout import Layout, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank holds of one tensor.

    Attributes:
        local: the shard, detached and contiguous.
        layout: how the shards lie; ``join_shards`` puts them together. Partial values are summed.
        shape: the global shape.
        kind: what the caller gets: a tensor, an array, or a NumPy scalar.
        requires_grad: whether it needed a gradient.
    """

    local: Tensor
    layout: Layout
    shape: Shape
    kind: str = "tensor"
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleState:
    """A module after the call.

    Attributes:
        parameters: by name (``named_parameters``; of a shared one the first name only).
        buffers: by name (``named_buffers``), also those that were made during the call.
        gradients: by parameter name, where ``.grad`` is not None.
        training: ``module.training`` of every submodule, by name.
    """

    parameters: Mapping[str, Piece]
    buffers: Mapping[str, Piece]
    gradients: Mapping[str, Piece]
    training: Mapping[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """An optimizer after the call, parameters by their place in ``param_groups``.

    Attributes:
        groups: each group without its ``params``.
        state: for each parameter (counted through all groups) its state: pieces, numbers, tensors
            that are equal on all ranks.
    """

    groups: Sequence[Mapping[str, Any]]
    state: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyResult:
    """What a call of :func:`run_body` leaves.

    Attributes:
        output: the function's result with a :class:`Piece` in the place of every tensor, array
            and NumPy scalar; other objects stay as they are.
        modules: one for each of ``objects_of(args, kwargs).modules``.
        optimizers: one for each of ``objects_of(args, kwargs).optimizers``.
        tensors: by place in ``objects_of(args, kwargs).tensors``: those written in place, and
            gradients of those that require one, under ``gradients``.
        gradients: see ``tensors``.
    """

    output: Any
    modules: Sequence[ModuleState]
    optimizers: Sequence[OptimizerState]
    tensors: Mapping[int, Piece] = field(default_factory=dict)
    gradients: Mapping[int, Piece] = field(default_factory=dict)


__all__ = ["BodyResult", "ModuleState", "OptimizerState", "Piece"]
