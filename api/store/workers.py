"""What workers do: claim a job, keep it, hand in its end.

Every write is conditional on the lease: the job still runs, under the token that this claim was
given. A worker that was too slow to prolong its lease cannot change what another does now.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from autoshard.api.store import ids
from autoshard.api.store.database import Database, change
from autoshard.api.store.processes import is_gone
from autoshard.api.store.records import Lease, Result
from autoshard.api.store.rows import JOB, dumps, job_of
from autoshard.api.store.tables import jobs, plans, workers

IDLE = {"worker": None, "token": None, "lease_until_s": None}
SILENCES = 3
"""Leases of silence after which a worker counts as gone."""


class Workers(Database):
    """See the module."""

    def claim(self, worker: str, lease_s: float) -> Lease | None:
        """The next job, estimates first, then oldest first; None where none waits.

        Args:
            worker: name of the claiming process, from ``processes.identity``.
            lease_s: how long the job stays with it without a heartbeat.
        """
        queued = jobs.c.state == "queued"
        with self.reading() as connection:  # an idle worker asks often, and writes nothing
            if connection.execute(select(jobs.c.id).where(queued).limit(1)).first() is None:
                return None
        next_one = (
            select(jobs.c.id, jobs.c.attempt)
            .where(queued)
            .order_by(jobs.c.turn, jobs.c.id)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        with self.writing() as connection:
            found = connection.execute(next_one).one_or_none()
            if found is None:
                return None
            now, token = self.now(connection), secrets.token_hex(16)
            change(
                connection,
                found.id,
                now=now,
                event_kind="running",
                data={"attempt": found.attempt + 1},
                state="running",
                attempt=found.attempt + 1,
                started_s=now,
                progress=None,
                worker=worker,
                token=token,
                lease_until_s=now + lease_s,
            )
            row = connection.execute(
                select(*JOB, jobs.c.request).where(jobs.c.id == found.id)
            ).one()
            return Lease(job=job_of(row, row.request), token=token, until_s=now + lease_s)

    def heartbeat(self, lease: Lease, lease_s: float) -> Literal["go on", "cancel", "lost"]:
        """Prolong a lease; ``lost`` where the job was given to another or has ended."""
        with self.writing() as connection:
            statement = (
                update(jobs)
                .where(*_holds(lease))
                .values(lease_until_s=self.now(connection) + lease_s)
                .returning(jobs.c.cancel)
            )
            cancel = connection.execute(statement).scalar_one_or_none()
        return "lost" if cancel is None else "cancel" if cancel else "go on"

    def progress(self, lease: Lease, data: dict[str, Any]) -> bool:
        """Record progress as an event; False where the lease was lost."""
        with self.writing() as connection:
            return change(
                connection,
                lease.job.id,
                *_holds(lease),
                now=self.now(connection),
                event_kind="progress",
                data=data,
                progress=dumps(data),
            )

    def finish(self, lease: Lease, result: Result | None) -> bool:
        """End the job, store its plan, in one transaction; False where the lease was lost.

        Args:
            lease: from ``claim``.
            result: a plan (then ``document``, ``summary`` and ``trace`` are all given) or a
                problem; None: it was stopped because that was asked for.
        """
        job = lease.job
        with self.writing() as connection:
            now = self.now(connection)

            def end(state: str, data: dict[str, Any], **values: Any) -> bool:
                return change(
                    connection,
                    job.id,
                    *_holds(lease),
                    now=now,
                    event_kind=state,
                    data=data,
                    state=state,
                    finished_s=now,
                    **IDLE,
                    **values,
                )

            if result is None:
                return end("cancelled", {})
            if result.problem is not None:
                return end("failed", {"problem": result.problem}, problem=dumps(result.problem))
            plan_id = ids.new("plan", now)
            if not end("succeeded", {"plan_id": plan_id}, plan_id=plan_id):
                return False
            plan = {
                "id": plan_id,
                "job_id": job.id,
                "owner": job.owner,
                "digest": job.digest,
                "share": ids.secret(),
                "created_s": now,
                "summary": dumps(result.summary),
                "document": result.document,
                "trace": result.trace,
            }
            connection.execute(insert(plans), plan)
            return True

    def release(self, lease: Lease) -> None:
        """Give a job back unfinished: it is queued again, before those that came later."""
        with self.writing() as connection:
            now = self.now(connection)
            _again(connection, lease.job.id, _holds(lease), now, "its worker is stopping", None)

    def reap(self, attempts: int) -> int:
        """Queue jobs again whose lease ran out or whose worker on this machine is gone.

        A job that was begun ``attempts`` times fails instead; one that was to be cancelled is.
        Returns how many were touched. Workers that are gone are forgotten.
        """
        statement = select(jobs.c.id, jobs.c.token, jobs.c.worker, jobs.c.lease_until_s).where(
            jobs.c.state == "running"
        )
        with self.reading() as connection:
            now = self.now(connection)
            late = [
                (row, "its worker died" if gone else "its worker was silent for too long")
                for row in connection.execute(statement)
                if (gone := is_gone(row.worker)) or row.lease_until_s < now
            ]
            names = connection.execute(
                select(workers.c.id, workers.c.seen_s + 20 * workers.c.lease_s)
            )
            left = [name for name, until in names if until < now or is_gone(name)]
        touched = 0
        if late or left:
            with self.writing() as connection:
                now = self.now(connection)
                for row, why in late:
                    # Unless a heartbeat came in between.
                    same = [jobs.c.token == row.token, jobs.c.state == "running"]
                    same += [jobs.c.lease_until_s == row.lease_until_s]
                    touched += _again(connection, row.id, same, now, why, attempts)
                if left:
                    connection.execute(delete(workers).where(workers.c.id.in_(left)))
        return touched

    def workers_alive(self) -> int:
        """Workers that were heard of within three of their leases."""
        with self.reading() as connection:
            now = self.now(connection)
            alive = workers.c.seen_s + SILENCES * workers.c.lease_s > now
            statement = select(func.count()).select_from(workers).where(alive)
            return int(connection.execute(statement).scalar_one())

    def seen(self, worker: str, lease_s: float) -> None:
        """Note that a worker lives; ``lease_s=0``: that it has left."""
        with self.writing() as connection:
            if not lease_s:
                connection.execute(delete(workers).where(workers.c.id == worker))
                return
            values = {"seen_s": self.now(connection), "lease_s": lease_s}
            mine = update(workers).where(workers.c.id == worker).values(values)
            if not connection.execute(mine).rowcount:
                connection.execute(insert(workers), {"id": worker, **values})


def _holds(lease: Lease) -> list[ColumnElement[bool]]:
    return [
        jobs.c.id == lease.job.id,
        jobs.c.token == lease.token,
        jobs.c.state == "running",
    ]


def _again(
    connection: Connection,
    job_id: str,
    conditions: list[ColumnElement[bool]],
    now: float,
    why: str,
    attempts: int | None,
) -> int:
    """Queue a job again, or end it where it was to stop or was begun too often."""
    locked = select(jobs.c.cancel, jobs.c.attempt).where(jobs.c.id == job_id, *conditions)
    row = connection.execute(locked.with_for_update()).one_or_none()
    if row is None:
        return 0
    values: dict[str, Any] = {**IDLE, "progress": None}
    data: dict[str, Any] = {}
    if row.cancel:
        state = "cancelled"
    elif attempts is not None and row.attempt >= attempts:
        state = "failed"
        data["problem"] = {
            "type": "about:autoshard/given-up",
            "title": "The job was given up",
            "status": 500,
            "detail": f"it was begun {row.attempt} times and never came to its end; the last "
            f"time, {why}",
        }
        values["problem"] = dumps(data["problem"])
    else:
        state, data["reason"] = "queued", why
    if state != "queued":
        values["finished_s"] = now
    change(connection, job_id, now=now, event_kind=state, data=data, state=state, **values)
    return 1
