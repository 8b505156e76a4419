"""Ctrl-C in the middle of a call: a KeyboardInterrupt, no process left, and the next call works."""

import os
import signal
import threading
import time

import psutil

from autoshard import DeviceMesh, spmd

mesh = DeviceMesh(devices=[0, 1], axis_names=["data"])


def sleep(x):
    import time

    time.sleep(60)


def same(x):
    return x


call = spmd(mesh=mesh)(same)
assert call(1) == 1
before = {p.pid for p in psutil.Process().children(recursive=True)}
ranks = len(before)
start = time.monotonic()
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    spmd(mesh=mesh)(sleep)(1)
    raise AssertionError("not interrupted")
except KeyboardInterrupt:
    assert time.monotonic() - start < 15
assert call(2) == 2
assert len(psutil.Process().children(recursive=True)) <= ranks
assert not [name for name in os.listdir("/dev/shm") if "autoshard" in name]
print("ok", *(p.pid for p in psutil.Process().children(recursive=True)))
