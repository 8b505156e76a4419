"""``sweep``: enter a sweep in its store, set workers to it, and return the rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autoshard.errors import AutoshardError, RequestError
from autoshard.sweeps.config import Sweep, read_sweep
from autoshard.sweeps.export import write_rows
from autoshard.sweeps.rows import Row
from autoshard.sweeps.store import LEASE_S, Counts, Registered, Store
from autoshard.sweeps.worker import POLL_S, work

GRACE_S = 5.0
"""How long workers may take to give their points back when the sweep is interrupted."""

MOST_DEATHS = 10
"""So many workers may die in a row, with nothing finished in between, before the sweep gives up."""

WORKER = """
import json, sys
told = json.loads(sys.stdin.buffer.readline())
sys.path[:] = told["path"]
from autoshard.sweeps.worker import main
sys.exit(main(told))
"""
"""The program of a worker: whatever can be imported here can be imported there."""

Progress = Callable[[Counts, Row | None], None]
"""Told how far the sweep is, and of the row that came in last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep ended with.

    Attributes:
        name: of the sweep.
        storage: path or URL of its store.
        rows: one a point, in the order of the sweep.
        notes: what was noticed, for people.
    """

    name: str
    storage: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        rows = [r.to_json() for r in self.rows]
        return {"kind": "autoshard.sweep", "name": self.name, "rows": rows}

    def save(self, path: str | Path) -> None:
        """Write the rows as ``.csv``, ``.parquet`` or ``.json``; see the ending of ``path``."""
        write_rows(self.rows, path)


def sweep(
    source: str | Path | Mapping[str, Any] | Sweep,
    *,
    storage: str | Path | None = None,
    workers: int = 1,
    retry_failed: bool = False,
    studies: str | None = None,
    lease_s: float = LEASE_S,
    progress: bool | Progress | None = True,
) -> SweepResult:
    """Plan, price or measure every point of a sweep that its store does not have yet.

    Call it again after an interruption, or on several machines with one PostgreSQL at the same
    time: each point is done once. A point that fails keeps its error and the sweep goes on.

    Args:
        source: path of a sweep (TOML, YAML, JSON), or a mapping of that form.
        storage: path of an SQLite file, or a URL (``postgresql://USER@HOST/NAME``); None: the
            sweep's name and ``.db`` in the working folder.
        workers: how many points are planned at once. Measured points never share the machine; see
            :mod:`autoshard.sweeps.machine`.
        retry_failed: whether points that failed before run again.
        studies: URL of an Optuna storage that keeps the searches of all points.
        lease_s: a worker that is silent for so long has died; somebody else takes its point.
        progress: True: lines on stderr where it is a terminal; or called as the sweep goes on.

    Raises:
        RequestError: the sweep or the storage is wrong; nothing was run.
        StoreError: the store fails.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise RequestError(f"workers must be a positive whole number, found {workers!r}")
    found = source if isinstance(source, Sweep) else read_sweep(source)
    store = Store(default_storage(found.name) if storage is None else storage, lease_s=lease_s)
    try:
        entered = store.register(found, retry_failed=retry_failed)
        if studies is not None:
            _open_studies(studies)
        _run(store, entered.sweep_id, workers, studies, _reporter(progress))
        rows = tuple(store.rows(found.name))
    finally:
        store.close()
    return SweepResult(
        name=found.name,
        storage=store.shown,
        rows=rows,
        notes=(*found.notes, *_said(entered)),
    )


def default_storage(name: str) -> str:
    """The file that a sweep is kept in where no store is named."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".")
    return f"{plain or 'sweep'}.db"


def _said(entered: Registered) -> tuple[str, ...]:
    if not entered.dropped:
        return ()
    return (
        f"{entered.dropped} points of an earlier form of this sweep are no longer in it; the store "
        "keeps them",
    )


def _open_studies(url: str) -> None:
    """Make Optuna's tables, before several workers would at once.

    Raises:
        RequestError: the storage cannot be opened.
    """
    import optuna

    try:
        optuna.storages.RDBStorage(url).engine.dispose()
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RequestError(f"cannot open the Optuna storage of the searches: {first}") from error


def _reporter(progress: bool | Progress | None) -> Progress:
    if callable(progress):
        return progress
    if not progress or not sys.stderr.isatty():
        return lambda counts, row: None
    return lambda counts, row: print(progress_text(counts, row), file=sys.stderr, flush=True)


def progress_text(counts: Counts, row: Row | None) -> str:
    """``12 of 108 points, 1 failed; gpt2 on 8 x h100: 12.3 ms``."""
    failed = f", {counts.failed} failed" if counts.failed else ""
    return f"{counts.finished} of {counts.total} points{failed}" + (
        "" if row is None else f"; {row_text(row)}"
    )


def row_text(row: Row) -> str:
    """``gpt2 on 8 x h100, batch 32: 12.3 ms`` or the first line of its error."""
    where = f"{row.model} on {row.devices} x {row.cluster}"
    where += "" if row.global_batch is None else f", batch {row.global_batch}"
    if row.error is not None:
        return f"{where}: {row.error.splitlines()[0]}"
    seconds = row.step_time_s if row.measured_step_time_s is None else row.measured_step_time_s
    return where if seconds is None else f"{where}: {seconds * 1e3:.4g} ms"


# ---- workers ------------------------------------------------------------------------------------


def _run(
    store: Store, sweep_id: int, workers: int, studies: str | None, progress: Progress
) -> None:
    """Have all points finished."""

    def tick() -> None:
        progress(store.counts(sweep_id), store.last_finished(sweep_id))

    counts = store.counts(sweep_id)
    if workers == 1 and counts.finished < counts.total:
        work(store, sweep_id, studies=studies, tick=tick)
        return
    told = {
        "path": [p or os.getcwd() for p in sys.path],
        "store": store.url,
        "sweep_id": sweep_id,
        "studies": studies,
        "lease_s": store.lease_s,
    }
    with _processes() as running:
        deaths, before = 0, counts.finished
        while counts.finished < counts.total:
            while len(running) < min(workers, counts.total - counts.finished):
                running.append(_start(told))
            time.sleep(POLL_S)
            counts = store.counts(sweep_id)
            tick()
            gone = [p for p in running if p.poll() is not None]
            running[:] = [p for p in running if p not in gone]
            for process in gone:
                _close(process)
            if counts.finished > before:
                deaths, before = 0, counts.finished
            deaths += sum(p.returncode != 0 for p in gone)
            if deaths >= MOST_DEATHS:
                raise AutoshardError(
                    f"{deaths} workers died in a row (last exit status: {gone[-1].returncode}); "
                    "what they wrote stands above"
                )


def _start(told: dict[str, Any]) -> subprocess.Popen[bytes]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno() if _real(sys.stderr) else subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has died; its exit status says so
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()
    return process


def _real(stream: IO[str]) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers; none of them is left when the block ends."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        yield running
    except BaseException:
        for process in running:
            process.terminate()  # gives its point back
        raise
    finally:
        deadline = time.monotonic() + GRACE_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    """Let go of a process that has ended."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
