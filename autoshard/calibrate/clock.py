"""How seconds are taken: means over windows in which every process works, and their median.

Where processes share cores, one call is either interrupted or not, so the median of calls says
nothing; over a window of many calls every process has had its turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch

from autoshard.runtime.comm import Communicator, Reduction

SWEEP_BYTES = 32 << 20
"""More than the caches that a core has for itself, and than what is left to it of a shared one."""

Parts = Sequence[float]
"""Seconds of the parts of one call."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Takes the time of calls, on all processes together.

    Args:
        device: where the calls compute.
        comm: of all processes; None: there is one.
        window_s: seconds that one window lasts.
        windows: how many.
    """

    device: torch.device
    comm: Communicator | None = None
    window_s: float = 0.06
    windows: int = 3
    swept: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "swept", torch.zeros(SWEEP_BYTES // 4, device=self.device))

    def now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def sweep(self) -> None:
        """Read and write so much that nothing used before is in a cache."""
        self.swept.add_(1.0)

    def parts(self, call: Callable[[], Parts]) -> tuple[float, ...]:
        """Mean seconds of each part of ``call`` in the window that is the median."""
        call()
        began = self.now()
        call()
        count = self._repetitions(self.now() - began)
        found = []
        for _ in range(self.windows):
            self.meet()
            rows = [tuple(call()) for _ in range(count)]
            found.append([fmean(column) for column in zip(*rows, strict=True)])
        return tuple(median(column) for column in zip(*found, strict=True))

    def seconds(self, call: Callable[[], object]) -> float:
        """Mean seconds of ``call`` in the window that is the median."""
        (found,) = self.between((call,))
        return found

    def cold(self, call: Callable[[], object]) -> float:
        """The same, where each call finds swept caches."""

        def once() -> Parts:
            self.sweep()
            began = self.now()
            call()
            return (self.now() - began,)

        (found,) = self.parts(once)
        return found

    def between(self, calls: Sequence[Callable[[], object]]) -> tuple[float, ...]:
        """Mean seconds of each of several calls, whose windows take turns."""
        return tuple(median(row) for row in self._windows(calls))

    def beyond(self, call: Callable[[], object], more: Callable[[], object]) -> float:
        """Seconds of ``more`` beyond those of ``call``: the median of windows side by side.

        The machine's speed drifts; two windows that follow each other have the same.
        """
        without, with_more = self._windows((call, more))
        return median([b - a for a, b in zip(without, with_more, strict=True)])

    def _windows(self, calls: Sequence[Callable[[], object]]) -> list[list[float]]:
        counts = []
        for call in calls:
            call()
            self.meet()
            began = self.now()
            call()
            counts.append(self._repetitions(self.now() - began))
        found: list[list[float]] = [[] for _ in calls]
        for _ in range(self.windows):
            for row, call, count in zip(found, calls, counts, strict=True):
                self.meet()
                began = self.now()
                for _ in range(count):
                    call()
                row.append((self.now() - began) / count)
        return found

    def meet(self) -> None:
        """Wait for the other processes."""
        self.least(0.0)

    def least(self, value: float) -> float:
        """The least that any process has."""
        return self._agreed(value, "min")

    def most(self, value: float) -> float:
        """The most that any process has."""
        return self._agreed(value, "max")

    def _agreed(self, value: float, op: Reduction) -> float:
        if self.comm is None:
            return value
        found = torch.tensor(value, dtype=torch.float64)
        return float(self.comm.all_reduce(found, op, tuple(range(len(self.comm.mesh)))))

    def _repetitions(self, seconds: float) -> int:
        """The same on every process: the fewest of what they found.

        A call that is longer than a window has its turns within itself, once is enough.
        """
        fewest = 2 if seconds < self.window_s else 1
        return int(self.least(max(fewest, min(2000, int(self.window_s / max(seconds, 1e-9))))))
