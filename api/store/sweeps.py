"""Sweeps: named lists of points, each of which is a job of the same owner.

A sweep has no state of its own: it is as far as its jobs are. Equal points, of one sweep or of
several, and of a plan that was asked for by itself, are one job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, func, insert, select

from autoshard.api.store import ids
from autoshard.api.store.callers import (
    DAY_S,
    SUBMIT,
    Callers,
    answered,
    cancel_job,
    insert_job,
    load_of,
    remember,
)
from autoshard.api.store.errors import QueueFull, QuotaReached
from autoshard.api.store.records import Asked, Job, Sweep, SweepPoint
from autoshard.api.store.rows import dumps
from autoshard.api.store.tables import jobs, plans, sweep_points, sweeps

AT_A_TIME = 500
"""Values of one IN: both databases take more, none takes any number."""

UNENDED = ("queued", "running")


class Sweeps(Callers):
    """See the module."""

    def submit_sweep(
        self,
        owner: str,
        name: str,
        description: str,
        notes: Sequence[str],
        points: Sequence[Asked],
        *,
        idempotency_key: str | None = None,
        queued_limit: int,
        owner_limit: int,
        daily_limit: int,
    ) -> tuple[Sweep, list[Job]]:
        """A sweep, and the jobs that are new with it; in one transaction, so all or nothing.

        A point is the job that ``submit`` would give. Limits hold for what is new, and the points
        of a day's sweeps, new or not, are as few as its jobs.

        Args:
            owner: whose sweep it is.
            name: for people.
            description: for people.
            notes: what was noticed while reading it.
            points: in their order.
            idempotency_key: as for ``submit``.
            queued_limit: as for ``submit``.
            owner_limit: as for ``submit``.
            daily_limit: as for ``submit``; and most points of sweeps within 24 hours.

        Raises:
            QueueFull: says how many new points there is room for.
            QuotaReached: likewise.
            IdempotencyConflict: see there.
        """
        digest = _digest(name, description, points)
        with self.writing() as connection:
            self.one_at_a_time(connection, SUBMIT)
            now = self.now(connection)
            if idempotency_key:
                used = answered(connection, owner, idempotency_key, digest, now)
                if used and (found := _sweeps(connection, sweeps.c.id == used)):
                    return found[0], []
            known = _known(connection, owner, [p.digest for p in points])
            fresh = {p.digest: p for p in points if p.digest not in known}
            _check_points(connection, owner, now, len(points), daily_limit)
            if fresh:
                _check_room(
                    connection, owner, now, len(fresh), queued_limit, owner_limit, daily_limit
                )
            new = [
                # Apart, since the queue goes by ids, which sort by microsecond: by two, since
                # one may be lost when seconds since the epoch are rounded.
                insert_job(connection, owner, p.kind, p.request, p.digest, now + place * 2e-6)
                for place, p in enumerate(fresh.values())
            ]
            known |= {job.digest: job.id for job in new}
            sweep_id = ids.new("sweep", now)
            head = {
                "id": sweep_id,
                "owner": owner,
                "name": name,
                "description": description,
                "notes": dumps(list(notes)),
                "size": len(points),
                "created_s": now,
            }
            connection.execute(insert(sweeps), head)
            connection.execute(
                insert(sweep_points),
                [
                    {
                        "sweep_id": sweep_id,
                        "position": position,
                        "job_id": known[point.digest],
                        "asked": dumps(point.asked),
                    }
                    for position, point in enumerate(points)
                ],
            )
            if idempotency_key:
                remember(connection, owner, idempotency_key, digest, sweep_id, now)
            return _sweeps(connection, sweeps.c.id == sweep_id)[0], new

    def sweep(self, sweep_id: str) -> Sweep | None:
        """A sweep by its id."""
        if not ids.well_formed(sweep_id, "sweep"):
            return None
        with self.reading() as connection:
            found = _sweeps(connection, sweeps.c.id == sweep_id)
            return found[0] if found else None

    def sweeps(self, owner: str, *, limit: int, before: str | None = None) -> Sequence[Sweep]:
        """An owner's sweeps, newest first; those older than the sweep ``before``."""
        conditions = [sweeps.c.owner == owner]
        if before is not None:
            if not ids.well_formed(before, "sweep"):
                return []
            conditions.append(sweeps.c.id < before)
        with self.reading() as connection:
            return _sweeps(connection, *conditions, limit=limit)

    def sweep_points(self, sweep_id: str) -> Sequence[SweepPoint]:
        """The points of a sweep, in their order."""
        statement = (
            select(
                sweep_points.c.asked,
                *(jobs.c.id, jobs.c.kind, jobs.c.state, jobs.c.plan_id, jobs.c.problem),
                *(jobs.c.started_s, jobs.c.finished_s, plans.c.summary),
            )
            .join(jobs, jobs.c.id == sweep_points.c.job_id)
            .outerjoin(plans, plans.c.id == jobs.c.plan_id)
            .where(sweep_points.c.sweep_id == sweep_id)
            .order_by(sweep_points.c.position)
        )
        with self.reading() as connection:
            return [
                SweepPoint(
                    asked=json.loads(row.asked),
                    job_id=row.id,
                    kind=row.kind,
                    state=row.state,
                    plan_id=row.plan_id,
                    problem=None if row.problem is None else json.loads(row.problem),
                    started_s=row.started_s,
                    finished_s=row.finished_s,
                    summary=None if row.summary is None else json.loads(row.summary),
                )
                for row in connection.execute(statement)
            ]

    def cancel_sweep(self, sweep_id: str) -> None:
        """Ask all jobs of a sweep to stop that have not ended; see ``cancel``."""
        left = (
            select(jobs.c.id)
            .distinct()
            .join(sweep_points, sweep_points.c.job_id == jobs.c.id)
            .where(sweep_points.c.sweep_id == sweep_id, jobs.c.state.in_(UNENDED))
            .order_by(jobs.c.id)
        )
        with self.writing() as connection:
            self.one_at_a_time(connection, SUBMIT)  # so that two of these lock no rows crosswise
            for job_id in connection.execute(left).scalars().all():
                cancel_job(connection, job_id, self.now(connection))


