"""How a rank is watched while it runs a body. Nothing of this runs when nobody watches."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoshard.runtime.comm import Communicator, Pending, Recorder, Reduction
from autoshard.runtime.pairs import Exchange
from autoshard.runtime.watch.records import CollectiveRecord, RankTrace, Span
from autoshard.sharding.collective import Collective, CollectiveOp, Phase

_TELL_S = 1.0


class TimedRecorder(Recorder):
    """Also keeps when each collective was done, how long it held the program up, and spans."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[tuple[Collective, float]] = []
        self.done: dict[int, float] = {}
        self.waited: dict[int, float] = {}
        self.blocked: dict[int, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        self.gradient_bytes = 0

    def start(self, collective: Collective, result: torch.Tensor) -> int:
        """Note a collective as issued now."""
        self.issued.append((collective, time.perf_counter()))
        return super().start(collective, result)

    def finish(self, number: int) -> None:
        """Note that a collective was waited for."""
        self.waited.setdefault(number, time.perf_counter())
        super().finish(number)

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        for kept in (self.issued, self.done, self.waited, self.blocked, self.spans):
            kept.clear()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A stretch of the program that has a name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append((name, start, time.perf_counter()))

    def trace(
        self,
        *,
        rank: int,
        coordinate: tuple[int, ...],
        start_s: float,
        end_s: float,
        offset_s: float,
        memory_bytes: dict[str, int],
    ) -> RankTrace:
        """All that was seen, with times moved by ``offset_s``."""
        records = []
        for number, (collective, issued) in enumerate(self.issued):
            waited = self.waited.get(number, issued)
            # Done is told by another thread, at times a little after the wait has ended.
            done = min(self.done.get(number, waited), max(waited, issued))
            blocked = self.blocked.get(number, 0.0)
            records.append(
                CollectiveRecord(
                    op=collective.op,
                    axes=collective.axes,
                    bytes=collective.num_bytes,
                    phase=collective.phase,
                    value=collective.value,
                    start_s=issued + offset_s,
                    end_s=max(done, issued + blocked) + offset_s,
                    blocked_s=blocked,
                )
            )
        spans = sorted(self.spans, key=lambda span: span[1])
        return RankTrace(
            rank=rank,
            coordinate=coordinate,
            start_s=start_s + offset_s,
            end_s=end_s + offset_s,
            collectives=tuple(records),
            spans=tuple(Span(n, a + offset_s, b + offset_s) for n, a, b in spans),
            memory_bytes=memory_bytes,
        )


class _TimedPending(Pending):
    """A collective under way whose wait is timed."""

    __slots__ = ("_inner", "_times", "_which")

    def __init__(self, inner: Pending, times: dict[int, float], number: int) -> None:
        self._inner, self._times, self._which = inner, times, number

    def wait(self) -> torch.Tensor:
        """The result, once it is there."""
        start = time.perf_counter()
        result = self._inner.wait()
        self._times.setdefault(self._which, time.perf_counter() - start)
        return result


class TimedCommunicator(Communicator):
    """A communicator that tells a :class:`TimedRecorder` how long each wait took.

    Attributes:
        tell: called now and then while collectives are issued, so that a caller who waits for a
            long loop knows that it goes on.
    """

    tell: Callable[[], object] | None = None
    _told_s = 0.0

    def start(
        self,
        op: CollectiveOp,
        buffer: torch.Tensor,
        axes: tuple[int, ...],
        *,
        reduction: Reduction = "sum",
        phase: Phase = "forward",
        value: str = "",
        async_op: bool = False,
    ) -> Pending:
        """Issue a collective; see :meth:`Communicator.start`."""
        if self.tell is not None and (now := time.monotonic()) - self._told_s > _TELL_S:
            self._told_s = now
            self.tell()
        recorder = self.recorder
        issue = partial(
            super().start,
            op,
            buffer,
            axes,
            reduction=reduction,
            phase=phase,
            value=value,
            async_op=async_op,
        )
        if not isinstance(recorder, TimedRecorder):
            return issue()
        number = len(recorder.issued)
        start = time.perf_counter()
        pending = issue()
        if len(recorder.issued) == number:  # a group of one rank
            return pending
        if not async_op:
            recorder.blocked[number] = time.perf_counter() - start
            return pending
        _note_done(pending, recorder, number)
        return _TimedPending(pending, recorder.blocked, number)


def _note_done(pending: Pending, recorder: TimedRecorder, number: int) -> None:
    work: Any = pending._work
    if work is None:
        return

    def note(_: object) -> None:
        recorder.done[number] = time.perf_counter()

    if isinstance(work, Exchange):  # it has no thread: done when it is waited for
        return
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a backend without futures
        work.get_future().add_done_callback(note)


class MemoryWatch:
    """What this process holds at most, beyond what it held when the watch began.

    On an accelerator: bytes that torch's allocator gave out. On CPU, on Linux: resident memory,
    whose high-water mark the kernel keeps and forgets when asked.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = 0
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)
            self._before = torch.accelerator.memory_allocated(device)
        elif sys.platform == "linux":
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
                self._before = _resident("VmRSS")

    def peak_bytes(self) -> int | None:
        """The peak so far, or None where it is not known."""
        if self.device.type != "cpu":
            peak = torch.accelerator.max_memory_allocated(self.device)
        elif self._before:
            peak = _resident("VmHWM")
        else:
            return None
        return max(0, peak - self._before)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def clock_offset_s() -> float:
    """What to add to ``time.perf_counter()`` to get seconds since the epoch."""
    return time.time() - time.perf_counter()


@contextmanager
def named_spans(recorder: TimedRecorder) -> Iterator[None]:
    """Record backward passes and optimizer steps while the context is open.

    A span of backward is the autograd engine's own run, with the messages it waits for.
    """
    optimizing: list[float] = []

    def before(optimizer: Any, *_: object) -> None:
        with torch._C.DisableTorchFunction():  # local sizes, also where shapes read as global
            gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
            held = sum(g.nbytes for g in gradients if g is not None)
        recorder.gradient_bytes = max(recorder.gradient_bytes, held)
        optimizing.append(time.perf_counter())

    def after(*_: object) -> None:
        recorder.spans.append(("optimizer", optimizing.pop(), time.perf_counter()))

    from torch.optim import optimizer as optim

    run = torch.autograd.graph._engine_run_backward
    # Whoever runs the engine has it under this name.
    users: list[Any] = [torch.autograd, sys.modules.get("autoshard.runtime.eager.autograd")]
    users = [user for user in users if hasattr(user, "_engine_run_backward")]

    def timed(*args: Any, **kwargs: Any) -> Any:
        with recorder.span("backward"):
            return run(*args, **kwargs)

    hooks = [
        optim.register_optimizer_step_pre_hook(before),
        optim.register_optimizer_step_post_hook(after),
    ]
    for user in users:
        user._engine_run_backward = timed
    try:
        yield
    finally:
        for user in users:
            user._engine_run_backward = run
        for hook in hooks:
            hook.remove()
