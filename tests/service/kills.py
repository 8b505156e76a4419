"""A real server under SIGKILL: what it accepted must end once, as if nothing had happened.

Used by a short test of the suite and by ``benchmarks/service_kills.py``.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import func, select

from autoshard import analyze
from autoshard.api.store import Store
from autoshard.api.store.tables import plans
from autoshard.api.wire import ENDED

Request = dict[str, Any]


def small_requests() -> list[Request]:
    """Requests of several kinds that are planned within seconds."""
    out: list[Request] = []

    def add(model: Request, devices: int, strategy: str, **workload: int) -> None:
        out.append(
            {
                "model": model,
                "cluster": {"preset": "h100", "devices": devices},
                "workload": workload,
                "search": {"strategy": strategy},
            }
        )

    for layers, width in ((1, 32), (1, 48), (2, 64)):
        config = {
            "model_type": "gpt2",
            "n_layer": layers,
            "n_head": 2,
            "n_embd": width,
            "vocab_size": 96,
            "n_positions": 32,
        }
        for strategy in ("auto", "tensor"):
            add({"config": config}, 2, strategy, global_batch=4, seq_len=16)
        # A graph needs no capture, so some of the jobs end even where kills follow fast.
        graph = analyze(config, global_batch=8, seq_len=16, progress=None).graph.to_json()
        for devices in (2, 4, 8):
            for strategy in ("data", "fsdp", "auto"):
                add({"graph": graph}, devices, strategy)
    for width in (8, 16):
        config = {
            "model_type": "resnet",
            "architectures": ["ResNetForImageClassification"],
            "embedding_size": 8,
            "hidden_sizes": [8, width],
            "depths": [1, 1],
            "layer_type": "basic",
        }
        for strategy in ("data", "tensor"):
            add({"config": config}, 2, strategy, global_batch=4)
    add({"preset": "gpt2"}, 2, "data", global_batch=2, seq_len=64)
    return out


class Server:
    """``python -m autoshard.api`` on one database and one port."""

    def __init__(self, database: str, log: Path, *, workers: int) -> None:
        self.database, self.log = database, log
        self.port = _free_port()
        self.environment = {
            **os.environ,
            "AUTOSHARD_SERVE_DATABASE": database,
            "AUTOSHARD_SERVE_PORT": str(self.port),
            "AUTOSHARD_SERVE_WORKERS": str(workers),
            "AUTOSHARD_SERVE_LEASE_S": "4",
            "AUTOSHARD_SERVE_ATTEMPTS": "1000",
            "AUTOSHARD_SERVE_REQUESTS_PER_MINUTE": "100000",
            "AUTOSHARD_SERVE_JOBS_PER_KEY": "1000",
            "AUTOSHARD_SERVE_LOG_FORMAT": "json",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; answers come a moment later."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "autoshard.api"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def tree(self) -> tuple[list[int], list[int]]:
        """Pids of the nursery (or none), and of its workers."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                if "autoshard.api.worker" in child.cmdline():
                    return [child.pid], [c.pid for c in child.children()]
        return [], []

    def kill(self) -> None:
        """SIGKILL of the server alone; what it started has to notice."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def submit(self, request: Request, key: str) -> str:
        """Send until it is accepted with a 202; the job's id."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            with contextlib.closing(connection), contextlib.suppress(OSError, _Broken):
                connection.request("POST", "/v1/plans", json.dumps(request), headers)
                answer = connection.getresponse()
                document = json.loads(answer.read())
                if answer.status == 202:
                    found: str = document["id"]
                    return found
                if answer.status < 500:
                    raise AssertionError(f"{answer.status}: {document}")
            if self.process is not None and self.process.poll() is not None:
                self.start()  # it was killed
            time.sleep(0.05)
        raise AssertionError(f"no answer; see {self.log}")


_Broken = http.client.HTTPException


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(database: str, log: Path, *, workers: int) -> Iterator[Server]:
    """A server that is gone afterwards, with its workers."""
    server = Server(database, log, workers=workers)
    server.start()
    try:
        yield server
    finally:
        assert server.process is not None
        below = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(server.process.pid).children(recursive=True)
        if server.process.poll() is None:
            server.stop()
        psutil.wait_procs(below, timeout=20)


def undisturbed(folder: Path, requests: list[Request], *, workers: int) -> list[bytes]:
    """The plans of a server that nobody kills."""
    database = f"sqlite:///{folder / 'undisturbed.db'}"
    with serving(database, folder / "undisturbed.log", workers=workers) as server:
        jobs = [server.submit(r, f"undisturbed-{n}") for n, r in enumerate(requests)]
        store = Store.open(database)
        _wait_for(store, jobs, 30 + 20 * len(jobs))
        documents = [_document(store, job) for job in jobs]
        store.close()
    return documents


