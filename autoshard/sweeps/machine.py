"""Who may compute on this machine: any number of planners, or one measurement.

A measurement that shares its cores with anything measures that too. So each point holds a lock of
this machine while it runs, a planned one shared with others, a measured one alone. The locks are
``flock`` on two files of this user's: the kernel lets go of them when a process ends, however it
does. All sweeps of one user on one machine keep to them, whatever store they write to; what else
runs there is the user's to stop.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DIRECTORY = "AUTOSHARD_LOCKS"
"""Names another folder for the locks."""


@contextmanager
def computing(*, alone: bool) -> Iterator[None]:
    """Wait for this machine, and hold it for the time of the block.

    Args:
        alone: nobody else computes meanwhile; else anybody may who does not ask to be alone.
    """
    folder = Path(
        os.environ.get(DIRECTORY) or Path(tempfile.gettempdir()) / f"autoshard-{os.getuid()}"
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Who waits to be alone stands in the door, so that planners cannot take turns for ever.
    with _held(folder / "door", fcntl.LOCK_EX):
        room = _held(folder / "room", fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        room.__enter__()
    try:
        yield
    finally:
        room.__exit__(None, None, None)


@contextmanager
def _held(path: Path, kind: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)
