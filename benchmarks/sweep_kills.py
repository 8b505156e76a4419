"""A sweep of 108 points, killed three times; and shared by two commands on one PostgreSQL.

``python -m benchmarks sweep_kills``: 3 models x 2 clusters x 6 device counts x 3 batches are
planned by ``autoshard sweep --workers 2``, once undisturbed and once with SIGKILL to the whole
process group at three random moments, each time resumed by the same command; then by two commands
on one new PostgreSQL, where that is installed. All must end with equal rows, every column but
``seconds``, and in PostgreSQL each point must have been begun once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from sqlalchemy import create_engine, text

from autoshard.errors import RequestError
from autoshard.sweeps import Row, read_rows

SWEEP = {
    "name": "kills",
    "parameters": {
        "model": ["gpt2", "bert-base", "vit-base"],
        "cluster": ["a100-80", "h100"],
        "devices": [1, 2, 4, 8, 16, 32],
        "global_batch": [32, 64, 128],
    },
}
POINTS = 108
KILLS = 3


def main() -> None:
    """Run all three and compare."""
    with tempfile.TemporaryDirectory(prefix="autoshard-sweep-") as name:
        folder = Path(name)
        (folder / "sweep.json").write_text(json.dumps(SWEEP))
        began_s = time.monotonic()
        _wait(_start(folder, "undisturbed.db"))
        right = read_rows(folder / "undisturbed.db")
        status = Counter(r.error_type or r.status for r in right)
        print(f"undisturbed: {_count(right)}, {time.monotonic() - began_s:.0f} s, {dict(status)}")
        _killed(folder, right)
        _shared(folder, right)


def _killed(folder: Path, right: list[Row]) -> None:
    seed = random.SystemRandom().randrange(1000)
    moments = sorted(random.Random(seed).sample(range(1, POINTS - 1), KILLS))
    began_s = time.monotonic()
    for moment in moments:
        process = _start(folder, "killed.db")
        while (done := _finished(folder / "killed.db")) < moment:
            assert process.poll() is None, "the sweep ended before it was killed"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"killed at {done} of {POINTS} points")
    _wait(_start(folder, "killed.db"))
    found = read_rows(folder / "killed.db")
    assert found == right, _difference(found, right)
    print(
        f"killed {KILLS} times (seed {seed}): {_count(found)}, {time.monotonic() - began_s:.0f} s, "
        "all columns equal"
    )


def _shared(folder: Path, right: list[Row]) -> None:
    from tests.service import postgres

    if postgres.programs() is None:
        print("PostgreSQL is not installed: not shared")
        return
    with postgres.server() as server:
        url = postgres.new_database(server, "kills")
        began_s = time.monotonic()
        both = [_start(folder, url, workers=1) for _ in range(2)]
        for process in both:
            _wait(process)
        found = read_rows(url)
        assert found == right, _difference(found, right)
        engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.connect() as connection:
            statement = text("SELECT worker, attempts FROM autoshard_points")
            points = connection.execute(statement).all()
        engine.dispose()
        assert [attempts for _, attempts in points] == [1] * POINTS
        shares = Counter(worker for worker, _ in points)
    print(
        f"two commands on one PostgreSQL: {_count(found)}, {time.monotonic() - began_s:.0f} s, "
        f"shares {sorted(shares.values())}, each point begun once, all columns equal"
    )


def _start(folder: Path, storage: str, workers: int = 2) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "autoshard.cli", "sweep", "sweep.json"]
    command += ["--storage", storage, "--workers", str(workers), "--json"]
    return subprocess.Popen(
        command,
        cwd=folder,
        process_group=0,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )


def _wait(process: subprocess.Popen[bytes]) -> None:
    assert process.wait() == 0, f"the sweep ended with status {process.returncode}"


def _finished(storage: Path) -> int:
    try:
        return sum(r.status in ("done", "failed") for r in read_rows(storage))
    except RequestError:
        return 0  # it has not begun


def _count(rows: list[Row]) -> str:
    assert len(rows) == POINTS, len(rows)
    assert all(r.status in ("done", "failed") for r in rows)
    return f"{len(rows)} rows"


def _difference(found: list[Row], right: list[Row]) -> str:
    return next(f"{a}\n{b}" for a, b in zip(found, right, strict=True) if a != b)


if __name__ == "__main__":
    main()