def _wait_for(store: Store, jobs: list[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    left = list(jobs)
    while left:
        left = [j for j in left if _state(store, j) not in ENDED]
        if time.monotonic() > deadline:
            raise AssertionError(f"{len(left)} jobs have not ended: {left[:3]}")
        time.sleep(0.1)


def _state(store: Store, job_id: str) -> str:
    job = store.job(job_id)
    assert job is not None, f"{job_id} was accepted, and is not there"
    return job.state


def _document(store: Store, job_id: str) -> bytes:
    job = store.job(job_id)
    assert job is not None
    assert job.state == "succeeded", job.problem
    assert job.plan_id is not None
    plan = store.plan(job.plan_id)
    assert plan is not None
    return plan.document


@dataclass(kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        accepted: jobs that were answered with 202.
        kills: by what was killed.
        attempts: how many jobs were begun how often.
        wrong: what was found that must not be.
        seconds: how long it took.
    """

    accepted: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def disturbed(
    database: str,
    log: Path,
    requests: list[Request],
    expected: list[bytes],
    *,
    kills: int,
    in_flight: int,
    workers: int,
    seed: int,
    pause_s: float = 1.5,
    shares: tuple[float, float, float] = (0.08, 0.02, 0.9),
) -> Outcome:
    """Kill at random moments while so many jobs are in flight, then see what became of all.

    Args:
        database: URL, empty.
        log: file for the server's log.
        requests: sent in turn, each time with another number of trials, so that none is answered
            from a stored plan; the number is above all there are, so that the plan is the same.
        expected: plans of an undisturbed run, of ``requests``.
        kills: how many.
        in_flight: jobs that wait or run whenever something is killed.
        workers: of the server.
        seed: of the moments and of what is killed.
        pause_s: how long what is killed is left alone before, on average: exponentially
            distributed, so that every moment is as likely, but never above 5 times that.
        shares: how often the server, the nursery, a worker is killed.
    """
    started = time.monotonic()
    rng = random.Random(seed)
    outcome = Outcome()
    sent: list[str] = []
    open_jobs: list[str] = []
    with serving(database, log, workers=workers) as server:
        store = Store.open(database)  # at the same time as the server, which is safe
        for _ in range(kills):
            open_jobs = [j for j in open_jobs if _state(store, j) not in ENDED]
            while len(open_jobs) < in_flight:
                number = len(sent)
                request = dict(requests[number % len(requests)])
                request["search"] = {**request["search"], "trials": 100 + number}
                job = server.submit(request, f"job-{number}")
                sent.append(job)
                open_jobs.append(job)
            outcome.kills[_kill(server, rng, pause_s, shares)] += 1
        _wait_for(store, sent, 120 + 10 * in_flight)
        _examine(store, sent, expected, outcome)
        if (status := server.stop()) != 0:
            outcome.wrong.append(f"the server's exit status was {status}")
        store.close()
    outcome.accepted = len(sent)
    outcome.seconds = time.monotonic() - started
    return outcome


def _kill(
    server: Server,
    rng: random.Random,
    pause_s: float,
    shares: tuple[float, float, float],
) -> str:
    """Kill something at a random moment of its life, and start the server again if it was that."""
    (what,) = rng.choices(("server", "nursery", "worker"), shares)
    moment = min(rng.expovariate(1 / pause_s), 5 * pause_s)
    if what == "server":
        time.sleep(moment)
        server.kill()
        server.start()
        return what
    deadline = time.monotonic() + 120
    seen = False
    while time.monotonic() < deadline:
        nursery, workers = server.tree()
        if victims := nursery if what == "nursery" else workers:
            if seen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(victims), signal.SIGKILL)
                return what
            seen = True
            time.sleep(moment)
        else:
            time.sleep(0.02)
    raise AssertionError(f"there is no {what} to kill; see {server.log}")


def _examine(store: Store, sent: list[str], expected: list[bytes], outcome: Outcome) -> None:
    if len(set(sent)) != len(sent):
        outcome.wrong.append("one job was given for two requests")
    with store.reading() as connection:
        rows = connection.execute(select(plans.c.job_id, func.count()).group_by(plans.c.job_id))
        stored = {row[0]: row[1] for row in rows}
    for number, job_id in enumerate(sent):
        job = store.job(job_id)
        assert job is not None
        events = store.events(job_id)
        ends = [e.kind for e in events if e.kind in ENDED]
        if [e.seq for e in events] != list(range(1, len(events) + 1)):
            outcome.wrong.append(f"{job_id}: events have gaps")
        if ends != ["succeeded"] or events[-1].kind != "succeeded":
            outcome.wrong.append(f"{job_id}: ended {ends}, {job.problem}")
            continue
        if stored.get(job_id) != 1:
            outcome.wrong.append(f"{job_id}: {stored.get(job_id, 0)} plans")
        if _document(store, job_id) != expected[number % len(expected)]:
            outcome.wrong.append(f"{job_id}: another plan than undisturbed")
        outcome.attempts[job.attempt] += 1
    if extra := set(stored) - set(sent):
        outcome.wrong.append(f"plans of jobs that nobody was told of: {sorted(extra)[:3]}")
