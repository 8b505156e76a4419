"""Bringing what a call did to the caller's own objects: they keep their identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from autoshard.runtime.comm import Communicator
from autoshard.runtime.eager.body import Objects, Piece
from autoshard.runtime.moves import reshard
from autoshard.runtime.shards import join_shards, take_shard
from autoshard.runtime.spmd.ambient import set_generators
from autoshard.runtime.spmd.request import Changes, Reply, Same, Slot
from autoshard.sharding.layout import Layout, R, Shape, coordinates, forward_half
from autoshard.sharding.reshard import path

Lies = Sequence[tuple[Layout, Shape, str]]
"""Of each piece (layout, shape, kind)."""

Wholes = Callable[[int, "torch.Tensor | None"], "torch.Tensor | None"]
"""The whole of a piece, given what it was before; None if that is what it still is."""


def from_replies(replies: Sequence[Reply], mesh: Shape) -> Wholes:
    """Join the shards that the ranks of a pool sent."""
    changes = replies[0].changes
    assert changes is not None
    lies = changes.lies
    places = list(coordinates(mesh))

    def whole(number: int, before: torch.Tensor | None) -> torch.Tensor | None:
        layout, shape, _ = lies[number]
        sent: dict[tuple[int, ...], torch.Tensor] = {}
        same: list[tuple[int, ...]] = []
        for place, reply in zip(places, replies, strict=True):
            piece = reply.pieces.get(number)
            if isinstance(piece, str):
                same.append(place)
            elif piece is not None:
                sent[place] = piece
        if not sent:
            return None
        if len(sent) == 1 and not same:
            (only,) = sent.values()
            return only.view(shape)
        for place in same:
            assert before is not None
            sent[place] = take_shard(before.detach(), layout, mesh, place)
        return join_shards(sent, layout, shape, mesh)

    return whole


def from_pieces(pieces: Sequence[Piece], comm: Communicator) -> Wholes:
    """Gather shards from the other ranks of the world; every rank asks for all, in one order."""

    def whole(number: int, before: torch.Tensor | None) -> torch.Tensor | None:
        piece = pieces[number]
        layout, shape = forward_half(piece.layout), tuple(piece.shape)
        target = (R,) * len(layout)
        _, steps = path(shape, piece.local.element_size(), layout, target, comm.mesh, _any_price)
        value = reshard(piece.local.detach(), steps, shape, comm)
        return value.reshape(shape)

    return whole


def _any_price(_op: object, _axes: object, num_bytes: int) -> float:
    return 1.0 + num_bytes * 1e-9


def bring_home(
    changes: Changes,
    wholes: Wholes,
    objects: Objects,
    captured: Sequence[tuple[str, Any]],
    schedulers: Sequence[Any],
) -> Any:
    """Write what a call did into the caller's objects; the function's result, whole.

    Args:
        changes: what the ranks told.
        wholes: gives the whole of a piece.
        objects: modules, optimizers and tensors of the call.
        captured: tensors that the function refers to besides, with their names.
        schedulers: those of the call.
    """
    # Results first: it is the order in which slots were numbered, and asking may communicate.
    output = output_of(changes.output, wholes, objects, changes.lies)
    with torch.no_grad():
        for module, state in zip(objects.modules, changes.modules, strict=True):
            _module(module, *state, wholes)
        for optimizer, (groups, states) in zip(objects.optimizers, changes.optimizers, strict=True):
            _optimizer(optimizer, groups, states, wholes)
        for number, piece in changes.tensors.items():
            _overwrite(objects.tensors[number], wholes(piece, None))
        for number, piece in changes.tensor_gradients.items():
            _set_gradient(objects.tensors[number], wholes(piece, None))
        for number, piece in changes.captured.items():
            _overwrite(captured[number][1], wholes(piece, None))
    for scheduler, state_dict in zip(schedulers, changes.schedulers, strict=True):
        scheduler.load_state_dict(state_dict)
    if changes.generators is not None:
        set_generators(changes.generators)
    return output


def _module(
    module: nn.Module,
    parameters: Mapping[str, int],
    buffers: Mapping[str, int],
    gradients: Mapping[str, int],
    training: Mapping[str, bool],
    wholes: Wholes,
) -> None:
    own, known = _tensors(module, training)
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, piece in parameters.items():
        parameter = own.get(name)
        value = wholes(piece, parameter)
        if value is None:
            continue
        if parameter is None:
            made = nn.Parameter(value.clone())
            _place(module, name).register_parameter(_leaf(name), made)
        elif parameter.shape == value.shape and parameter.dtype == value.dtype:
            if parameter.data_ptr() != value.data_ptr() and not torch.equal(parameter, value):
                written.append((parameter, value))
        else:
            _overwrite(parameter, value)
    if written:
        torch._foreach_copy_([to for to, _ in written], [of for _, of in written])
    for name, piece in buffers.items():
        buffer = known.get(name)
        value = wholes(piece, buffer)
        if value is None:
            continue
        if buffer is None:
            _place(module, name).register_buffer(_leaf(name), value.clone())
        else:
            _overwrite(buffer, value)
    for name, parameter in own.items():
        found = gradients.get(name)
        if found is not None or parameter.grad is not None:
            _set_gradient(parameter, None if found is None else wholes(found, None))


def _tensors(
    module: nn.Module, training: Mapping[str, bool]
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Parameters and buffers by name; on the way, each submodule gets its training flag."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, inner in module.named_modules():
        flag = training.get(prefix, inner.training)
        if flag is not inner.training:
            inner.training = flag
        start = f"{prefix}." if prefix else ""
        for table, found in ((inner._parameters, parameters), (inner._buffers, buffers)):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[start + name] = tensor
    return parameters, buffers


def _place(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _overwrite(target: Any, value: torch.Tensor | None) -> None:
    if value is None:
        return
    if isinstance(target, np.ndarray):
        target[...] = value.numpy()
    elif target.shape == value.shape and target.dtype == value.dtype:
        if target.data_ptr() != value.data_ptr() and not torch.equal(target, value):
            target.detach().copy_(value)
    else:
        target.data = value.clone()


def _set_gradient(target: torch.Tensor, value: torch.Tensor | None) -> None:
    if value is None:
        target.grad = None
    elif target.grad is None or target.grad.shape != value.shape:
        target.grad = value.clone()
    else:
        _overwrite(target.grad, value)


def _optimizer(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[int, Mapping[str, Any]],
    wholes: Wholes,
) -> None:
    for group, new in zip(optimizer.param_groups, groups, strict=False):
        for key, value in new.items():
            group[key] = _merged(group.get(key), _plain(value, wholes))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, new in states.items():
        if number < len(parameters):
            state = optimizer.state[parameters[number]]
            values = {key: _plain(value, wholes) for key, value in new.items()}
            for key in [key for key in state if key not in values]:
                del state[key]
            for key, value in values.items():
                state[key] = _merged(state.get(key), value)
    for number, parameter in enumerate(parameters):
        if number not in states:
            optimizer.state.pop(parameter, None)


def _merged(old: Any, new: Any) -> Any:
    """``new``, in the tensor that was there before where there is one."""
    if (
        isinstance(old, torch.Tensor)
        and isinstance(new, torch.Tensor)
        and old.shape == new.shape
        and old.dtype == new.dtype
    ):
        old.copy_(new)
        return old
    return new.clone() if isinstance(new, torch.Tensor) else new


def _plain(value: Any, wholes: Wholes) -> Any:
    """An entry of a state or a group with whole tensors in the slots."""

    def inner(value: Any) -> Any:
        found = _plain(value, wholes)
        return found.clone() if isinstance(value, Slot) else found

    if isinstance(value, Slot):
        return wholes(value.number, None)
    if isinstance(value, dict):
        return {k: inner(v) for k, v in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(inner(v) for v in value)
    return value


def output_of(value: Any, wholes: Wholes, objects: Objects, lies: Lies) -> Any:
    """A result with whole values in the slots."""
    if isinstance(value, Slot):
        return _finished(wholes(value.number, None), lies[value.number][2])
    if isinstance(value, Same):
        return getattr(objects, value.kind)[value.number]
    if isinstance(value, Mapping):
        items = {k: output_of(v, wholes, objects, lies) for k, v in value.items()}
        if type(value) is dict:
            return items
        try:
            return type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(value, list | tuple):
        row = [output_of(v, wholes, objects, lies) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*row)
        return type(value)(row) if type(value) in (list, tuple) else tuple(row)
    if is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            if hasattr(value, f.name):
                item = getattr(value, f.name)
                object.__setattr__(value, f.name, output_of(item, wholes, objects, lies))
    return value


def _finished(value: torch.Tensor | None, kind: str) -> Any:
    assert value is not None
    value = value.detach().clone()  # of its own, not a part of what was received, or a parameter
    if kind == "tensor":
        return value
    array = value.numpy()
    return array if kind == "array" else array[()]
