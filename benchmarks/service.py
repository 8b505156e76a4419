"""How fast the service answers reads while it plans, and whether its memory stays where it is.

``python -m benchmarks.service``: wrk against the real server (workers planning beside it) and, in
turns, against a bare FastAPI endpoint that returns a body of the same size under the same uvicorn;
the ratio is what counts, since both share the machine with the planning.

``python -m benchmarks.service --soak 600``: ten minutes of everything at once, with the memory of
the server and its workers every 30 s.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import httpx2
import psutil

from tests.service.running import Server, running, small

ROUNDS = 5
SECONDS = 4
CONNECTIONS = 16
JSON = {"content-type": "application/json"}
BARE = """
import socket, sys, uvicorn
from fastapi import FastAPI
from starlette.responses import Response
from autoshard.api.protocol import Protocol
BODY = b"x" * int(sys.argv[1])
app = FastAPI()
@app.get("/")
async def read() -> Response:
    return Response(BODY, media_type="application/json")
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
config = uvicorn.Config(app, http="httptools", loop="uvloop", log_config=None, access_log=False)
uvicorn.Server(config).run([listener])
"""


@contextmanager
def bare(num_bytes: int) -> Iterator[tuple[str, int]]:
    """A bare FastAPI endpoint that returns ``num_bytes``: its URL and process id."""
    process = subprocess.Popen(
        [sys.executable, "-c", BARE, str(num_bytes)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield f"http://127.0.0.1:{port}/", process.pid
    finally:
        process.terminate()
        process.wait()


def wrk(url: str, pid: int, seconds: int = SECONDS) -> tuple[float, float]:
    """Requests per second, and CPU seconds of the server's process for each.

    Every answer must be a 2xx.
    """
    program = which("wrk")
    if program is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    command = [program, "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", url]
    before = psutil.Process(pid).cpu_times()
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in text or "Socket errors" in text:
        sys.exit(f"errors from {url}:\n{text}")
    after = psutil.Process(pid).cpu_times()
    rate, count = re.search(r"Requests/sec:\s+([\d.]+)", text), re.search(r"(\d+) requests", text)
    assert rate is not None
    assert count is not None
    cpu_s = after.user + after.system - before.user - before.system
    return float(rate[1]), cpu_s / max(1, int(count[1]))


@contextmanager
def planning(server: Server) -> Iterator[list[int]]:
    """Keeps the queue filled; the number of jobs that were sent stands in the list."""
    ended = threading.Event()
    sent = [0]

    def work() -> None:
        with httpx2.Client(base_url=server.url, timeout=60) as http:
            for n in itertools.count(1):
                if ended.is_set():
                    return
                answer = http.post("/v1/plans", json=small(global_batch=8 * n, seq_len=48))
                if answer.status_code == 202:
                    sent[0] += 1
                while answer.status_code == 429 and not ended.wait(0.2):
                    answer = http.post("/v1/plans", json=small(global_batch=8 * n, seq_len=48))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield sent
    finally:
        ended.set()
        thread.join()


def finished(server: Server) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job that has ended and its plan, as they are sent."""
    server.wait_ready(180)
    job = server.http.post("/v1/plans", json=small()).json()
    job = server.ended(job["id"], 180) if "state" in job else job
    return job, server.http.get(job["links"]["plan"]).json()


def _print_reads(
    what: str, size: int, pairs: list[tuple[tuple[float, float], tuple[float, float]]]
) -> None:
    (their_rate, their_s), (our_rate, our_s) = (
        [statistics.median(pair[side][i] for pair in pairs) for i in (0, 1)] for side in (0, 1)
    )
    ratios = sorted(ours[0] / theirs[0] for theirs, ours in pairs)
    print(
        f"  GET {what}, {size} bytes: {our_rate:.0f} requests/s, bare {their_rate:.0f}; "
        f"ratio {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f} over {len(pairs)} rounds)\n"
        f"    CPU a request: {our_s * 1e6:.0f} us, bare {their_s * 1e6:.0f}"
    )


