"""Laws of the store under any order of calls, one after the other and at once."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from autoshard.api.store import Job, Lease, QuotaReached, Result, Store, processes
from autoshard.api.wire import ENDED
from tests.service import postgres

PLAN = Result(summary={}, document=b"{}", trace=b"t")
PROBLEM = Result(problem={"title": "no"})
LETTERS = {
    "queued": "Q",
    "running": "R",
    "progress": "P",
    "cancelling": "X",
    "succeeded": "S",
    "failed": "F",
    "cancelled": "C",
}
LIFE = re.compile(r"Q(RP*Q)*(C|RP*([SF]|XP*[SFC]?)?)?")
"""Every history: begun again only after it was queued again, so never twice at once; ends once."""


def send(store: Store, what: int, owner: str, **more: Any) -> tuple[Job, bool]:
    limits = {"queued_limit": 1000, "owner_limit": 1000, "daily_limit": 10_000}
    return store.submit(owner, "plan", {"what": what}, str(what), **(limits | more))


def check_lives(store: Store, jobs: list[str]) -> None:
    for job_id in jobs:
        job, events = store.job(job_id), store.events(job_id, limit=100_000)
        assert job is not None
        assert [e.seq for e in events] == list(range(1, len(events) + 1))
        assert job.revision == len(events)
        life = "".join(LETTERS[e.kind] for e in events)
        assert LIFE.fullmatch(life), life
        assert job.attempt == life.count("R")
        if job.state in ENDED:
            assert events[-1].kind == job.state
        assert (job.plan_id is not None) == (job.state == "succeeded")


class Machine(RuleBasedStateMachine):
    """The store beside a simple model of it: who holds each job now."""

    leases = Bundle("leases")
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.store = Store.open(f"sqlite:///{self.folder.name}/a.db")
        self.state: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.digest: dict[str, tuple[str, str]] = {}
        self.keys: dict[tuple[str, str], str] = {}
        self.holder: dict[str, Lease] = {}

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(
        target=jobs,
        what=st.integers(0, 2),
        owner=st.sampled_from("ab"),
        key=st.sampled_from([None, "k1", "k2"]),
    )
    def submit(self, what: int, owner: str, key: str | None) -> Any:
        used = self.keys.get((owner, key)) if key else None
        if used and self.digest[used] != (owner, str(what)):
            return multiple()  # a conflict, tested elsewhere
        same = [
            j
            for j, d in self.digest.items()
            if d == (owner, str(what))
            and self.state[j] in ("queued", "running", "succeeded")
            and j not in self.cancelled
        ]
        job, new = send(self.store, what, owner, idempotency_key=key)
        expected = used or (same[0] if same else None)
        assert new == (expected is None)
        if expected is not None:
            assert job.id == expected
        else:
            assert job.id not in self.state
            self.state[job.id] = "queued"
            self.digest[job.id] = (owner, str(what))
        if key:
            self.keys[owner, key] = job.id
        return job.id

    @rule(target=leases, dead=st.booleans())
    def claim(self, dead: bool) -> Any:
        lease = self.store.claim(processes.identity(), -1.0 if dead else 600.0)
        waiting = sorted(j for j, s in self.state.items() if s == "queued")
        assert (lease.job.id if lease else None) == (waiting[0] if waiting else None)
        if lease is None:
            return multiple()
        self.state[lease.job.id] = "running"
        self.holder[lease.job.id] = lease
        return lease

    def holds(self, lease: Lease) -> bool:
        return self.holder.get(lease.job.id) is lease

    @rule(lease=leases)
    def heartbeat(self, lease: Lease) -> None:
        right = "cancel" if lease.job.id in self.cancelled else "go on"
        assert self.store.heartbeat(lease, 600.0) == (right if self.holds(lease) else "lost")

    @rule(lease=leases)
    def progress(self, lease: Lease) -> None:
        assert self.store.progress(lease, {"message": "m"}) == self.holds(lease)

    @rule(lease=leases, how=st.sampled_from(["plan", "problem"]))
    def finish(self, lease: Lease, how: str) -> None:
        done = self.store.finish(lease, PLAN if how == "plan" else PROBLEM)
        assert done == self.holds(lease)
        if done:
            self.state[lease.job.id] = "succeeded" if how == "plan" else "failed"
            del self.holder[lease.job.id]

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        self.store.release(lease)
        if self.holds(lease):
            del self.holder[lease.job.id]
            ended = lease.job.id in self.cancelled
            self.state[lease.job.id] = "cancelled" if ended else "queued"

    @rule()
    def reap(self) -> None:
        """What was claimed with a lease in the past, and had no heartbeat since."""
        before = dict(self.holder)
        touched = self.store.reap(10**6)
        for job_id in before:
            job = self.store.job(job_id)
            assert job is not None
            if job.state != "running":
                touched -= 1
                del self.holder[job_id]
                self.state[job_id] = "cancelled" if job_id in self.cancelled else "queued"
        assert touched == 0

    @rule(job_id=jobs)
    def cancel(self, job_id: str) -> None:
        self.store.cancel(job_id)
        if self.state[job_id] == "queued":
            self.state[job_id] = "cancelled"
        elif self.state[job_id] == "running":
            self.cancelled.add(job_id)

    @invariant()
    def the_store_says_the_same(self) -> None:
        for job_id, state in self.state.items():
            job = self.store.job(job_id)
            assert job is not None
            assert job.state == state
        check_lives(self.store, list(self.state))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'a.db'}"
    else:
        url = postgres.new_database(request.getfixturevalue("postgres_server"), "laws")
    opened = Store.open(url)
    yield opened
    opened.close()


def test_any_interleaving_of_callers_and_workers(store: Store) -> None:
    """Eight threads do what comes to their mind; every job still has a possible life."""
    seen: set[str] = set()

    def act(seed: int) -> None:
        rng = random.Random(seed)
        leases: list[Lease] = []
        for _ in range(40):
            match rng.choice(["send", "send", "claim", "claim", "beat", "end", "end", "more"]):
                case "send":
                    try:
                        job, _ = send(store, rng.randrange(12), rng.choice("ab"), owner_limit=6)
                    except QuotaReached:
                        continue
                    seen.add(job.id)
                case "claim":
                    lease = store.claim(processes.identity(), rng.choice([-1.0, 600.0]))
                    leases += [lease] if lease else []
                case "beat" if leases:
                    lease = rng.choice(leases)
                    if store.heartbeat(lease, 600.0) == "go on":
                        store.progress(lease, {"message": str(seed)})
                case "end" if leases:
                    lease = leases.pop(rng.randrange(len(leases)))
                    if rng.random() < 0.3:
                        store.release(lease)
                    else:
                        store.finish(lease, rng.choice([PLAN, PROBLEM]))
                case "more" if seen:
                    if rng.random() < 0.5:
                        store.cancel(rng.choice(sorted(seen)))
                    else:
                        store.reap(10**6)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(act, range(8)))
    check_lives(store, sorted(seen))
    for owner in "ab":
        unfinished = [j for j in store.jobs(owner, limit=1000) if j.state not in ENDED]
        assert len(unfinished) <= 6
    assert sum(store.counts().values()) == len(seen)
