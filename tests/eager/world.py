"""One pool of four ranks for the folder, and one body on it beside one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoshard.runtime.comm import Communicator, Recorder
from autoshard.runtime.eager import BodyResult, EagerOptions, Piece, objects_of, run_body
from autoshard.runtime.eager.arguments import map_tensors
from autoshard.runtime.processes import Pool, World
from autoshard.runtime.shards import join_shards
from autoshard.sharding.collective import Collective
from autoshard.sharding.layout import Layout, coordinate_of
from autoshard.sharding.mesh import DeviceMesh
from autoshard.sharding.spec import PartitionSpec, ShardingSpec

MESH = DeviceMesh([[0, 1], [2, 3]], ["data", "model"])
_communicators: dict[DeviceMesh, Communicator] = {}


@cache
def pool() -> Pool:
    return Pool(4, timeout_s=60, preload=("autoshard.runtime.eager.warm",))


def layout(shape: Sequence[int], *entries: Any, mesh: DeviceMesh = MESH) -> Layout:
    return ShardingSpec(mesh, PartitionSpec(*entries)).layout(shape)


def communicator(mesh: DeviceMesh) -> Communicator:
    if mesh not in _communicators:
        _communicators[mesh] = Communicator(mesh.shape, mesh.axis_names)
    return _communicators[mesh]


Layouts = Callable[[str, Tensor], Layout | None]


def rank(
    world: World,
    function: Callable[..., Any],
    args: Sequence[Any],
    in_layouts: Sequence[Layout | None],
    parameters: Layouts | None,
    out_layout: Any,
    mesh: DeviceMesh,
    options: EagerOptions | None,
    seed: int,
) -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    recorder = Recorder()
    layouts: list[Mapping[str, Layout]] = []
    for module in objects_of(args, {}).modules:
        found = {}
        for name, p in module.named_parameters():
            wanted = parameters(name, p) if parameters else None
            if wanted is not None:
                found[name] = wanted
        layouts.append(found)
    try:
        result = run_body(
            function,
            args,
            {},
            mesh=mesh,
            in_layouts=in_layouts,
            out_layout=out_layout,
            parameter_layouts=layouts,
            comm=communicator(mesh),
            recorder=recorder,
            options=options,
        )
    except Exception as error:
        import traceback

        return ("error", type(error).__name__, str(error), traceback.format_exc())
    return ("ok", result, recorder.collectives, torch.get_rng_state())


def joined(pieces: Sequence[Any], mesh: DeviceMesh = MESH) -> Any:
    """The whole of one piece of every rank."""
    first = pieces[0]
    if not isinstance(first, Piece):
        return first
    shards = {coordinate_of(i, mesh.shape): p.local for i, p in enumerate(pieces)}
    whole = join_shards(shards, first.layout, first.shape, mesh.shape)
    if first.kind == "tensor":
        return whole
    array = whole.numpy()
    return array[()] if first.kind == "scalar" else array


def join_tree(trees: Sequence[Any], mesh: DeviceMesh = MESH) -> Any:
    first = trees[0]
    if isinstance(first, Piece):
        return joined(trees, mesh)
    if isinstance(first, dict):
        return {k: join_tree([t[k] for t in trees], mesh) for k in first}
    if isinstance(first, (list, tuple)):
        rows = [join_tree([t[i] for t in trees], mesh) for i in range(len(first))]
        return type(first)(*rows) if hasattr(first, "_fields") else type(first)(rows)
    return first


def run(
    function: Callable[..., Any],
    *args: Any,
    cuts: Sequence[Layout | None] = (),
    parameters: Layouts | None = None,
    out_layout: Any = None,
    mesh: DeviceMesh = MESH,
    options: EagerOptions | None = None,
    seed: int = 7,
) -> tuple[list[BodyResult], list[Collective], list[Tensor]]:
    """Every rank's result, rank 0's collectives, every rank's random state."""
    replies = pool().run(
        rank, function, args, list(cuts), parameters, out_layout, mesh, options, seed
    )
    for reply in replies:
        if reply[0] == "error":
            raise BodyError(reply[1], reply[2], reply[3])
    lists = [[c.key for c in reply[2]] for reply in replies]
    assert all(len(row) == len(lists[0]) for row in lists), "ranks issue different collectives"
    return [r[1] for r in replies], replies[0][2], [r[3] for r in replies]


