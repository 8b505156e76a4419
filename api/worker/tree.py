"""The processes below this one: their memory, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int, how: signal.Signals) -> None:
    """Have this process get a signal when the thread that forked it ends (Linux).

    Args:
        parent: its pid; where it is gone already this process ends at once.
        how: the signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(how))
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every process below whose own parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def own_bytes(pid: int) -> int:
    """Anonymous and shared memory of a process; pages that n processes have count for 1/n."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii", "replace")
    except OSError:
        return 0
    lines = [line.split() for line in text.splitlines()]
    return 1024 * sum(int(line[1]) for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))


def data_bytes() -> int:
    """Private writable memory of this process, resident or not: what RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
        if line.startswith("VmData"):
            return 1024 * int(line.split()[1])
    return 0


def descendants() -> list[int]:
    """Every process below this one."""
    with contextlib.suppress(psutil.Error):
        return [p.pid for p in psutil.Process().children(recursive=True)]
    return []


def bytes_below() -> int:
    """Memory of all processes below this one."""
    return sum(own_bytes(pid) for pid in descendants())


def end_all(wait_s: float = 5.0) -> None:
    """Kill every process below this one, those in sessions of their own too, and reap them.

    This process must have called :func:`adopt_orphans`, or some could escape.
    """
    deadline = time.monotonic() + wait_s
    while (below := descendants()) and time.monotonic() < deadline:
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        reap_all()


def reap_all() -> None:
    """Collect every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
