"""Loads what planning needs once, then forks workers and keeps them running.

It has one thread, no database connection and computes nothing but one tiny plan, which loads
whatever torch and transformers load on first use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from autoshard.api.log import configure, logger
from autoshard.api.settings import Settings
from autoshard.api.worker import tree

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
"""Set before torch is imported: one thread, no network, no accelerator."""

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
STEADY_S = 2.0
"""A worker that lived so long did start, and is replaced at once; else after a growing pause."""


def warm() -> None:
    """Import what jobs need, so that each fork has it."""
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    from autoshard.api.worker import loop, task  # noqa: F401  # what forks use

    tiny = {"model_type": "gpt2", "n_layer": 2, "n_head": 1, "n_embd": 8, "vocab_size": 16}
    request = {
        "model": {"config": {**tiny, "n_positions": 8}},
        "cluster": {"preset": "h100", "devices": 2},
        "workload": {"global_batch": 2, "seq_len": 4},
        "search": {"trials": 1},
    }
    task.run_request("plan", request, lambda now: None)


class Nursery:
    """See the module.

    Args:
        settings: how many workers, and what they need.
        server: a descriptor that hangs up when the server is gone; None: there is none.
    """

    def __init__(self, settings: Settings, server: int | None) -> None:
        self.settings, self.server = settings, server
        self.stopping = False
        self.workers: dict[int, float] = {}  # pid -> when it was forked
        self._failures = 0
        self._next = 0.0
        self._wakeup, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def run(self) -> None:
        """Keep workers running until SIGTERM, or until the server is gone."""
        if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
            logger().warning("forking with threads", threads=os.listdir("/proc/self/task"))
        while not self.stopping:
            self._fork_missing()
            self._wait(1.0 if self._complete else max(0.01, self._next - time.monotonic()))
            self._reap()
        for pid in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + self.settings.drain_s + 5.0
        while self.workers and time.monotonic() < deadline:
            self._wait(0.1, and_server=False)
            self._reap()
        for pid in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def _complete(self) -> bool:
        return len(self.workers) >= self.settings.workers

    def _fork_missing(self) -> None:
        while not self._complete and time.monotonic() >= self._next:
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                self._become_worker(parent)
            self.workers[pid] = time.monotonic()

    def _reap(self) -> None:
        for pid, born in list(self.workers.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            del self.workers[pid]
            if self.stopping:
                continue
            code = os.waitstatus_to_exitcode(status)
            logger().warning("worker ended", pid=pid, status=code)
            self._failures = 0 if time.monotonic() - born > STEADY_S else self._failures + 1
            if self._failures > 1:
                pause = min(FIRST_WAIT_S * 2 ** (self._failures - 2), LONGEST_WAIT_S)
                self._next = time.monotonic() + pause

    def _wait(self, seconds: float, *, and_server: bool = True) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if self.server is not None and and_server:
            poll.register(self.server, 0)
        ready = {fd for fd, _ in poll.poll(seconds * 1e3)}
        if self._wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 4096)
        if self.server in ready:
            self.stopping = True

    def _become_worker(self, parent: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(self._wakeup)
            os.close(self._wake)
            # One that lives on alone finishes its job within the time to drain.
            tree.die_with(parent, signal.SIGTERM)
            from autoshard.api.store import Store
            from autoshard.api.worker.loop import Worker
            from autoshard.api.worker.task import run_request

            store = Store.open(self.settings.database)
            Worker(self.settings, store, run_request, self.server).run()
            store.close()
            status = 0
        except BaseException as error:
            logger().error("worker failed", exc_info=error)
        finally:
            os._exit(status)


@contextlib.contextmanager
def _dying_with(server: int | None) -> Iterator[None]:
    """Inside the block, which takes seconds and looks at nothing, SIGIO ends this process."""
    if server is None:
        yield
        return
    flags = fcntl.fcntl(server, fcntl.F_GETFL)
    fcntl.fcntl(server, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(server, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(server, 0)
    if poll.poll(0):
        sys.exit("the server is gone")
    yield
    fcntl.fcntl(server, fcntl.F_SETFL, flags)


def main(settings: Settings, server: int | None) -> NoReturn:
    """Be a nursery, from a process that has one thread and no torch yet."""
    os.environ.update(ENVIRONMENT)
    configure(settings.log_format)
    started = time.monotonic()
    with _dying_with(server):
        warm()
    logger().info("workers are ready", seconds=round(time.monotonic() - started, 1))
    Nursery(settings, server).run()
    os._exit(0)  # tearing torch down takes a second, and there is nothing to tear down
