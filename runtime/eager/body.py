"""Run one function of whole arguments on one rank of a mesh: the contract with who calls it.

    result = run_body(step, (model, data, labels), {}, mesh=mesh, in_layouts=[batch, labels],
                      out_layout=None, parameter_layouts=[layouts], comm=comm)

Both sides walk the arguments with :func:`objects_of`, so the n-th module, optimizer or tensor of
one is that of the other. Every rank calls it with equal arguments and gets its own pieces back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autoshard.runtime.comm import Communicator, Recorder
from autoshard.runtime.eager.arguments import Objects, objects_of
from autoshard.sharding.collective import CollectiveSeconds
from autoshard.sharding.layout import Layout, Shape
from autoshard.sharding.mesh import DeviceMesh

__all__ = [
    "BodyResult",
    "EagerOptions",
    "ModuleState",
    "Objects",
    "OptimizerState",
    "Piece",
    "objects_of",
    "run_body",
]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerOptions:
    """What may be chosen.

    Attributes:
        seconds: price of a collective; None: those of processes on this machine.
        bucket_bytes: size at which a bucket of gradients is sent; None: from the prices.
        overlap: whether gradients are sent while backward runs.
        sparse: whether gradients of look-ups may be sent as rows and values.
    """

    seconds: CollectiveSeconds | None = None
    bucket_bytes: int | None = None
    overlap: bool = True
    sparse: bool = True


def run_body(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mesh: DeviceMesh,
    in_layouts: Sequence[Layout | None],
    out_layout: Layout | Sequence[Layout | None] | Callable[[Shape], Layout] | None,
    parameter_layouts: Sequence[Mapping[str, Layout]],
    comm: Communicator,
    recorder: Recorder | None = None,
    options: EagerOptions | None = None,
) -> BodyResult:
    """Run ``function(*args, **kwargs)`` on this rank, one operator at a time, by sharding rules.

    Inside, shapes read as global. Modules, optimizers and tensors are cut while it runs and are
    whole and unchanged again afterwards; what became of them is in the result.

    Args:
        function: an ordinary function of tensors, NumPy arrays, modules, optimizers and containers.
        args: whole arguments, equal on all ranks.
        kwargs: whole arguments, equal on all ranks.
        mesh: the mesh; its ranks are those of ``comm``.
        in_layouts: for each of ``objects_of(args, kwargs).tensors`` how it is cut; missing entries
            and None: whole.
        out_layout: how results leave: one layout (a tuple) for every tensor of the result, a list
            with one for each in order, a function from the global shape, or None: as they are.
        parameter_layouts: for each of ``objects_of(args, kwargs).modules`` the layout of
            parameters and buffers by name; those not named are whole.
        comm: the collectives over ``mesh``.
        recorder: takes the collectives that are issued.
        options: what may be chosen.

    Raises:
        RequestError: the function does what cannot be followed; the message says what to do.
    """
    raise NotImplementedError
