"""What the HTTP side asks: submit, read, cancel."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, insert, select

from autoshard.api.store import ids
from autoshard.api.store.database import Database, change, tell
from autoshard.api.store.errors import IdempotencyConflict, QueueFull, QuotaReached
from autoshard.api.store.records import Event, Job, StoredPlan
from autoshard.api.store.rows import JOB, PLAN, dumps, event_of, job_of, outline, plan_of
from autoshard.api.store.tables import events, idempotency, jobs, plans
from autoshard.api.wire import Kind

DAY_S = 86_400.0
SUBMIT = 7_310_002
"""Lock of PostgreSQL that makes submissions one at a time, so that limits hold exactly."""

# Built once: building one takes as long as running it.
JOB_BY_ID = select(*JOB).where(jobs.c.id == bindparam("id"))
PLAN_BY_ID = select(*PLAN).where(plans.c.id == bindparam("id"))
EVENTS_AFTER = (
    select(events)
    .where(events.c.job_id == bindparam("id"), events.c.seq > bindparam("after"))
    .order_by(events.c.seq)
    .limit(bindparam("most"))
)

TURNS: dict[Kind, int] = {"estimate": 0, "plan": 1}


class Callers(Database):
    """See the module."""

    def submit(
        self,
        owner: str,
        kind: Kind,
        request: dict[str, Any],
        digest: str,
        *,
        idempotency_key: str | None = None,
        queued_limit: int,
        owner_limit: int,
        daily_limit: int,
    ) -> tuple[Job, bool]:
        """A job for this request, and whether it is new; in one transaction.

        Not new where the same owner used this Idempotency-Key within 24 hours (whatever became of
        that job), or has a queued, running or succeeded job of the same digest that nobody asked
        to cancel: that one is given. Limits hold for new jobs only.

        Args:
            owner: whose job it is.
            kind: what is to be done.
            request: for the worker.
            digest: names equal requests.
            idempotency_key: of the header; its hash is kept.
            queued_limit: most jobs of all owners that wait.
            owner_limit: most unfinished jobs of this owner.
            daily_limit: most jobs that this owner may begin within 24 hours.

        Raises:
            QueueFull: see there.
            QuotaReached: see there.
            IdempotencyConflict: see there.
        """
        with self.writing() as connection:
            self.one_at_a_time(connection, SUBMIT)
            now = self.now(connection)
            if idempotency_key:
                used = answered(connection, owner, idempotency_key, digest, now)
                if used and (job := _job(connection, jobs.c.id == used)):
                    return job, False
            job = _job(
                connection,
                jobs.c.owner == owner,
                jobs.c.digest == digest,
                jobs.c.state.in_(("queued", "running", "succeeded")),
                jobs.c.cancel.is_(False),
            )
            new = job is None
            if job is None:
                _check_limits(connection, owner, now, queued_limit, owner_limit, daily_limit)
                job = insert_job(connection, owner, kind, request, digest, now)
            if idempotency_key:
                remember(connection, owner, idempotency_key, digest, job.id, now)
            return job, new

    def job(self, job_id: str) -> Job | None:
        """A job by its id."""
        if not ids.well_formed(job_id, "job"):
            return None
        with self.reading() as connection:
            row = connection.execute(JOB_BY_ID, {"id": job_id}).one_or_none()
            return None if row is None else job_of(row)

    def jobs(self, owner: str, *, limit: int, before: str | None = None) -> Sequence[Job]:
        """An owner's jobs, newest first; those older than the job ``before``."""
        statement = select(*JOB).where(jobs.c.owner == owner)
        if before is not None:
            if not ids.well_formed(before, "job"):
                return []
            statement = statement.where(jobs.c.id < before)
        with self.reading() as connection:
            rows = connection.execute(statement.order_by(jobs.c.id.desc()).limit(limit))
            return [job_of(row) for row in rows]

    def cancel(self, job_id: str) -> Job | None:
        """Ask a job to stop: a queued one ends at once, a running one when its worker hears.

        One that has ended stays as it is. None where there is no such job.
        """
        if not ids.well_formed(job_id, "job"):
            return None
        with self.writing() as connection:
            cancel_job(connection, job_id, self.now(connection))
            return _job(connection, jobs.c.id == job_id)

    def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Events of a job with ``seq`` above ``after``, in order."""
        if not ids.well_formed(job_id, "job"):
            return []
        asked = {"id": job_id, "after": min(after, 2**31 - 1), "most": limit}
        with self.reading() as connection:
            return [event_of(row) for row in connection.execute(EVENTS_AFTER, asked)]

    def plan(self, plan_id: str) -> StoredPlan | None:
        """A plan by its id."""
        if not ids.well_formed(plan_id, "plan"):
            return None
        with self.reading() as connection:
            row = connection.execute(PLAN_BY_ID, {"id": plan_id}).one_or_none()
            return None if row is None else plan_of(row)

    def trace(self, plan_id: str) -> bytes | None:
        """The predicted timeline of a plan, a gzipped Chrome trace; apart, since it is large."""
        if not ids.well_formed(plan_id, "plan"):
            return None
        with self.reading() as connection:
            found = connection.execute(select(plans.c.trace).where(plans.c.id == plan_id))
            trace = found.scalar_one_or_none()
            return None if trace is None else bytes(trace)

    def counts(self) -> dict[str, int]:
        """Number of jobs by state."""
        statement = select(jobs.c.state, func.count()).group_by(jobs.c.state)
        with self.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(statement)}


def _job(connection: Connection, *conditions: ColumnElement[bool]) -> Job | None:
    row = connection.execute(select(*JOB).where(*conditions).limit(1)).one_or_none()
    return None if row is None else job_of(row)


def answered(connection: Connection, owner: str, key: str, digest: str, now: float) -> str | None:
    """The id of the job or sweep that was made for this Idempotency-Key within 24 hours.

    Raises:
        IdempotencyConflict: it was used with another request.
    """
    connection.execute(delete(idempotency).where(idempotency.c.created_s < now - DAY_S))
    same = select(idempotency.c.digest, idempotency.c.job_id).where(
        idempotency.c.owner == owner, idempotency.c.key_hash == _hashed(key)
    )
    used = connection.execute(same).one_or_none()
    if used is None:
        return None
    if used.digest != digest:
        raise IdempotencyConflict(
            "this Idempotency-Key was used with another request less than 24 hours ago; send a "
            "new key with a new request"
        )
    return str(used.job_id)


def remember(
    connection: Connection, owner: str, key: str, digest: str, made: str, now: float
) -> None:
    """Note the id of the job or sweep that was made for an Idempotency-Key."""
    hashed = _hashed(key)
    # The job that an older row named may be pruned by now.
    mine = (idempotency.c.owner == owner, idempotency.c.key_hash == hashed)
    connection.execute(delete(idempotency).where(*mine))
    row = {"owner": owner, "key_hash": hashed, "digest": digest, "job_id": made}
    connection.execute(insert(idempotency), {**row, "created_s": now})


def _hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def cancel_job(connection: Connection, job_id: str, now: float) -> None:
    """Ask a job to stop, in this transaction; see ``Callers.cancel``."""
    found = select(jobs.c.state).where(jobs.c.id == job_id).with_for_update()
    state = connection.execute(found).scalar_one_or_none()
    if state == "queued":
        change(
            connection,
            job_id,
            now=now,
            event_kind="cancelled",
            data={},
            state="cancelled",
            finished_s=now,
        )
    elif state == "running":
        change(
            connection,
            job_id,
            jobs.c.cancel.is_(False),
            now=now,
            event_kind="cancelling",
            data={},
            cancel=True,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How many jobs there are: waiting ones of all, unfinished ones and a day's of one owner."""

    waiting: int
    unfinished: int
    today: int


