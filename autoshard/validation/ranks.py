"""What each process runs: the lowered program for one step with its records, then some for time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard.program import Program
from autoshard.runtime.comm import Communicator, Recorder
from autoshard.runtime.custom_ops import CustomOperator, define
from autoshard.runtime.lower import LoweredModule, lower
from autoshard.runtime.processes import World
from autoshard.sharding.collective import Collective
from autoshard.validation.reference import Step, Watcher
from autoshard.validation.values import WholeValues, default_dtype

MEMORY_METHOD = "largest sum of live tensor bytes that torch's dispatcher saw in one step"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the processes are to do.

    Attributes:
        program: what is executed.
        values: whole values; each process takes its shards.
        dtype: what operators without floating operands give.
        operators: custom operators that the program calls.
        seed: of the random numbers that operators draw.
        steps: how many steps are timed, after one to warm up and one whose memory is measured; 0
            for neither.
        watch: whether to keep all operands, results and their gradients.
        keep: whether what the step gave comes back, to be compared.
        before_step: called with the rank before its step, for tests.
    """

    program: Program
    values: WholeValues
    dtype: str = "float32"
    operators: tuple[CustomOperator, ...] = ()
    seed: int = 0
    steps: int = 3
    watch: bool = False
    keep: bool = True
    before_step: Callable[[int], None] | None = None


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one process saw.

    Attributes:
        step: its parts of everything; None where nothing was to be kept.
        issued: collectives, in order.
        step_seconds: of each timed step, in order; empty where none was.
        peak_bytes: see ``MEMORY_METHOD``; None where no step was timed.
    """

    step: Step | None
    issued: list[Collective]
    step_seconds: tuple[float, ...]
    peak_bytes: int | None


def run_rank(world: World, job: Job) -> RankResult:
    """One rank's part of a validation."""
    with default_dtype(job.dtype):
        return _run(world, job)


def _run(world: World, job: Job) -> RankResult:
    program, values = job.program, job.values
    define(job.operators)
    recorder = Recorder()
    comm = Communicator(program.sizes, program.axis_names, recorder, timeout_s=world.timeout_s)
    watcher = Watcher() if job.watch else None
    world.progress("lowering", 0.1)
    module = lower(
        program,
        constants=values.constants,
        parameters=values.parameters,
        buffers=values.buffers,
        comm=comm,
        device=world.device,
        watch=watcher,
    )
    inputs = module.shard_inputs(values.inputs)
    world.progress("one step", 0.3)
    if job.before_step is not None:
        job.before_step(world.rank)
    torch.manual_seed(job.seed)
    loss, outputs = one_step(module, inputs)
    step = _kept(module, loss, outputs, watcher) if job.keep else None
    del loss, outputs
    issued = recorder.collectives
    comm.recorder = None
    seconds: tuple[float, ...] = ()
    peak: int | None = None
    if job.steps and not job.watch:
        world.progress("measuring memory", 0.6)
        module.zero_grad(set_to_none=True)
        peak = peak_bytes(module, inputs)
        world.progress("timing", 0.7)
        seconds = timed(module, inputs, job.steps, world.device)
    return RankResult(step=step, issued=issued, step_seconds=seconds, peak_bytes=peak)


def _kept(
    module: LoweredModule, loss: Tensor, outputs: dict[str, Tensor], watcher: Watcher | None
) -> Step:
    """Copies of what one step gave."""
    stored = module.stored()
    return Step(
        loss=loss.detach().cpu(),
        outputs={path: value.cpu() for path, value in outputs.items()},
        gradients={
            n: s.local.grad.cpu().clone() for n, s in stored.items() if s.local.grad is not None
        },
        buffers={
            n: s.local.detach().cpu().clone()
            for n, s in stored.items()
            if not isinstance(s.local, torch.nn.Parameter)
        },
        forward=watcher.forward if watcher else {},
        backward=watcher.backward if watcher else {},
    )


def one_step(module: LoweredModule, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward."""
    loss, outputs = module(*inputs)
    if loss.requires_grad:
        loss.backward()
    return loss, outputs


def timed(
    module: LoweredModule, inputs: tuple[Tensor, ...], steps: int, device: torch.device
) -> tuple[float, ...]:
    """Seconds of each step, forward and backward; a first one is not counted."""
    found = []
    for index in range(steps + 1):
        module.zero_grad(set_to_none=True)
        _synchronize(device)
        start = time.perf_counter()
        one_step(module, inputs)
        _synchronize(device)
        if index:
            found.append(time.perf_counter() - start)
    return tuple(found)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def peak_bytes(module: LoweredModule, inputs: tuple[Tensor, ...]) -> int:
    """Peak bytes of one step: the device's own count, or on CPU ``MEMORY_METHOD``."""
    if inputs and inputs[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        one_step(module, inputs)
        return torch.cuda.max_memory_allocated()
    live = LiveBytes([*module.parameters(), *module.buffers(), *inputs])
    with live:
        one_step(module, inputs)
    return live.peak


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operators make, while they live.

    Args:
        held: tensors that are there from the start.
    """

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()
        for tensor in held:
            self._see(tensor)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result