def _digest(name: str, description: str, points: Sequence[Asked]) -> str:
    text = json.dumps(["sweep", name, description, [[p.digest, p.asked] for p in points]])
    return hashlib.sha256(text.encode()).hexdigest()


def _known(connection: Connection, owner: str, digests: Sequence[str]) -> dict[str, str]:
    """By digest, the jobs that equal requests are given."""
    out: dict[str, str] = {}
    for start in range(0, len(digests), AT_A_TIME):
        statement = select(jobs.c.digest, jobs.c.id).where(
            jobs.c.owner == owner,
            jobs.c.digest.in_(digests[start : start + AT_A_TIME]),
            jobs.c.state.in_((*UNENDED, "succeeded")),
            jobs.c.cancel.is_(False),
        )
        out |= {row.digest: row.id for row in connection.execute(statement)}
    return out


def _check_points(
    connection: Connection, owner: str, now: float, asked: int, daily_limit: int
) -> None:
    statement = select(func.coalesce(func.sum(sweeps.c.size), 0)).where(
        sweeps.c.owner == owner, sweeps.c.id >= ids.earliest("sweep", now - DAY_S)
    )
    today = int(connection.execute(statement).scalar_one())
    if today + asked > daily_limit:
        raise QuotaReached(
            f"your sweeps have {today} points within 24 hours, so {asked} more are not allowed; at "
            f"most {max(0, daily_limit - today)} may be asked for now"
        )


def _check_room(
    connection: Connection,
    owner: str,
    now: float,
    new: int,
    queued_limit: int,
    owner_limit: int,
    daily_limit: int,
) -> None:
    load = load_of(connection, owner, now)
    here = queued_limit - load.waiting
    yours = min(owner_limit - load.unfinished, daily_limit - load.today)
    if new <= min(here, yours):
        return
    said = (
        f"{new} points of this sweep are new jobs; at most {max(0, min(here, yours))} may be asked "
        "for now; ask for fewer, or wait until jobs end"
    )
    if here < yours:
        raise QueueFull(f"{load.waiting} jobs of all callers wait already; {said}")
    raise QuotaReached(
        f"you have {load.unfinished} unfinished jobs of at most {owner_limit}, and began "
        f"{load.today} of at most {daily_limit} within 24 hours; {said}"
    )


def _sweeps(
    connection: Connection, *conditions: ColumnElement[bool], limit: int = 1
) -> list[Sweep]:
    """Sweeps with the states of their points, newest first."""
    statement = select(sweeps).where(*conditions)
    heads = connection.execute(statement.order_by(sweeps.c.id.desc()).limit(limit)).all()
    states: dict[str, dict[str, int]] = {row.id: {} for row in heads}
    tally = (
        select(sweep_points.c.sweep_id, jobs.c.state, func.count())
        .join(jobs, jobs.c.id == sweep_points.c.job_id)
        .where(sweep_points.c.sweep_id.in_(states))
        .group_by(sweep_points.c.sweep_id, jobs.c.state)
    )
    for sweep_id, state, number in connection.execute(tally):
        states[sweep_id][state] = number
    return [
        Sweep(
            id=row.id,
            owner=row.owner,
            name=row.name,
            description=row.description,
            notes=tuple(json.loads(row.notes)),
            created_s=row.created_s,
            counts=states[row.id],
        )
        for row in heads
    ]
