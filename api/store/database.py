"""The connection to SQLite or PostgreSQL, and the one way in which a job changes.

**SQLite** keeps a write-ahead log. With ``synchronous=NORMAL`` a commit is in the kernel's cache
before it returns, so it survives the death of any process; after a loss of power the last commits
may be missing, but the file is whole. Writers take the lock when they begin (BEGIN IMMEDIATE): one
that began to read and then wants to write could be refused at once, however long it would wait.

**Clocks.** Time is the database's: PostgreSQL's own clock, so that hosts whose clocks differ agree
on when a lease ends; SQLite's users are on one machine, and its clock is theirs. A clock that
jumps can make a lease end early. Then a job runs again while the first worker still works, and
what that one writes is refused, since its token is old: wasted work, never two ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, Engine, create_engine, event, insert, text, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from autoshard.api.store import migrate
from autoshard.api.store.errors import StoreError
from autoshard.api.store.rows import dumps
from autoshard.api.store.tables import events, jobs

BUSY_S = 20.0
"""Longest wait for another writer of an SQLite file."""

CONNECTIONS = 16
"""Most connections of one process; more threads than that wait for one."""


class Database:
    """Opens, reads, writes; :class:`autoshard.api.store.Store` adds the statements."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.sqlite = engine.dialect.name == "sqlite"
        self.where = engine.url.render_as_string(hide_password=True)
        self._writer = engine.execution_options(writes=True)
        # Single statements need no transaction; without one PostgreSQL saves two round trips.
        self._reader = (
            engine if self.sqlite else engine.execution_options(isolation_level="AUTOCOMMIT")
        )

    @classmethod
    def open(cls, url: str) -> Self:
        """Connect, make the folder of an SQLite file, and bring the tables up to date.

        Several processes may open a new database at once: one makes the tables, the others wait.

        Raises:
            StoreError: it cannot be reached, or was written by a newer version.
        """
        target = _target(url)
        store = cls(_engine(target))
        try:
            with store.writing() as connection:
                migrate.upgrade(connection, store.where)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Give all connections back."""
        self._engine.dispose()

    def ping(self) -> None:
        """Raises StoreError where the database does not answer."""
        with self.reading() as connection:
            connection.execute(text("SELECT 1"))

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection for single selects."""
        with self._translated(), self._reader.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is committed at the end of the block."""
        with self._translated(), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            reason = str(error.orig).strip() or type(error.orig).__name__
            raise StoreError(f"database {self.where}: {reason}") from error
        except SQLAlchemyError as error:
            raise StoreError(f"database {self.where}: {error}") from error

    def now(self, connection: Connection) -> float:
        """Seconds since the epoch on the database's clock."""
        if self.sqlite:
            return time.time()
        clock = text("SELECT extract(epoch FROM clock_timestamp())::float8")
        return float(connection.execute(clock).scalar_one())

    def one_at_a_time(self, connection: Connection, what: int) -> None:
        """Wait until no other transaction has called this with the same number."""
        if not self.sqlite:  # whose writers are alone anyway
            connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": what})


def change(
    connection: Connection,
    job_id: str,
    *conditions: ColumnElement[bool],
    now: float,
    event_kind: str,
    data: dict[str, Any],
    **values: Any,
) -> bool:
    """Change a job where the conditions hold, and tell its watchers; False where they do not.

    The only way in which a job changes after it was submitted: one row is locked, its revision
    counts up by one, and the event of that number is written, so events have no gaps.
    """
    statement = (
        update(jobs)
        .where(jobs.c.id == job_id, *conditions)
        .values(revision=jobs.c.revision + 1, **values)
        .returning(jobs.c.revision)
    )
    revision = connection.execute(statement).scalar_one_or_none()
    if revision is None:
        return False
    tell(connection, job_id, revision, now, event_kind, data)
    return True


def tell(
    connection: Connection, job_id: str, seq: int, now: float, kind: str, data: dict[str, Any]
) -> None:
    """Write one event."""
    row = {"job_id": job_id, "seq": seq, "kind": kind, "at_s": now, "data": dumps(data)}
    connection.execute(insert(events), row)


def _target(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(
            f"cannot read the database URL {url!r}; give sqlite:///PATH or "
            "postgresql://USER:PASSWORD@HOST/NAME"
        ) from error
    name = parsed.get_backend_name()
    if name == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise StoreError("SQLite needs a file: sqlite:///PATH")
        return parsed.set(drivername="sqlite")
    if name in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise StoreError(
        f"database {parsed.render_as_string(hide_password=True)}: {name} is not supported; give "
        "sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME"
    )


def _engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_size=CONNECTIONS, max_overflow=0, pool_use_lifo=True)
    assert url.database is not None
    path = Path(url.database)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Requests and plans are nobody else's business.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise StoreError(f"cannot open the database {path}: {error.strerror or error}") from error
    engine = create_engine(
        url, pool_size=CONNECTIONS, max_overflow=0, connect_args={"timeout": BUSY_S}
    )
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, record: object) -> None:
    connection.isolation_level = None  # BEGIN is ours
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            # Waits for no lock by itself, and all who open a new file at once set it.
            connection.execute("PRAGMA journal_mode = WAL").close()
            break
        except connection.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    connection.execute("PRAGMA synchronous = NORMAL").close()


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get("writes"):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
