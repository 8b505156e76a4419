"""A job's process as its worker sees it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
from typing import Any

from autoshard.api.settings import Limits
from autoshard.api.store import Job, Result
from autoshard.api.worker import body, tree

HEADER = 9


class Child:
    """Forked for one job; of its messages the last progress and the end are kept."""

    def __init__(self, job: Job, limits: Limits, run: body.Run) -> None:
        self.fd, writer = os.pipe()
        os.set_blocking(self.fd, False)
        gc.collect()
        gc.freeze()  # or the first collection of each job copies every page
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            body.main(job, writer, parent, limits, run)
        os.close(writer)
        self._buffer = bytearray()
        self._frames: dict[bytes, bytes] = {}
        self.progress: dict[str, Any] | None = None
        self.open = True

    def read(self) -> None:
        """Take what has arrived; ``open`` becomes False at the end of it."""
        while self.open:
            try:
                data = os.read(self.fd, 1 << 20)
            except BlockingIOError:
                break
            if not data:
                self.open = False
            self._buffer += data
        while len(self._buffer) >= HEADER:
            size = int.from_bytes(self._buffer[1:HEADER], "big")
            if len(self._buffer) < HEADER + size:
                break
            kind, payload = bytes(self._buffer[:1]), bytes(self._buffer[HEADER : HEADER + size])
            del self._buffer[: HEADER + size]
            if kind == b"P":
                self.progress = json.loads(payload)
            else:
                self._frames[kind] = payload

    def result(self) -> Result | None:
        """What it handed in; None where it died before."""
        return body.result_of(self._frames)

    def end(self) -> int:
        """Kill it if it still runs, with all that it started; its exit code (-9: by SIGKILL)."""
        with contextlib.suppress(ProcessLookupError):
            if not self.open:
                _wait_briefly(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        tree.end_all()
        os.close(self.fd)
        return status


def _wait_briefly(pid: int) -> None:
    """The pipe is closed a moment before the process is gone."""
    fd = os.pidfd_open(pid)
    try:
        select.select([fd], [], [], 5.0)
    finally:
        os.close(fd)
