"""Measuring what a step does beside its operators and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autoshard.calibrate.clock import Clock
from autoshard.calibrate.readings import OverlapReading, StepReading, WaitReading
from autoshard.runtime.comm import Communicator
from autoshard.search.memory import optimizer_of

COPY_ELEMENTS = 4 << 20
SHORT_S, LONG_S = 1e-3, 40e-3
LONG_WINDOWS = 5
UPDATED = 8
"""Tensors of an update."""


def copy(clock: Clock, elements: int = COPY_ELEMENTS) -> StepReading:
    """A copy that is longer than a cache."""
    pairs = [(torch.rand(elements, device=clock.device),) * 2 for _ in range(2)]
    pairs = [(x, torch.empty_like(x)) for x, _ in pairs]

    def run() -> None:
        for x, y in pairs:
            y.copy_(x)

    seconds = clock.seconds(run) / len(pairs)
    return StepReading(kind="copy", num_bytes=8 * elements, tensors=1, launches=1, seconds=seconds)


def update(clock: Clock, elements: int) -> StepReading:
    """AdamW's update of some tensors, as torch chooses to do it."""
    tensors = [
        torch.nn.Parameter(torch.rand(elements, device=clock.device)) for _ in range(UPDATED)
    ]
    for t in tensors:
        t.grad = torch.rand_like(t)
    optimizer = torch.optim.AdamW(tensors, lr=1e-6)
    seconds = clock.cold(optimizer.step)
    moved = optimizer_of("adamw").traffic_bytes(elements, "float32", 4)
    return StepReading(
        kind="update",
        num_bytes=UPDATED * moved,
        tensors=UPDATED,
        launches=0,
        seconds=seconds,
    )


def gradients(clock: Clock, sizes: Sequence[int]) -> StepReading:
    """Gradients copied into a message and back."""
    grads = [torch.rand(n, device=clock.device) for n in sizes]

    def run() -> None:
        flat = torch.cat([g.reshape(-1) for g in grads])
        for grad, part in zip(grads, torch.split(flat, list(sizes)), strict=True):
            grad.copy_(part.view_as(grad))

    return StepReading(
        kind="gradients",
        num_bytes=2 * 4 * sum(sizes),
        tensors=len(sizes),
        launches=len(sizes),
        seconds=clock.cold(run),
    )


def step(clock: Clock) -> StepReading:
    """A step of two small operators."""
    parameter = torch.nn.Parameter(torch.rand(16, device=clock.device))
    optimizer = torch.optim.SGD([parameter], lr=0.0)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = (parameter * parameter).sum()
        loss.backward()  # type: ignore[no-untyped-call]

    return StepReading(kind="step", num_bytes=0, tensors=1, launches=4, seconds=clock.cold(run))


def overlap(clock: Clock, comm: Communicator, num_bytes: int) -> OverlapReading:
    """An all_reduce of all processes, beside which products run that take about as long."""
    axes = tuple(range(len(comm.mesh)))
    buffer = torch.rand(num_bytes // 4, device=clock.device)
    a, b = (torch.rand(256, 256, device=clock.device) for _ in range(2))

    def message() -> None:
        comm.start("all_reduce", buffer, axes, async_op=True).wait()

    def product() -> None:
        torch.mm(a, b)

    message_s, product_s = clock.between((message, product))
    count = max(1, round(clock.most(message_s / product_s)))

    def computing() -> None:
        for _ in range(count):
            product()

    def both() -> None:
        pending = comm.start("all_reduce", buffer, axes, async_op=True)
        computing()
        pending.wait()

    message_s, computing_s, both_s = clock.between((message, computing, both))
    return OverlapReading(computing_s=computing_s, message_s=message_s, seconds=both_s)


def wait(clock: Clock, comm: Communicator) -> WaitReading:
    """A small all_reduce of all processes, after a millisecond of products and after forty."""
    axes = tuple(range(len(comm.mesh)))
    buffer = torch.rand(256, device=clock.device)
    a, b = (torch.rand(256, 256, device=clock.device) for _ in range(2))
    once = clock.least(clock.seconds(lambda: torch.mm(a, b)))
    long = replace(clock, window_s=LONG_WINDOWS * clock.window_s)

    def times(seconds: float) -> tuple[Callable[[], None], Callable[[], None]]:
        count = max(1, round(seconds / max(once, 1e-9)))

        def computing() -> None:
            for _ in range(count):
                torch.mm(a, b)

        def both() -> None:
            computing()
            comm.start("all_reduce", buffer, axes).wait()

        return computing, both

    few, few_sent, many, many_sent = long.between((*times(SHORT_S), *times(LONG_S)))
    return WaitReading(
        computing_s=many - few, seconds=max(1e-9, (many_sent - many) - (few_sent - few))
    )
