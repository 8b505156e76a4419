"""Measuring messages: each kind, over sizes, over each tier, as the runtime issues them.

A message stands between two pieces of computing, as in a step: a process that was just computing
is not waiting at the other end, one that waits is asleep, and what it sends was made a while ago:
the caches are swept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from autoshard.calibrate.clock import Clock
from autoshard.calibrate.readings import MessageReading
from autoshard.runtime.comm import Communicator
from autoshard.sharding.collective import MessageOp
from autoshard.sharding.layout import Shape

BETWEEN_S = 1e-3
"""Seconds of computing between messages, about those of an operator of a small model."""

LONG_S = 0.5
"""A message that takes as long shows the bandwidth; larger ones of its kind would show no more."""

TRIES = 4
"""How often a message is measured that is lost in the noise of the computing around it."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """How the processes stand on hosts.

    Attributes:
        count: number of hosts.
        each: processes on each of them; ranks of one host are neighbours.
    """

    count: int
    each: int

    def groups(self) -> Iterator[tuple[Shape, tuple[int, ...], bool]]:
        """(mesh, axes, alone) that are measured: inside a host, across hosts, everything."""
        if self.each > 1:
            yield (self.count, self.each), (1,), False
        if self.each > 3 and self.each % 2 == 0:
            yield (self.count * self.each // 2, 2), (1,), False
            if self.count == 1:
                yield (self.each // 2, 2), (0,), False
        if self.count > 1:
            yield (self.count, self.each), (0,), False
            if self.each > 1:
                yield (self.count, self.each), (0,), True
                yield (self.count, self.each), (0, 1), False


def measure(
    comm: Communicator,
    axes: tuple[int, ...],
    op: MessageOp,
    num_bytes: int,
    clock: Clock,
    *,
    alone: bool,
) -> MessageReading | None:
    """Seconds of one message between two products; with ``alone`` the first group only sends.

    None, on every process, where several tries found no process that waited for it.
    """
    members = comm.size(axes)
    elements = max(1, num_bytes // 4 // members)
    sends = not alone or all(c == 0 for a, c in enumerate(comm.coordinate) if a not in axes)
    send = _sender(comm, axes, op, elements, clock.device)
    a, b = (torch.rand(256, 256, device=clock.device) for _ in range(2))

    def product() -> None:
        torch.mm(a, b)

    count = int(clock.least(max(1, round(BETWEEN_S / max(clock.seconds(product), 1e-9)))))

    def computing() -> None:
        for _ in range(count):
            product()
        clock.sweep()

    def both() -> None:
        computing()
        if sends:
            send()

    for _ in range(TRIES):
        seconds = clock.beyond(computing, both)
        if alone:
            seconds = clock.most(seconds if sends else 0.0)
        if clock.least(seconds) > 0:
            break
    else:
        return None
    return MessageReading(
        op=op,
        mesh=comm.mesh,
        axes=axes,
        num_bytes=4 * elements * (1 if op == "send_recv" else members),
        alone=alone,
        seconds=seconds,
    )


def _sender(
    comm: Communicator,
    axes: tuple[int, ...],
    op: MessageOp,
    elements: int,
    device: torch.device,
) -> Callable[[], object]:
    if op == "send_recv":
        sent = torch.ones(elements, device=device)
        return lambda: comm.shift(sent, axes)
    shape = (elements,) if op == "all_gather" else (comm.size(axes), elements)
    tensor = torch.ones(shape, device=device)
    return lambda: comm.start(op, tensor, axes).wait()
