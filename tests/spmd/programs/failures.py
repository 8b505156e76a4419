"""One failure after another in one script: each is told within 15 s, and the next call works."""

import os
import sys
import threading
import time

import numpy as np
import psutil
import torch

from autoshard import (
    AutoshardError,
    DeviceMesh,
    InputError,
    MeshError,
    PartitionSpec,
    RankError,
    spmd,
)

mesh = DeviceMesh(devices=[0, 1, 2, 3], axis_names=["data"])
x = np.arange(8.0)


@spmd(mesh=mesh, in_shardings=[PartitionSpec("data")])
def total(x):
    return x.sum()


def raises_on_one(x):
    if torch.distributed.get_rank() == 2:
        raise ValueError("rank 2 has had enough")
    return x.sum()


def is_killed(x):
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), 9)
    return x.sum()


def leaves(x):
    sys.exit(5)


def hangs(x):
    if torch.distributed.get_rank() == 3:
        time.sleep(60)
    return x.sum()


class Odd(Exception):
    """An exception that does not survive being sent."""

    def __init__(self, a, b):
        super().__init__(a)


def raises_oddly(x):
    raise Odd("strange", lambda: 0)


lock = threading.Lock()


def uses_a_lock(x):
    with lock:
        return x.sum()


def run(function, **options):
    return spmd(mesh=mesh, in_shardings=[PartitionSpec("data")], **options)(function)


larger = DeviceMesh.of(data=1_000_000)
other = DeviceMesh(devices=[4, 5], axis_names=["data"])
FAILURES = {
    "exception on one rank": (run(raises_on_one), RankError, "rank 2 of 4 raised ValueError"),
    "killed rank": (run(is_killed), RankError, "rank 1 of 4 was killed by SIGKILL"),
    "exit": (run(leaves), RankError, "SystemExit|left with exit status 5"),
    "silence": (run(hangs, timeout_s=3), RankError, "3 s"),
    "exception that cannot be sent": (run(raises_oddly), RankError, "strange"),
    "a lock": (run(uses_a_lock), InputError, "'lock', which uses_a_lock uses (lock)"),
    "a mesh that is too large": (spmd(mesh=larger)(leaves), MeshError, "choose a smaller mesh"),
    "a mesh of other devices": (spmd(mesh=other)(leaves), MeshError, "has the devices 0 to 1"),
}


def attempt(function):
    """The error of a call, and how long it took."""
    start = time.monotonic()
    try:
        function(x)
    except AutoshardError as error:
        return error, time.monotonic() - start
    return None, 0.0


seen = set()
assert total(x) == 28
for name, (function, kind, message) in FAILURES.items():
    error, seconds = attempt(function)
    assert isinstance(error, kind), (name, type(error), error)
    assert any(part in str(error) for part in message.split("|")), (name, str(error))
    assert seconds < 15, (name, seconds)
    seen |= {p.pid for p in psutil.Process().children(recursive=True)}
    assert total(x) == 28, name
    seen |= {p.pid for p in psutil.Process().children(recursive=True)}
    print(f"{name}: {seconds:.2f} s: {str(error).splitlines()[0]}", file=sys.stderr)
assert not [entry for entry in os.listdir("/dev/shm") if "autoshard" in entry]
print("ok", *seen)
