"""A job's process from the inside."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import secrets
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from autoshard.api.log import logger
from autoshard.api.settings import Limits
from autoshard.api.store import Job, Result
from autoshard.api.wire import Kind
from autoshard.api.worker import problems, tree
from autoshard.errors import AutoshardError

Say = Callable[[dict[str, Any]], None]
"""Told how far it is: ``{"message", "done", "total", "best_step_time_s", "best_label"}``."""

Run = Callable[[Kind, dict[str, Any], Say], Result]
"""From a request to a result: ``task.run_request``."""

NICE = 5
"""Planning gives way to the server, which is on the same machine."""


def frame(kind: bytes, payload: bytes) -> bytes:
    """A message on the pipe: one letter, the length in eight bytes, the payload."""
    return kind + len(payload).to_bytes(8, "big") + payload


def main(job: Job, writer: int, parent: int, limits: Limits, run: Run) -> NoReturn:
    """Plan, write progress and the end to the pipe, and never return.

    Args:
        job: what to do.
        writer: the pipe's end.
        parent: the worker's pid.
        limits: of memory.
        run: does it.
    """
    status = 1
    try:
        tree.die_with(parent, signal.SIGKILL)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the worker decides when this process ends
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        writer = _close_all_but(writer)
        faulthandler.enable(2, all_threads=True)
        os.nice(NICE)
        _limit_memory(limits.job_bytes)
        _run(job, writer, run)
        status = 0
    finally:
        os._exit(status)


def _close_all_but(writer: int) -> int:
    """Keep stderr and the pipe: the database and what the worker listens to are not this one's."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what a library prints
    kept = os.dup2(os.dup(writer), 3, inheritable=False)
    os.closerange(4, 4096)
    return kept


def _limit_memory(most: int) -> None:
    """An allocation beyond the limit fails, in this process and in each that it starts."""
    soft = tree.data_bytes() + most
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("500")  # if the machine's memory ends, it is not the server that dies
    except OSError:
        pass


def _run(job: Job, writer: int, run: Run) -> None:
    def send(kind: bytes, payload: object) -> None:
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        view = memoryview(frame(kind, data))
        while view:
            view = view[os.write(writer, view) :]

    try:
        result = run(job.kind, job.request, lambda now: send(b"P", now))
    except BaseException as error:
        send(b"F", _told(job, error))
        return
    send(b"S", result.summary)
    send(b"D", result.document)
    send(b"T", result.trace)
    send(b"E", b"")


def _told(job: Job, error: BaseException) -> dict[str, Any]:
    log_id = secrets.token_hex(8)
    document = problems.of_error(error, log_id)
    # Of a mistake that autoshard itself found in the request, its words say all.
    foreign = not isinstance(error.__cause__ or error, AutoshardError)
    with contextlib.suppress(MemoryError):
        if document["status"] >= 500 or foreign:
            logger().error("job failed", job=job.id, log_id=log_id, exc_info=error)
        else:
            logger().info("job failed", job=job.id, problem=document["type"])
    return document


def result_of(frames: dict[bytes, bytes]) -> Result | None:
    """What a job's process handed in; None where it did not come to its end."""
    if b"F" in frames:
        return Result(problem=json.loads(frames[b"F"]))
    if b"E" not in frames:
        return None
    return Result(summary=json.loads(frames[b"S"]), document=frames[b"D"], trace=frames[b"T"])
