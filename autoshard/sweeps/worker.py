"""A worker: takes points of a sweep, one after the other, until none is left.

Workers of one command are processes of their own, told what to do by one JSON document on their
input. When their input ends, whoever started them is gone, and they go too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autoshard.errors import AutoshardError
from autoshard.sweeps.store import Claim, Store
from autoshard.sweeps.work import Bench

POLL_S = 0.5
"""How often is looked whether a point that others work on has become free."""

Tick = Callable[[], None]


def work(store: Store, sweep_id: int, *, studies: str | None = None, tick: Tick) -> None:
    """Do points until all of the sweep are finished, by this worker or by others.

    Args:
        store: where the sweep was entered.
        sweep_id: which it is.
        studies: see :class:`autoshard.sweeps.work.Bench`.
        tick: called after each point, and now and then while others work.
    """
    bench = Bench(studies)
    while True:
        claim = store.claim(sweep_id)
        if claim is None:
            counts = store.counts(sweep_id)
            tick()
            if counts.finished == counts.total:
                return
            time.sleep(POLL_S)
            continue
        try:
            with _renewed(store, claim):
                row, plan = bench.do(claim.point)
        except BaseException:
            store.release(claim)  # interrupted: somebody else may have it at once
            raise
        store.finish(claim, row, plan)
        tick()


@contextmanager
def _renewed(store: Store, claim: Claim) -> Iterator[None]:
    """Keep a claim while the block runs."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(store.lease_s / 4):
            try:
                if not store.renew(claim):
                    return  # somebody else has it; what this worker finds will not be written
            except AutoshardError:
                continue  # the database may be back before the lease ends

    thread = threading.Thread(target=renew, name="autoshard-sweep-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _leave_with_the_starter() -> None:
    """End this process when its input ends."""

    def wait() -> None:
        # Not through sys.stdin, whose lock the end of the interpreter would wait for.
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="autoshard-sweep-starter", daemon=True).start()


def main(told: dict[str, Any]) -> int:
    """The process of one worker; ``told`` is what :mod:`autoshard.sweeps.run` told it."""
    # A terminal interrupts the starter too, which then ends its workers: one signal, not two.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _leave_with_the_starter()
    store = Store(told["store"], create=False, lease_s=told["lease_s"])
    try:
        work(store, told["sweep_id"], studies=told["studies"], tick=lambda: None)
    except KeyboardInterrupt:
        return 130
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    return 0
