"""A worker: claims a job, has it run in a process of its own, and tells the store.

One thread, which waits at one place for everything: the job's messages, a signal, the end of the
server, and the next thing that is due.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import time
from dataclasses import dataclass

from autoshard.api.log import logger
from autoshard.api.settings import Settings
from autoshard.api.store import Lease, Result, Store, StoreError, processes
from autoshard.api.worker import problems, tree
from autoshard.api.worker.body import Run
from autoshard.api.worker.child import Child

POLL_S = 0.1  # how often an idle worker asks for a job
REAP_S = 1.0
WATCH_S = 0.5  # memory
TELL_S = 0.2  # at most five progress events a second
HEAR_S = 1.0  # how soon a running job hears that it was cancelled
PATIENCE_S = 60.0  # how long to wait for a database that is away, before a finished job is dropped


@dataclass(slots=True)
class _Due:
    """Something that is done every so often."""

    every_s: float
    at: float = 0.0

    def now(self) -> bool:
        """Whether it is time; then the next time is set."""
        moment = time.monotonic()
        if moment < self.at:
            return False
        self.at = moment + self.every_s
        return True


class Worker:
    """See the module.

    Args:
        settings: of leases and limits.
        store: opened by this process.
        run: does a job, in a process of its own.
        server: a descriptor that hangs up when the server is gone; None: there is none.
    """

    def __init__(
        self, settings: Settings, store: Store, run: Run, server: int | None = None
    ) -> None:
        self.settings, self.store, self.run_job, self.server = settings, store, run, server
        self.name = processes.identity()
        self.stop_at: float | None = None  # when a running job is given back, once told to stop
        self.orphan = False
        self._wakeup, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._told_to_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        tree.adopt_orphans()
        self._reap = _Due(REAP_S)
        self._seen = _Due(settings.lease_s / 3)

    def _told_to_stop(self, *_: object) -> None:
        if self.stop_at is None:
            self.stop_at = time.monotonic() + self.settings.drain_s

    @property
    def stopping(self) -> bool:
        """Whether no further job is begun."""
        return self.orphan or self.stop_at is not None

    def run(self) -> None:
        """Work until SIGTERM, or until the server is gone."""
        wait_s = POLL_S
        self._wait(0.0)
        while not self.stopping:
            try:
                self._housekeeping()
                lease = self.store.claim(self.name, self.settings.lease_s)
                wait_s = POLL_S
            except StoreError as error:
                logger().warning("database away", worker=self.name, error=str(error))
                lease, wait_s = None, min(2 * wait_s, 5.0)
            if lease is None:
                self._wait(wait_s)
            else:
                self.work(lease)
        with contextlib.suppress(StoreError):
            self.store.seen(self.name, 0)

    def _housekeeping(self) -> None:
        if self._seen.now():
            self.store.seen(self.name, self.settings.lease_s)
        if self._reap.now() and (count := self.store.reap(self.settings.attempts)):
            logger().info("jobs queued again", count=count)

    def _wait(self, seconds: float, *others: int) -> None:
        """Until something is to be read, a signal came, the server went, or so long."""
        poll = select.poll()
        for fd in (self._wakeup, *others):
            poll.register(fd, select.POLLIN)
        if self.server is not None:
            poll.register(self.server, 0)  # a hang-up is always told
        ready = {fd for fd, _ in poll.poll(max(0.0, seconds) * 1e3)}
        if self._wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 4096)
        if self.server in ready:
            self.orphan = True

    def work(self, lease: Lease) -> None:
        """Run a claimed job to one of its ends, or give it back."""
        logger().info("job begun", job=lease.job.id, attempt=lease.job.attempt, worker=self.name)
        child = Child(lease.job, self.settings.limits, self.run_job)
        try:
            verdict = self._watch(lease, child)
            status = child.end()
        except BaseException:
            child.end()
            raise
        match verdict:
            case "lost":
                logger().warning("lease lost", job=lease.job.id, worker=self.name)
            case "stop":
                self._insist(lambda: self.store.release(lease))
                logger().info("job given back", job=lease.job.id, worker=self.name)
            case "cancel":
                self._end(lease, None)
            case Result():
                self._end(lease, verdict)
            case "ended":
                self._end(lease, child.result() or self._death(lease, status))

    def _watch(self, lease: Lease, child: Child) -> Result | str:
        """Until the job's process has ended, or has to."""
        limits = self.settings.limits
        ends = time.monotonic() + limits.job_s
        beat = _Due(min(HEAR_S, self.settings.lease_s / 4))
        tell, watch = _Due(TELL_S), _Due(WATCH_S)
        quiet = min(HEAR_S, self.settings.lease_s / 4, WATCH_S)
        while True:
            self._wait(TELL_S if child.progress else quiet, child.fd)
            child.read()
            if not child.open:
                if child.progress:
                    with contextlib.suppress(StoreError):
                        self.store.progress(lease, child.progress)
                return "ended"
            if self.orphan or (self.stop_at is not None and time.monotonic() > self.stop_at):
                return "stop"
            if time.monotonic() > ends:
                return Result(problem=problems.too_long(limits.job_s))
            if watch.now() and tree.bytes_below() > limits.job_bytes:
                return Result(problem=problems.too_much_memory(limits.job_bytes))
            try:
                if beat.now():
                    answer = self.store.heartbeat(lease, self.settings.lease_s)
                    if answer != "go on":
                        return answer
                    self._housekeeping()
                if child.progress and tell.now():
                    news, child.progress = child.progress, None
                    if not self.store.progress(lease, news):
                        return "lost"
            except StoreError as error:
                logger().warning("database away", worker=self.name, error=str(error))

    def _death(self, lease: Lease, status: int) -> Result:
        """Its process died without a word: the job is not run again, it would die again."""
        if status == -signal.SIGKILL:
            # Where a whole container is killed this worker is next. Then it is no fault of the
            # job's, and it must not be written down as one.
            time.sleep(1.0)
        log_id = secrets.token_hex(8)
        logger().error("job died", job=lease.job.id, status=status, log_id=log_id)
        return Result(problem=problems.crashed(status, log_id))

    def _end(self, lease: Lease, result: Result | None) -> None:
        self._insist(lambda: self.store.finish(lease, result))
        logger().info("job ended", job=lease.job.id, worker=self.name)

    def _insist(self, write: object) -> None:
        """Write; wait for a database that is away."""
        assert callable(write)
        deadline, wait_s = time.monotonic() + PATIENCE_S, POLL_S
        while True:
            try:
                write()
                return
            except StoreError as error:
                logger().warning("database away", worker=self.name, error=str(error))
                if self.orphan or time.monotonic() > deadline:
                    return  # the lease ends, and another runs the job again
            self._wait(wait_s)
            wait_s = min(2 * wait_s, 5.0)
