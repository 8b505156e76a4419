"""What each process runs: the lowered program for one step with its records, then some for time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.plan import Categories
from autoshard.program import Program
from autoshard.runtime.comm import Communicator, Recorder
from autoshard.runtime.custom_ops import CustomOperator, define
from autoshard.runtime.lower import LoweredModule, lower
from autoshard.runtime.processes import World
from autoshard.sharding.collective import Collective
from autoshard.validation.reference import Step, Watcher
from autoshard.validation.tracker import StepTracker
from autoshard.validation.updates import Updates
from autoshard.validation.values import WholeValues, default_dtype


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the processes are to do.

    Attributes:
        program: what is executed.
        values: whole values; each process takes its shards.
        dtype: what operators without floating operands give.
        operators: custom operators that the program calls.
        seed: of the random numbers that operators draw.
        optimizer: whose state and update belong to the memory of a step; empty or ``none`` for
            none.
        weights: values that are parameters or views of them.
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
    optimizer: str = ""
    weights: frozenset[str] = frozenset()
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
        memory: the fullest moment of a step, optimizer included; None where no step was timed.
        peak_bytes: the same as the device's allocator counts it, or on CPU the sum of ``memory``.
    """

    step: Step | None
    issued: list[Collective]
    step_seconds: tuple[float, ...]
    memory: Categories | None
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
    memory: Categories | None = None
    peak: int | None = None
    if job.steps and not job.watch:
        world.progress("measuring memory", 0.6)
        memory, peak = measured(module, inputs, job.optimizer, job.weights)
        world.progress("timing", 0.7)
        seconds = timed(module, inputs, job.steps, world.device)
    return RankResult(
        step=step, issued=issued, step_seconds=seconds, memory=memory, peak_bytes=peak
    )


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


def measured(
    module: LoweredModule, inputs: tuple[Tensor, ...], optimizer: str, weights: frozenset[str]
) -> tuple[Categories, int]:
    """The fullest moment of one whole step, and its bytes as the device counts them.

    A step as people write it: gradients are dropped first, loss and outputs live until it is over.
    """
    updates = Updates(optimizer, module.parameters()) if optimizer not in ("", "none") else None
    module.zero_grad(set_to_none=True)
    one_step(module, inputs)
    if updates is not None:
        updates.step()  # makes the state
    module.zero_grad(set_to_none=True)
    is_cuda = module.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        _whole_step(module, inputs, updates, None)
        module.zero_grad(set_to_none=True)
    counted = torch.cuda.max_memory_allocated() if is_cuda else None
    state = [] if updates is None else updates.state
    nodes = module.program.graph.inputs.values()
    caches = [value for node, value in zip(nodes, inputs, strict=True) if node.is_cache]
    others = [value for node, value in zip(nodes, inputs, strict=True) if not node.is_cache]
    tracker = StepTracker([*module.parameters(), *module.buffers()], others, state, caches)
    comm, before = module.comm, module.comm.recorder
    comm.recorder = _Watch(tracker, weights)
    try:
        with tracker:
            _whole_step(module, inputs, updates, tracker)
    finally:
        comm.recorder = before
        module.zero_grad(set_to_none=True)
    found = tracker.peak()
    return found, found.allocated_bytes if counted is None else counted


def _whole_step(
    module: LoweredModule,
    inputs: tuple[Tensor, ...],
    updates: Updates | None,
    tracker: StepTracker | None,
) -> None:
    loss, outputs = module(*inputs)
    if tracker is not None:
        tracker.backward_begins()
    if loss.requires_grad:
        loss.backward()
    if tracker is not None:
        tracker.finish()
    if updates is not None:
        updates.step()
    del loss, outputs


class _Watch(Recorder):
    """Tells the tracker which all_gather brings a parameter together."""

    def __init__(self, tracker: StepTracker, weights: frozenset[str]) -> None:
        super().__init__()
        self._tracker, self._weights = tracker, weights

    def start(self, collective: Collective, result: Tensor) -> int:
        """Note a collective."""
        if collective.op == "all_gather" and collective.value in self._weights:
            self._tracker.gathered(result)
        return super().start(collective, result)
