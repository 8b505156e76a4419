"""What ranks run in the tests of lowered programs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.device_mesh import init_device_mesh

from autoshard.program import Program
from autoshard.runtime.comm import Communicator, Recorder
from autoshard.runtime.lower import LoweredModule, lower
from autoshard.runtime.processes import World
from autoshard.validation import WholeValues
from autoshard.validation.ranks import one_step
from tests.live import LiveBytes


def lowered(program: Program, values: WholeValues) -> LoweredModule:
    return lower(
        program,
        constants=values.constants,
        parameters=values.parameters,
        buffers=values.buffers,
        comm=Communicator(program.sizes, program.axis_names, Recorder()),
    )


def backward(module: LoweredModule, values: WholeValues) -> None:
    loss, _ = module(*module.shard_inputs(values.inputs))
    loss.backward()


def furthest(module: LoweredModule, right: Mapping[str, Tensor], times: float) -> float:
    """Largest difference of the whole gradients from ``times`` the right ones."""
    found = module.full_gradients()
    assert found.keys() == right.keys()
    return max(float((found[n] - times * right[n]).abs().max()) for n in right)


def messages(module: LoweredModule) -> int:
    recorder = module.comm.recorder
    assert recorder is not None
    return len(recorder.collectives)


def accumulate(
    world: World, program: Program, values: WholeValues, right: dict[str, Tensor]
) -> dict[str, float]:
    """Differences after several ways to call backward several times."""
    out: dict[str, float] = {}
    module = lowered(program, values)
    backward(module, values)
    out["once"] = furthest(module, right, 1)
    backward(module, values)
    out["twice, summed each time"] = furthest(module, right, 2)
    with module.no_sync():
        backward(module, values)
    backward(module, values)
    out["then deferred, then summed"] = furthest(module, right, 4)
    module.zero_grad(set_to_none=False)
    with module.no_sync():
        backward(module, values)
        backward(module, values)
    backward(module, values)
    out["zeroed, two deferred, one summed"] = furthest(module, right, 3)
    with module.no_sync():
        backward(module, values)
    module.zero_grad()
    backward(module, values)
    out["deferred ones dropped"] = furthest(module, right, 1)
    return out


def deferred_messages(world: World, program: Program, values: WholeValues) -> tuple[int, int]:
    """Messages of a step with and without ``no_sync``."""
    module = lowered(program, values)
    backward(module, values)
    all_of_them = messages(module)
    with module.no_sync():
        backward(module, values)
    return all_of_them, messages(module) - all_of_them


def without_one_gradient(
    world: World, program: Program, values: WholeValues, right: dict[str, Tensor], name: str
) -> float:
    """A gradient that never arrives keeps nobody waiting."""
    module = lowered(program, values)
    module.get_parameter(name).requires_grad_(False)
    backward(module, values)
    assert module.get_parameter(name).grad is None
    return furthest(module, {n: g for n, g in right.items() if n != name}, 1)


def after_an_error(
    world: World, program: Program, values: WholeValues, right: dict[str, Tensor]
) -> float:
    """A backward that raised midway leaves nothing behind that the next one stumbles over."""
    module = lowered(program, values)
    failing = next(iter(module.parameters()))

    def fail(_: Tensor) -> None:
        raise RuntimeError("midway")

    hook = failing.register_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="midway"):
        backward(module, values)
    hook.remove()
    module.zero_grad()
    backward(module, values)
    return furthest(module, right, 1)


def beside_autograd_grad(
    world: World, program: Program, values: WholeValues, right: dict[str, Tensor]
) -> float:
    """``torch.autograd.grad`` leaves ``.grad`` alone."""
    module = lowered(program, values)
    backward(module, values)
    loss, _ = module(*module.shard_inputs(values.inputs))
    torch.autograd.grad(loss, list(module.parameters()))
    return furthest(module, right, 1)


def peak_and_gradients(
    world: World, program: Program, values: WholeValues
) -> tuple[int, dict[str, Tensor]]:
    module = lowered(program, values)
    inputs = module.shard_inputs(values.inputs)
    with LiveBytes([*module.parameters(), *module.buffers(), *inputs]) as live:
        one_step(module, inputs)
    return live.peak, module.full_gradients()


def whole_state(world: World, program: Program, values: WholeValues) -> dict[str, Tensor]:
    return lowered(program, values).full_state_dict()


def save(world: World, program: Program, values: WholeValues, path: str) -> list[str]:
    """Save; gives the placements of every parameter."""
    module = lowered(program, values)
    mesh = init_device_mesh("cpu", program.sizes, mesh_dim_names=program.axis_names)
    state = module.dtensor_state_dict(mesh)
    save_state(dict(state), checkpoint_id=path)
    return [f"{n}: {t.placements}" for n, t in state.items()]


def load(world: World, program: Program, values: WholeValues, path: str) -> dict[str, Tensor]:
    """Load into a module with other values; gives its whole state."""
    module = lowered(program, values)
    mesh = init_device_mesh("cpu", program.sizes, mesh_dim_names=program.axis_names)
    state = module.dtensor_state_dict(mesh)
    load_state(dict(state), checkpoint_id=path)
    module.load_dtensor_state_dict(state)
    return module.full_state_dict()


def train(world: World, program: Program, values: WholeValues, steps: int) -> list[float]:
    module = lowered(program, values)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = module(*module.shard_inputs(values.inputs))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
