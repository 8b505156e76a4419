"""A real server in a process of its own, on a free port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

START_S = 60.0
GPT2: dict[str, Any] = {"model": {"preset": "gpt2"}, "cluster": {"preset": "h100", "devices": 4}}
SMALL: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": 2,
            "n_embd": 64,
            "n_head": 4,
            "vocab_size": 512,
            "n_positions": 64,
        }
    },
    "cluster": {"preset": "h100", "devices": 2},
    "workload": {"global_batch": 8, "seq_len": 32},
}
"""A model that is planned in a second or two."""


def small(**workload: Any) -> dict[str, Any]:
    """The small model with another workload: another job."""
    return {**SMALL, "workload": {**SMALL["workload"], **workload}}


@dataclass(slots=True)
class Server:
    """A running server.

    Attributes:
        url: without a slash at its end.
        database: its URL.
        process: the server itself, whose workers end with it.
        log: what it wrote to stderr, so far.
        http: a client that is closed with it.
    """

    url: str
    database: str
    process: subprocess.Popen[str]
    log: Path
    http: httpx2.Client

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Until a worker lives."""
        end_s = time.monotonic() + timeout_s
        while self.http.get("/readyz").status_code != 200:
            assert time.monotonic() < end_s, self.log.read_text()[-2000:]
            time.sleep(0.1)

    def ended(self, job_id: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """The job once it has ended."""
        end_s = time.monotonic() + timeout_s
        while True:
            job: dict[str, Any] = self.http.get(f"/v1/jobs/{job_id}").json()
            if job["state"] not in ("queued", "running"):
                return job
            assert time.monotonic() < end_s, job
            time.sleep(0.1)

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextmanager
def running(folder: Path, name: str = "server", **settings: object) -> Iterator[Server]:
    """A server with its log and, unless ``database`` says otherwise, its database in ``folder``.

    Args:
        folder: of the database and the log.
        name: of their files.
        settings: as ``AUTOSHARD_SERVE_...``, in small letters.
    """
    given: dict[str, object] = {
        "database": f"sqlite:///{folder / name}.db",
        "port": 0,
        "requests_per_minute": 1_000_000,
        "log_format": "json",
        **settings,
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AUTOSHARD_")}
    environment |= {f"AUTOSHARD_SERVE_{k.upper()}": str(v) for k, v in given.items()}
    log = folder / f"{name}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "autoshard.api"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # comes once it listens, or the end of the file
        assert "http://" in line, f"the server did not start: {line}\n{log.read_text()[-3000:]}"
        url = line.split()[-1].replace("0.0.0.0", "127.0.0.1")
        with httpx2.Client(base_url=url, timeout=60.0) as http:
            yield Server(url, str(given["database"]), process, log, http)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
