"""For the server: keeps its workers running; never loads torch itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

from autoshard.api.log import logger
from autoshard.api.settings import Settings

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
STEADY_S = 10.0
"""A nursery that lived so long is replaced at once."""


class Supervisor:
    """One nursery, started again when it dies, after a growing pause where it dies early.

    The nursery and its workers end with this process, however it ends: they hold the other end of
    a pipe.

    Args:
        settings: the server's own; with ``workers=0`` nothing is started.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start the workers; returns at once, they need some seconds to load."""
        if self.settings.workers:
            self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Have the workers finish what they do for up to ``drain_s``, or give it back; blocks."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(drain_s + 7.0)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def pid(self) -> int | None:
        """Of the nursery; None where it does not run."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def _keep(self) -> None:
        failures = 0
        while True:
            with self._lock:
                if self._stopping.is_set():
                    return
                process = self._process = self._popen()
            born = time.monotonic()
            status = process.wait()
            assert process.stdin is not None
            process.stdin.close()
            if self._stopping.is_set():
                return
            logger().warning("workers ended", status=status)
            failures = 0 if time.monotonic() - born > STEADY_S else failures + 1
            pause = min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S) if failures else 0.0
            if self._stopping.wait(pause):
                return

    def _popen(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "autoshard.api.worker", "--supervised"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C is the server's to handle
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self.settings.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        return process
