"""Who waits for a job is told when it changes.

One loop of a server asks the database for the jobs that anybody watches, in one go from a thread,
so a hundred waiting requests cost no more than one, and nothing asks while nobody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio.to_thread

from autoshard.api.log import logger
from autoshard.api.store import Job, Store, StoreError
from autoshard.api.wire import ENDED

TICK_S = 0.08
"""How often watched jobs are looked at."""

FOLLOW_S = 2.0
"""How often those are that nobody watches, for the figures of how long planning takes."""

FOLLOWED_AT_A_TIME = 50


class Watch:
    """One job as it was last seen."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.users = 0
        self._changed = asyncio.Event()

    def see(self, job: Job) -> None:
        """Tell everybody, where it changed."""
        if job.revision != self.job.revision:
            self.job = job
            self.wake()

    def wake(self) -> None:
        """Let everybody look."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def beyond(self, revision: int, timeout_s: float, closing: asyncio.Event) -> Job | None:
        """The job once it is past ``revision``; None where that takes too long or all must end."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.job.revision <= revision:
                    if closing.is_set():
                        return None
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self.job


class Hub:
    """The watches of one server.

    Args:
        store: where the jobs are.
        ended: told of each job that this server accepted and that has ended.
    """

    def __init__(self, store: Store, ended: Callable[[Job], None]) -> None:
        self._store, self._ended = store, ended
        self._watches: dict[str, Watch] = {}
        self._followed: dict[str, None] = {}
        self._wanted = asyncio.Event()
        self.closing = asyncio.Event()

    @contextmanager
    def watch(self, job: Job) -> Iterator[Watch]:
        """Look at a job until the block ends."""
        watch = self._watches.setdefault(job.id, Watch(job))
        watch.users += 1
        self._wanted.set()
        try:
            yield watch
        finally:
            watch.users -= 1
            if not watch.users:
                self._watches.pop(job.id, None)

    def follow(self, job: Job) -> None:
        """Note when this job ends."""
        if job.state not in ENDED:
            self._followed[job.id] = None

    @property
    def watchers(self) -> int:
        """How many look at jobs just now."""
        return sum(watch.users for watch in self._watches.values())

    def close(self) -> None:
        """End every wait."""
        self.closing.set()
        for watch in self._watches.values():
            watch.wake()

    async def run(self) -> None:
        """Look at jobs until cancelled."""
        loop = asyncio.get_running_loop()
        next_follow_s = loop.time()
        while True:
            self._wanted.clear()
            wanted = list(self._watches)
            if loop.time() >= next_follow_s:
                next_follow_s = loop.time() + FOLLOW_S
                wanted += list(self._followed)[:FOLLOWED_AT_A_TIME]
            if wanted:
                try:
                    jobs = await anyio.to_thread.run_sync(self._read, wanted)
                except StoreError as error:
                    logger().error("watching jobs failed", error=str(error))
                    await asyncio.sleep(1.0)
                    continue
                for job in jobs:
                    self._see(job)
            if self._watches:
                await asyncio.sleep(TICK_S)
            else:
                with_timeout = asyncio.wait_for(self._wanted.wait(), FOLLOW_S)
                try:
                    await with_timeout
                except TimeoutError:
                    continue

    def _read(self, ids: Sequence[str]) -> list[Job]:
        found = (self._store.job(job_id) for job_id in dict.fromkeys(ids))
        return [job for job in found if job is not None]

    def _see(self, job: Job) -> None:
        if job.id in self._followed:
            # Those that go on are looked at again after the others.
            del self._followed[job.id]
            if job.state in ENDED:
                self._ended(job)
            else:
                self._followed[job.id] = None
        if watch := self._watches.get(job.id):
            watch.see(job)
