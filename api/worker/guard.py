"""What a job's process may not touch while it builds a model that somebody sent.

The configs are checked before, and nothing in the planner opens what a config names; this is the
wall behind that: Python itself refuses to open files outside of the installed packages, to write,
to connect, to start programs and to unpickle. It cannot be taken down from inside of Python.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import autoshard.api
import autoshard.runtime
import autoshard.search

REFUSED = frozenset(
    {
        *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"),
        *("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink"),
        *("pickle.find_class", "pty.spawn", "shutil.rmtree", "subprocess.Popen"),
        *("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"),
    }
)
"""Audit events of Python's library."""

DEVICES = ("/dev/null", "/dev/urandom", "/proc/", "/sys/")


class _Guard:
    def __init__(self) -> None:
        self.up = False
        kinds = ("purelib", "platlib", "stdlib", "platstdlib")
        ours = (autoshard, autoshard.api, autoshard.runtime, autoshard.search)
        folders = [sysconfig.get_path(kind) for kind in kinds]
        folders += [path for package in ours for path in package.__path__]
        self.roots = tuple(os.path.realpath(f) + os.sep for f in folders)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.up:
            return
        if event in REFUSED:
            raise PermissionError(f"{event} is not allowed while a model is built")
        if event == "open" and isinstance(arguments[0], str | bytes):
            self.check(os.fsdecode(arguments[0]), arguments[2])

    def check(self, name: str, flags: int) -> None:
        path = os.path.realpath(name)
        reads = flags & os.O_ACCMODE == os.O_RDONLY
        allowed = path.startswith(DEVICES) or (reads and path.startswith(self.roots))
        if not allowed:
            raise PermissionError("no file is opened while a model is built")


_guard: _Guard | None = None


@contextmanager
def guarded() -> Iterator[None]:
    """Refuse all of it inside the block."""
    global _guard
    if _guard is None:
        tempfile.gettempdir()  # torch asks for it, and it is found by writing a file
        _guard = _Guard()
        sys.addaudithook(_guard)
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _guard.up = True
    try:
        yield
    finally:
        _guard.up = False
        sys.dont_write_bytecode = bytecode
