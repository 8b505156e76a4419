"""Sweeps and their rows, kept while they come in; several workers and machines share one store.

A worker *claims* a point: the point gets a new token and a lease, which the worker renews while it
works. A worker that is silent for longer has died, and its point is claimed again. What a point
ends with is written only where the token is still the writer's, so a point ends once.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, and_, func, insert, or_, select, update

from autoshard.errors import RequestError, UnknownNameError
from autoshard.sweeps.config import Sweep
from autoshard.sweeps.database import Database, points, sweeps
from autoshard.sweeps.points import Point
from autoshard.sweeps.rows import Row

LEASE_S = 20.0
"""A worker that is silent for so long has died."""

MOST_ATTEMPTS = 3
"""A point whose worker died so often has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A point that this worker, and nobody else, works on."""

    point_id: int
    token: str
    point: Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many points there are of each status."""

    pending: int
    running: int
    done: int
    failed: int

    @property
    def total(self) -> int:
        """All points of the sweep."""
        return self.pending + self.running + self.done + self.failed

    @property
    def finished(self) -> int:
        """Points that will not run again by themselves."""
        return self.done + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What became of a sweep's points when it was entered.

    Attributes:
        sweep_id: number of the sweep in its store.
        added: points that the store did not have.
        dropped: points that the sweep had and has no longer; they are kept, out of sight, and come
            back with their figures when the sweep names them again.
    """

    sweep_id: int
    added: int
    dropped: int


class Store:
    """The rows of sweeps.

    Args:
        where: path of an SQLite file, or a URL of SQLite or PostgreSQL.
        create: whether it is made where it is not there.
        lease_s: a worker that is silent for so long has died.
    """

    def __init__(self, where: str | Path, *, create: bool = True, lease_s: float = LEASE_S) -> None:
        self._database = Database(where, create=create)
        self.url, self.shown = self._database.url, self._database.shown
        self.lease_s = lease_s

    def close(self) -> None:
        """Give all connections back."""
        self._database.close()

    # ---- entering a sweep --------------------------------------------------------------------

    def register(self, sweep: Sweep, *, retry_failed: bool = False) -> Registered:
        """Enter a sweep, or bring one of its name up to date.

        Args:
            sweep: its points; those that are there already keep what is known of them.
            retry_failed: whether points that failed run again.
        """
        found = {p.key: (i, p) for i, p in enumerate(sweep.points)}
        with self._database.writing() as connection:
            self._database.one_at_a_time(connection)
            where = sweeps.c.name == sweep.name
            known = connection.execute(select(sweeps.c.id).where(where)).scalar()
            if known is None:
                values = {
                    "name": sweep.name,
                    "description": sweep.description,
                    "created_s": self._database.now_s(connection),
                }
                made = connection.execute(insert(sweeps).values(values).returning(sweeps.c.id))
                known = made.scalar_one()
            mine = points.c.sweep_id == known
            columns = select(points.c.id, points.c.key, points.c.active, points.c.position)
            old = {r.key: r for r in connection.execute(columns.where(mine))}
            dropped = [r.id for r in old.values() if r.active and r.key not in found]
            added = [
                _new(int(known), position, point)
                for key, (position, point) in found.items()
                if key not in old
            ]
            if added:
                connection.execute(insert(points), added)
            for key, row in old.items():
                position = found[key][0] if key in found else row.position
                if (row.active, row.position) != (key in found, position):
                    change = update(points).where(points.c.id == row.id)
                    connection.execute(change.values(active=key in found, position=position))
            if retry_failed:
                again = update(points).where(mine, points.c.status == "failed")
                connection.execute(again.values(status="pending", attempts=0, row=None))
        return Registered(sweep_id=int(known), added=len(added), dropped=len(dropped))

    # ---- working -----------------------------------------------------------------------------

    def claim(self, sweep_id: int, worker: str = "") -> Claim | None:
        """The next point that nobody works on, or None; measured points come last.

        A point whose workers died ``MOST_ATTEMPTS`` times is failed on the way.
        """
        while True:
            with self._database.writing() as connection:
                now_s = self._database.now_s(connection)
                free = self._free(sweep_id, now_s)
                order = (points.c.measured, points.c.position, points.c.id)
                columns = (points.c.id, points.c.spec, points.c.attempts, points.c.worker)
                candidate = connection.execute(
                    select(*columns)
                    .where(free)
                    .order_by(*order)
                    .limit(1)
                    .with_for_update(skip_locked=True)  # SQLite's writers are alone anyway
                ).first()
                if candidate is None:
                    return None
                mine = update(points).where(points.c.id == candidate.id, free)
                point = Point.from_json(json.loads(candidate.spec))
                if candidate.attempts >= MOST_ATTEMPTS:
                    error = (
                        f"WorkerLost: the worker died {candidate.attempts} times at this point "
                        f"(last: {candidate.worker}); out of memory, most likely"
                    )
                    row = replace(point.row(), status="failed", error=error)
                    connection.execute(mine.values(**_finished(row, now_s)))
                    continue
                token = uuid.uuid4().hex
                connection.execute(
                    mine.values(
                        status="running",
                        token=token,
                        worker=worker or f"{socket.gethostname()}:{os.getpid()}",
                        lease_until_s=now_s + self.lease_s,
                        attempts=points.c.attempts + 1,
                    )
                )
                return Claim(point_id=candidate.id, token=token, point=point)

    def renew(self, claim: Claim) -> bool:
        """Say that the worker lives; False where the point is no longer its."""
        with self._database.writing() as connection:
            until = self._database.now_s(connection) + self.lease_s
            change = _held(claim).values(lease_until_s=until)
            return connection.execute(change).rowcount == 1

    def release(self, claim: Claim) -> None:
        """Give a point back undone; this was no attempt."""
        with self._database.writing() as connection:
            values = {"status": "pending", "token": None, "attempts": points.c.attempts - 1}
            connection.execute(_held(claim).values(values))

    def finish(self, claim: Claim, row: Row, plan: str | None = None) -> bool:
        """Write what a point ended with; False where it is no longer this worker's.

        Args:
            claim: the point.
            row: ``done`` or ``failed``.
            plan: the plan document as JSON.
        """
        packed = None if plan is None else zlib.compress(plan.encode())
        with self._database.writing() as connection:
            now_s = self._database.now_s(connection)
            change = _held(claim).values(**_finished(row, now_s), plan=packed)
            return connection.execute(change).rowcount == 1

    # ---- reading -----------------------------------------------------------------------------

    def counts(self, sweep_id: int) -> Counts:
        """How far a sweep is."""
        mine = (points.c.sweep_id == sweep_id, points.c.active)
        statement = select(points.c.status, func.count()).where(*mine).group_by(points.c.status)
        with self._database.reading() as connection:
            found: Counter[str] = Counter()
            for status, count in connection.execute(statement):
                found[status] = count
        return Counts(**{s: found[s] for s in ("pending", "running", "done", "failed")})

    def last_finished(self, sweep_id: int) -> Row | None:
        """The row that came in last."""
        mine = (points.c.sweep_id == sweep_id, points.c.active, points.c.row.is_not(None))
        order = (points.c.finished_s.desc(), points.c.id.desc())
        statement = select(points.c.row).where(*mine).order_by(*order).limit(1)
        with self._database.reading() as connection:
            found = connection.execute(statement).scalar()
        return None if found is None else Row.from_json(json.loads(found))

    def names(self) -> list[str]:
        """Names of the sweeps, the latest first."""
        with self._database.reading() as connection:
            return list(
                connection.execute(select(sweeps.c.name).order_by(sweeps.c.id.desc())).scalars()
            )

    def rows(self, sweep: str | None = None, *, plans: bool = False) -> list[Row]:
        """All rows of a sweep, finished or not, in the order of the sweep.

        Args:
            sweep: its name; None: the only one.
            plans: whether the plan documents are read along.

        Raises:
            RequestError: none or several sweeps, and no name.
            UnknownNameError: no sweep of that name.
        """
        names = self.names()
        if not names:
            raise RequestError(f"there is no sweep in {self.shown}; run one first")
        if sweep is None and len(names) > 1:
            raise RequestError(f"{self.shown} has several sweeps, name one: {', '.join(names)}")
        name = names[0] if sweep is None else sweep
        if name not in names:
            raise UnknownNameError("sweep", name, names)
        columns = [points.c.spec, points.c.status, points.c.row]
        columns += [points.c.plan] if plans else []
        statement = (
            select(*columns)
            .join(sweeps, sweeps.c.id == points.c.sweep_id)
            .where(sweeps.c.name == name, points.c.active)
            .order_by(points.c.position, points.c.id)
        )
        with self._database.reading() as connection:
            return [_row(r._mapping) for r in connection.execute(statement)]

    def _free(self, sweep_id: int, now_s: float) -> ColumnElement[bool]:
        lost = and_(points.c.status == "running", points.c.lease_until_s < now_s)
        waiting = or_(points.c.status == "pending", lost)
        return and_(points.c.sweep_id == sweep_id, points.c.active, waiting)


def read_rows(source: str | Path, *, sweep: str | None = None, plans: bool = False) -> list[Row]:
    """The rows of a store.

    Args:
        source: path of an SQLite file, or a URL.
        sweep: name of the sweep, where the store has several.
        plans: whether the plan documents are read along.

    Raises:
        RequestError: no store is there, or not the one sweep.
    """
    store = Store(source, create=False)
    try:
        return store.rows(sweep, plans=plans)
    finally:
        store.close()


def _new(sweep_id: int, position: int, point: Point) -> dict[str, Any]:
    return {
        "sweep_id": sweep_id,
        "key": point.key,
        "position": position,
        "active": True,
        "measured": point.measure,
        "spec": json.dumps(point.to_json()),
        "status": "pending",
        "attempts": 0,
    }


def _held(claim: Claim) -> Any:
    """Changes a point where the claim still holds."""
    mine = (points.c.id == claim.point_id, points.c.token == claim.token)
    return update(points).where(*mine, points.c.status == "running")


def _finished(row: Row, now_s: float) -> dict[str, Any]:
    text = json.dumps(row.to_json())
    return {"status": row.status, "row": text, "finished_s": now_s, "lease_until_s": None}


def _row(found: Any) -> Row:
    if found["row"] is None:
        return replace(Point.from_json(json.loads(found["spec"])).row(), status=found["status"])
    row = Row.from_json(json.loads(found["row"]))
    packed = found.get("plan")
    return row if packed is None else replace(row, plan=json.loads(zlib.decompress(packed)))
