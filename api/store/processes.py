"""Names of worker processes, from which others on the same machine see that one is gone.

A name holds the machine's boot id and the pid namespace, then pid and start time: a pid that was
given to another process later, or that means something else in another container, is no match.
"""

from __future__ import annotations

import functools
import os
import secrets
from pathlib import Path


@functools.cache
def host() -> str:
    """Names this boot of this machine, and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot}/{namespace}"


def identity(pid: int | None = None) -> str:
    """A new name for this process (or for one of its children) as a worker."""
    pid = os.getpid() if pid is None else pid
    return f"{host()}/{pid}/{_started(pid)}/{secrets.token_hex(4)}"


def is_gone(worker: str) -> bool:
    """Whether the process was on this machine and is there no longer.

    False where that cannot be known: it is on another machine, or in another container.
    """
    parts = worker.split("/")
    if len(parts) != 5 or "/".join(parts[:2]) != host() or not parts[2].isdigit():
        return False
    return _started(int(parts[2])) != parts[3]


def _started(pid: int) -> str | None:
    """Start time of a living process, in clock ticks since the boot."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else fields[19]
