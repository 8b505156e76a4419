"""A measurement has the machine to itself."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

from autoshard.sweeps.machine import computing

WAIT_S = 30.0
"""Longest wait for what must happen."""


def begin(alone: bool, ready: threading.Event, over: threading.Event) -> threading.Thread:
    def run() -> None:
        with computing(alone=alone):
            ready.set()
            over.wait(WAIT_S)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def end(over: threading.Event, thread: threading.Thread) -> None:
    over.set()
    thread.join(WAIT_S)


def started(*alone: bool) -> tuple[list[threading.Event], list[Callable[[], None]]]:
    """Threads that compute, one after the other; their starts, and how to end each."""
    ready: list[threading.Event] = []
    ends: list[Callable[[], None]] = []
    for each in alone:
        come, over = threading.Event(), threading.Event()
        thread = begin(each, come, over)

        ready.append(come)
        ends.append(partial(end, over, thread))
        come.wait(0.1)
    return ready, ends


def test_planners_compute_together() -> None:
    ready, ends = started(False, False)
    assert all(r.wait(WAIT_S) for r in ready)
    for each in ends:
        each()


def test_a_measurement_waits_for_planners_and_keeps_new_ones_out() -> None:
    (first, alone, late), ends = started(False, True, False)
    assert (first.is_set(), alone.is_set(), late.is_set()) == (True, False, False)
    ends[0]()
    assert alone.wait(WAIT_S)
    assert not late.wait(0.1)
    ends[1]()
    assert late.wait(WAIT_S)
    ends[2]()


def test_measurements_take_turns() -> None:
    (first, second), ends = started(True, True)
    assert first.is_set()
    assert not second.is_set()
    ends[0]()
    assert second.wait(WAIT_S)
    ends[1]()


def test_a_killed_process_lets_go() -> None:
    code = (
        "import os, signal\nfrom autoshard.sweeps.machine import computing\n"
        "with computing(alone=True): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (ready,), (over,) = started(True)
    assert ready.wait(WAIT_S)
    over()