class BodyError(Exception):
    """What a rank raised."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


def close(a: Any, b: Any, where: str, tolerance: float = 1e-9) -> None:
    if isinstance(b, Tensor):
        assert isinstance(a, Tensor), (where, type(a))
        assert a.shape == b.shape, (where, a.shape, b.shape)
        assert a.dtype == b.dtype, (where, a.dtype, b.dtype)
        if b.is_floating_point() or b.is_complex():
            assert torch.allclose(a, b.detach(), rtol=tolerance, atol=tolerance, equal_nan=True), (
                where,
                (a - b).abs().max().item(),
            )
        else:
            assert torch.equal(a, b), (where, a, b)
    elif isinstance(b, (np.ndarray, np.generic)):
        assert a.shape == b.shape, (where, a.shape, b.shape)
        assert a.dtype == b.dtype, (where, a.dtype, b.dtype)
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance, err_msg=where
        )
    elif isinstance(b, dict):
        assert set(a) == set(b), (where, set(a) ^ set(b))
        for k in b:
            close(a[k], b[k], f"{where}.{k}", tolerance)
    elif isinstance(b, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            close(x, y, f"{where}[{i}]", tolerance)
    elif isinstance(b, float):
        assert abs(a - b) <= tolerance * max(1, abs(b)), (where, a, b)
    else:
        assert a == b, (where, a, b)


def check(
    function: Callable[..., Any],
    *args: Any,
    cuts: Sequence[Layout | None] = (),
    parameters: Layouts | None = None,
    out_layout: Any = None,
    mesh: DeviceMesh = MESH,
    options: EagerOptions | None = None,
    seed: int = 7,
    tolerance: float = 1e-9,
    same_random: bool = True,
) -> list[Collective]:
    """``function`` gives on the mesh what it gives on one device; rank 0's collectives."""
    here = copy.deepcopy(args)
    results, collectives, states = run(
        function,
        *args,
        cuts=cuts,
        parameters=parameters,
        out_layout=out_layout,
        mesh=mesh,
        options=options,
        seed=seed,
    )
    torch.manual_seed(seed)
    expected = function(*here)
    output = join_tree([r.output for r in results], mesh)
    plain = map_tensors(expected, lambda v: v.detach() if isinstance(v, Tensor) else v)
    close(output, plain, "output", tolerance)
    if same_random:
        for state in states:
            assert torch.equal(state, torch.get_rng_state()), "random state"
    objects = objects_of(here, {})
    for index, module in enumerate(objects.modules):
        states_ = [r.modules[index] for r in results]
        for name, p in module.named_parameters():
            close(joined([s.parameters[name] for s in states_], mesh), p.detach(), name, tolerance)
            assert (p.grad is None) == (name not in states_[0].gradients), f"grad of {name}"
            if p.grad is not None:
                grads = [s.gradients[name] for s in states_]
                close(joined(grads, mesh), p.grad.detach(), f"grad of {name}", tolerance)
        for name, b in module.named_buffers():
            close(joined([s.buffers[name] for s in states_], mesh), b, name, tolerance)
    for index, tensor in enumerate(objects.tensors):
        if isinstance(tensor, Tensor) and tensor.is_leaf and tensor.grad is not None:
            grads = [r.gradients[index] for r in results]
            close(joined(grads, mesh), tensor.grad, f"grad of input {index}", tolerance)
        if index in results[0].tensors:
            close(joined([r.tensors[index] for r in results], mesh), tensor, f"input {index}")
        elif isinstance(tensor, Tensor):
            assert torch.equal(tensor, args_tensor(args, index)), f"input {index} was changed"
    for index, optimizer in enumerate(objects.optimizers):
        states_o = [r.optimizers[index] for r in results]
        place = 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                for name, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        pieces = [s.state[place][name] for s in states_o]
                        close(joined(pieces, mesh), value, f"state {name}", tolerance)
                place += 1
    return collectives


def args_tensor(args: Sequence[Any], index: int) -> Any:
    return objects_of(args, {}).tensors[index]


__all__ = ["MESH", "BodyError", "check", "close", "communicator", "layout", "nn", "pool", "run"]
