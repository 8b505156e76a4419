"""Whatever befalls a job, its worker or its server, the store is told the truth once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autoshard.api.settings import Limits, Settings
from autoshard.api.store import Job, Store
from autoshard.api.wire import ENDED

LIMITS: dict[str, Any] = {"queued_limit": 1000, "owner_limit": 1000, "daily_limit": 1000}
_numbers = itertools.count()


class Bench:
    """A database, and workers with stand-in jobs."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'service.db'}"
        self.store = Store.open(self.url)
        self.workers: list[subprocess.Popen[bytes]] = []

    def worker(self, *, drain_s: float = 10.0, lease_s: float = 5.0, **limits: Any) -> Any:
        settings = Settings(
            database=self.url,
            drain_s=drain_s,
            lease_s=lease_s,
            limits=Limits(**limits),
            log_format="json",
        )
        command = [sys.executable, "-m", "tests.service.stand_in", settings.model_dump_json()]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.workers.append(process)
        return process

    def send(self, **request: Any) -> Job:
        return self.store.submit("local", "plan", request, str(next(_numbers)), **LIMITS)[0]

    def until(self, job: Job, true: Callable[[Job], bool], seconds: float = 60.0) -> Job:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            now = self.store.job(job.id)
            assert now is not None
            if true(now):
                return now
            time.sleep(0.02)
        raise AssertionError(f"waited too long: {now}")

    def end(self, job: Job) -> Job:
        return self.until(job, lambda now: now.state in ENDED)

    def told(self, job: Job) -> str:
        """The message of a running job."""
        now = self.until(job, lambda now: now.progress is not None)
        assert now.progress is not None
        return str(now.progress["message"])

    def history(self, job: Job) -> list[str]:
        return [e.kind for e in self.store.events(job.id) if e.kind != "progress"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for process in made.workers:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
    made.store.close()


def gone(pid: int, seconds: float = 30.0) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(seconds)
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def document(bench: Bench, job: Job) -> bytes:
    assert job.plan_id is not None, job.problem
    plan = bench.store.plan(job.plan_id)
    assert plan is not None
    return plan.document


def test_every_way_in_which_a_job_can_end(bench: Bench) -> None:
    bench.worker(job_bytes=2**28)
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"plan": "a"}, None),
        ({"many": 500}, None),
        ({"raise": "secret"}, "unexpected"),
        ({"raise": "infeasible"}, "infeasible"),
        ({"allocate": 2**29}, "memory-limit"),
        ({"start": 100_000_000}, "memory-limit"),
        ({"signal": signal.SIGSEGV}, "crashed"),
        ({"signal": signal.SIGKILL}, "crashed"),
        ({"exit": 0}, "crashed"),
        ({"plan": "last"}, None),
    ]
    jobs = [bench.send(**request) for request, _ in cases]
    for job, (request, name) in zip(jobs, cases, strict=True):
        ended = bench.end(job)
        # None is run again: it would end in the same way.
        assert bench.history(job) == ["queued", "running", ended.state], request
        if name is None:
            assert ended.state == "succeeded", (request, ended.problem)
            continue
        assert ended.problem is not None
        assert ended.problem["type"] == f"about:autoshard/{name}", (request, ended.problem)
        assert set(ended.problem) >= {"title", "status", "detail"}
        assert "secret" not in json.dumps(ended.problem)
        assert "Traceback" not in json.dumps(ended.problem)
    assert document(bench, bench.end(jobs[0])) == b"a"
    assert document(bench, bench.end(jobs[1])) == b"m" * 3_000_000
    infeasible = bench.end(jobs[3]).problem
    assert infeasible is not None
    assert (infeasible["binding"], infeasible["nearest"]) == ("memory", ["more"])
    # A flood of progress is thinned, and the last of it kept.
    assert len(bench.store.events(jobs[1].id)) < 20
    last = bench.end(jobs[1]).progress
    assert last is not None
    assert last["done"] == 499


def test_a_job_that_takes_too_long_is_ended(bench: Bench) -> None:
    bench.worker(job_s=0.3)
    job = bench.end(bench.send(sleep=600))
    assert bench.history(job) == ["queued", "running", "failed"]
    assert job.problem is not None
    assert job.problem["type"] == "about:autoshard/time-limit"
    assert "it ran for 0.3 s" in job.problem["detail"]


def test_what_a_job_started_ends_with_it(bench: Bench) -> None:
    bench.worker()
    job = bench.send(start=1000)
    pids = [int(p) for p in bench.told(job).split()]
    assert len(pids) == 4
    bench.store.cancel(job.id)
    assert bench.end(job).state == "cancelled"
    assert all(gone(pid) for pid in pids)


def test_cancelling_ends_a_running_job_and_the_next_one_is_begun(bench: Bench) -> None:
    bench.worker()
    job, after = bench.send(sleep=600), bench.send(plan="b")
    pid = int(bench.told(job).split()[-1])
    bench.store.cancel(job.id)
    assert bench.end(job).state == "cancelled"
    assert gone(pid)
    assert bench.end(after).state == "succeeded"


def test_a_killed_worker_takes_its_job_along_and_another_runs_it_again(bench: Bench) -> None:
    first = bench.worker()
    job = bench.send(sleep=2)
    pid = int(bench.told(job).split()[-1])
    first.kill()
    first.wait()
    assert gone(pid)
    bench.worker()
    assert document(bench, bench.end(job)) == b"slept"
    assert bench.history(job) == ["queued", "running", "queued", "running", "succeeded"]


def test_a_worker_that_was_stopped_too_long_finds_its_job_gone(bench: Bench) -> None:
    slow = bench.worker(lease_s=1.0)
    job = bench.send(sleep=3)
    pid = int(bench.told(job).split()[-1])
    os.kill(slow.pid, signal.SIGSTOP)
    bench.worker(lease_s=1.0)
    bench.until(job, lambda now: now.attempt == 2)
    os.kill(slow.pid, signal.SIGCONT)
    assert gone(pid)
    assert bench.end(job).attempt == 2
    assert bench.history(job) == ["queued", "running", "queued", "running", "succeeded"]


def test_sigterm_lets_a_job_end(bench: Bench) -> None:
    worker = bench.worker()
    job, after = bench.send(sleep=1), bench.send(plan="later")
    bench.told(job)
    worker.terminate()
    assert worker.wait(60) == 0
    assert bench.end(job).state == "succeeded"
    assert bench.history(after) == ["queued"]
    assert bench.store.workers_alive() == 0


def test_sigterm_gives_a_long_job_back(bench: Bench) -> None:
    worker = bench.worker(drain_s=0.3)
    job = bench.send(sleep=600)
    pid = int(bench.told(job).split()[-1])
    worker.terminate()
    assert worker.wait(60) == 0
    assert gone(pid)
    assert bench.history(job) == ["queued", "running", "queued"]


def test_a_worker_ends_with_its_server(bench: Bench) -> None:
    worker = bench.worker()
    job = bench.send(sleep=600)
    bench.told(job)
    worker.stdin.close()
    assert worker.wait(60) == 0
    assert bench.history(job) == ["queued", "running", "queued"]


def test_a_job_cannot_touch_the_database_or_the_pipe_to_the_server(bench: Bench) -> None:
    worker = bench.worker()
    job = bench.send(sleep=600)
    pid = int(bench.told(job).split()[-1])
    files = {os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
    assert not any("service.db" in f for f in files)
    assert os.readlink(f"/proc/{worker.pid}/fd/0") not in files
    assert os.getpgid(pid) == pid