def reads() -> None:
    """The ratio to a bare endpoint, for a job and for a plan."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), queued_jobs=4, jobs_per_day=10**9, wait_s=60) as server,
    ):
        job, plan = finished(server)
        with planning(server) as sent:
            for what, link in (("job", job["links"]["self"]), ("plan", plan["links"]["self"])):
                size = len(server.http.get(link).content)
                with bare(size) as other:
                    mine = (server.url + link, server.process.pid)
                    wrk(*mine, 1)
                    wrk(*other, 1)
                    pairs = [(wrk(*other), wrk(*mine)) for _ in range(ROUNDS)]
                _print_reads(what, size, pairs)
        print(f"  {sent[0]} jobs were sent to the workers meanwhile")


# ---- soak -----------------------------------------------------------------------------------


def tree_bytes(pid: int) -> tuple[int, int]:
    """Resident memory of the server, and of all its children."""
    process = psutil.Process(pid)
    below = 0
    for child in process.children(recursive=True):
        try:
            below += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return process.memory_info().rss, below


def mixed(server: Server, until_s: float, seen: Counter[str], plan: dict[str, Any]) -> None:
    """Everything that callers do, one after the other, until the time is over."""
    batches = itertools.count(1)
    with httpx2.Client(base_url=server.url, timeout=120) as http:
        while time.monotonic() < until_s:
            job = http.post("/v1/plans", json=small(global_batch=8 * next(batches)))
            seen[f"post {job.status_code}"] += 1
            for path in (
                "/v1/jobs?limit=100",
                *plan["links"].values(),
                *("/v1/models", "/metrics", "/readyz", "/v1/jobs/job_none"),
            ):
                seen[f"get {http.get(path).status_code}"] += 1
            bad = http.post("/v1/plans", content=b"{" * 5000, headers=JSON)
            seen[f"bad {bad.status_code}"] += 1
            if job.status_code != 202:
                time.sleep(0.05)
                continue
            here = job.json()["links"]
            with http.stream("GET", here["events"]) as stream:
                for _ in stream.iter_lines():
                    pass
            seen[f"stream {stream.status_code}"] += 1
            seen[f"delete {http.delete(here['self']).status_code}"] += 1


def soak(seconds: float) -> None:
    """Mixed load for so long; memory must not grow."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), jobs_per_day=10**9, workers=1) as server,
    ):
        _, plan = finished(server)
        started_s = time.monotonic()
        seen: Counter[str] = Counter()
        until_s = started_s + seconds
        threads = [
            threading.Thread(target=mixed, args=(server, until_s, seen, plan)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        figures: list[tuple[int, int]] = []
        while time.monotonic() < until_s:
            time.sleep(min(30.0, max(0.1, until_s - time.monotonic())))
            figures.append(tree_bytes(server.process.pid))
            ours, below = (n / 2**20 for n in figures[-1])
            at_s = time.monotonic() - started_s
            print(f"  {at_s:5.0f} s: server {ours:.1f} MiB, workers {below:.1f} MiB", flush=True)
        for thread in threads:
            thread.join()
        print("  " + ", ".join(f"{what}: {n}" for what, n in sorted(seen.items())))
        third = max(1, len(figures) // 3)
        first, last = (
            [statistics.mean(f[i] for f in part) for i in (0, 1)]
            for part in (figures[third : 2 * third] or figures, figures[-third:])
        )
        for what, a, b in zip(("server", "workers"), first, last, strict=True):
            print(
                f"  {what}: {a / 2**20:.1f} MiB in the second third of the time, "
                f"{b / 2**20:.1f} MiB in the last: {b / a - 1:+.1%}"
            )
        errors = {what: n for what, n in seen.items() if re.search(r" 5\d\d$", what)}
        print(f"  errors of the service: {errors or 'none'}")


def main() -> None:
    """The reads, or the soak where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="mixed load for so long")
    asked = parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("service.py") else [])
    if asked.soak:
        soak(asked.soak)
    else:
        reads()


if __name__ == "__main__":
    main()
