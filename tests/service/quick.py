"""A worker that answers every job at once with the same plan, for tests of the HTTP side alone."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autoshard.api.store import Job, Result, Store
from tests.plan.samples import sample_plan

NAME = "quick"
LEASE_S = 30.0
TRACE = {
    "traceEvents": [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "device 0"}}]
}


def result() -> Result:
    """A plan as a worker hands it in."""
    return Result(
        summary={"name": "sample", "label": "hybrid", "devices": 8},
        document=sample_plan().to_json().encode(),
        trace=gzip.compress(json.dumps(TRACE).encode(), mtime=0),
    )


@contextmanager
def quick_worker(database: str) -> Iterator[list[Job]]:
    """Ends every job of the database until the block ends; those that it was given."""
    store = Store.open(database)
    ended = threading.Event()
    given: list[Job] = []
    answer = result()
    progress: dict[str, Any] = {"message": "priced 1/2", "done": 1, "total": 2}

    def work() -> None:
        while not ended.is_set():
            store.seen(NAME, LEASE_S)
            lease = store.claim(NAME, LEASE_S)
            if lease is None:
                ended.wait(0.02)
                continue
            given.append(lease.job)
            store.progress(lease, progress)
            store.finish(lease, answer)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield given
    finally:
        ended.set()
        thread.join()
        store.close()
