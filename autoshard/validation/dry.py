"""``dry_run``: the full-size program of one device, traced without memory and without others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autoshard.errors import MeshError
from autoshard.graph import Node
from autoshard.program import Program
from autoshard.runtime.comm import Communicator, Recorder
from autoshard.runtime.comm import dry_run as fake_world
from autoshard.runtime.lower import lower
from autoshard.sharding.layout import Layout, forward_half, local_shape
from autoshard.validation.compare import count_differences, first_difference
from autoshard.validation.report import CollectiveCheck, DryRunReport


def dry_run(program: Program, *, coordinate: Sequence[int] | None = None) -> DryRunReport:
    """Trace forward and backward of one device and compare its collectives with the prediction.

    Nothing is allocated or sent: tensors are on torch's meta device, which has shapes and no
    memory, and the process group is torch's fake one. (``FakeTensorMode`` sees the same and takes
    several times as long.)

    Args:
        program: what is executed, of any size, for any number of devices.
        coordinate: which device; None for the one at 0 on every axis.

    Raises:
        MeshError: no such device.
        RequestError: a process group is up in this process already.
    """
    started = time.monotonic()
    sizes = program.sizes
    at = tuple(coordinate) if coordinate is not None else (0,) * len(sizes)
    if len(at) != len(sizes) or not all(0 <= i < n for i, n in zip(at, sizes, strict=False)):
        raise MeshError(f"no device at {at} on a mesh of {sizes}")
    rank = 0
    for index, size in zip(at, sizes, strict=True):
        rank = rank * size + index
    recorder = Recorder()
    with fake_world(prod(sizes), rank):
        comm = Communicator(sizes, program.axis_names, recorder)
        _trace(program, comm)
    predicted, issued = program.collectives(at), recorder.collectives
    return DryRunReport(
        devices=prod(sizes),
        coordinate=at,
        collectives=CollectiveCheck(
            predicted=len(predicted),
            issued=len(issued),
            differences=count_differences(predicted, issued),
            first=first_difference(predicted, issued),
        ),
        nodes=len(program.graph.nodes),
        seconds=time.monotonic() - started,
    )


def _trace(program: Program, comm: Communicator) -> None:
    graph = program.graph
    constants = {c.name: c for c in graph.constants}
    stored = {str(n.attrs["fqn"]): n for n in graph.nodes if n.op in ("parameter", "buffer")}

    def empty(shape: Sequence[int], dtype: str) -> Tensor:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")

    def shard(node: Node) -> Tensor:
        layout: Layout = forward_half(program.strategies[node.name].result)
        return empty(local_shape(node.shape, layout, comm.mesh, comm.coordinate), node.dtype)

    module = lower(
        program,
        constants=lambda name: empty(constants[name].shape, constants[name].dtype),
        parameters=lambda fqn: shard(stored[fqn]),
        buffers=lambda fqn: shard(stored[fqn]),
        comm=comm,
        device="meta",
    )
    inputs = [shard(node) for node in graph.inputs.values()]
    loss, _ = module(*inputs)
    if loss.requires_grad:
        loss.backward()