def load_of(connection: Connection, owner: str, now: float) -> Load:
    """What the limits are compared with."""

    def count(*conditions: ColumnElement[bool]) -> int:
        statement = select(func.count()).select_from(jobs).where(*conditions)
        return int(connection.execute(statement).scalar_one())

    return Load(
        waiting=count(jobs.c.state == "queued"),
        unfinished=count(jobs.c.state.in_(("queued", "running")), jobs.c.owner == owner),
        today=count(jobs.c.owner == owner, jobs.c.id >= ids.earliest("job", now - DAY_S)),
    )


def _check_limits(
    connection: Connection,
    owner: str,
    now: float,
    queued_limit: int,
    owner_limit: int,
    daily_limit: int,
) -> None:
    load = load_of(connection, owner, now)
    if load.waiting >= queued_limit:
        raise QueueFull(f"{load.waiting} jobs wait already, and no more may; try again later")
    if load.unfinished >= owner_limit:
        raise QuotaReached(
            f"you have {load.unfinished} unfinished jobs, and no more are allowed; wait until one "
            "ends, or cancel one"
        )
    if load.today >= daily_limit:
        raise QuotaReached(
            f"you sent {load.today} jobs within 24 hours, and no more are allowed; wait until the "
            "oldest is a day old"
        )


def insert_job(
    connection: Connection,
    owner: str,
    kind: Kind,
    request: dict[str, Any],
    digest: str,
    now: float,
) -> Job:
    """A new job that waits."""
    job_id = ids.new("job", now)
    row = {
        "id": job_id,
        "owner": owner,
        "kind": kind,
        "turn": TURNS[kind],
        "state": "queued",
        "digest": digest,
        "created_s": now,
        "attempt": 0,
        "cancel": False,
        "revision": 1,
        "outline": dumps(outline(request)),
        "request": dumps(request),
    }
    connection.execute(insert(jobs), row)
    tell(connection, job_id, 1, now, "queued", {})
    found = _job(connection, jobs.c.id == job_id)
    assert found is not None
    return found
