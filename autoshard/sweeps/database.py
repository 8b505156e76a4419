"""Tables of sweeps and their points, in SQLite or PostgreSQL, and the connection to them.

SQLite keeps a write-ahead log: what is committed survives the death of any process. Its writers
take the lock when they begin (BEGIN IMMEDIATE), since one that began to read and then wants to
write could be refused at once. Time is the database's, so that machines
whose clocks differ agree on when a claim ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    inspect,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from autoshard.errors import AutoshardError, RequestError
from autoshard.sweeps.config import LONGEST_NAME

metadata = MetaData()

sweeps = Table(
    "autoshard_sweeps",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(LONGEST_NAME), nullable=False, unique=True),
    Column("description", Text, nullable=False),
    Column("created_s", Float(53), nullable=False),
)

points = Table(
    "autoshard_points",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("sweep_id", ForeignKey("autoshard_sweeps.id"), nullable=False),
    Column("key", String(32), nullable=False),
    Column("position", Integer, nullable=False),
    Column("active", Boolean, nullable=False),  # whether the sweep still has it
    Column("measured", Boolean, nullable=False),
    Column("spec", Text, nullable=False),  # the point, as JSON
    Column("status", String(8), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("token", String(32)),  # of the claim; only its holder can finish the point
    Column("worker", String(200)),
    Column("lease_until_s", Float(53)),
    Column("row", Text),  # the finished row, as JSON
    Column("plan", LargeBinary),  # the plan document, JSON compressed with zlib
    Column("finished_s", Float(53)),
    UniqueConstraint("sweep_id", "key"),
    Index("autoshard_points_by_status", "sweep_id", "status"),
)

BUSY_S = 60.0
"""Longest wait for another writer of an SQLite file."""

LOCK = 7_303_014
"""Number of the advisory lock under which tables are made and sweeps entered: an unused one."""


class StoreError(AutoshardError):
    """The store of a sweep cannot be used; says which (without its password) and why."""


class Database:
    """Opens, reads, writes; :class:`autoshard.sweeps.store.Store` adds the statements.

    Args:
        where: path of an SQLite file, ``sqlite:///PATH`` or ``postgresql://USER@HOST/NAME``.
        create: whether a database without these tables gets them.

    Raises:
        RequestError: a URL that cannot be read, or nothing there to be read.
        StoreError: it cannot be reached.
    """

    def __init__(self, where: str | Path, *, create: bool = True) -> None:
        url = _url(where)
        self.url = url.render_as_string(hide_password=False)
        self._sqlite = url.get_backend_name() == "sqlite"
        self.shown = str(url.database) if self._sqlite else url.render_as_string()
        if self._sqlite and not create and not Path(self.shown).is_file():
            raise RequestError(f"there is no file {self.shown}; run a sweep first")
        try:
            self._engine = _engine(url, create)
        except ModuleNotFoundError as error:
            raise RequestError(
                "PostgreSQL needs psycopg: pip install 'autoshard[service]'"
            ) from error
        try:
            self._prepare(create)
        except BaseException:
            self.close()
            raise

    def _prepare(self, create: bool) -> None:
        with self.writing() if create else self.reading() as connection:
            if create:
                self.one_at_a_time(connection)
                metadata.create_all(connection)
            elif not inspect(connection).has_table(points.name):
                raise RequestError(f"there is no sweep in {self.shown}; run one first")

    def close(self) -> None:
        """Give all connections back."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection for selects."""
        with self._translated(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is committed at the end of the block."""
        with self._translated(), self._engine.begin() as connection:
            if self._sqlite:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            reason = str(error.orig).strip() or type(error.orig).__name__
            raise StoreError(f"store {self.shown}: {reason}") from error

    def one_at_a_time(self, connection: Connection) -> None:
        """Wait until no other transaction that called this is open."""
        if not self._sqlite:  # whose writers are alone anyway
            connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": LOCK})

    def now_s(self, connection: Connection) -> float:
        """Seconds since the epoch on the database's clock."""
        if self._sqlite:  # its users are on one machine
            return time.time()
        clock = text("SELECT extract(epoch FROM clock_timestamp())::float8")
        return float(connection.execute(clock).scalar_one())


def _url(where: str | Path) -> URL:
    named = str(where)
    if "://" not in named:
        return URL.create("sqlite", database=named)
    choices = "give a file, sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME"
    try:
        url = make_url(named)
    except (ArgumentError, ValueError) as error:
        raise RequestError(f"cannot read the store's URL; {choices}") from error
    kind = url.get_backend_name()
    if kind == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise RequestError("a store in SQLite needs a file: sqlite:///PATH")
        return url.set(drivername="sqlite")
    if kind in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise RequestError(f"a store in {kind} is not supported; {choices}")


def _engine(url: URL, create: bool) -> Engine:
    if url.get_backend_name() != "sqlite":
        try:
            return create_engine(url, pool_pre_ping=True)
        except NoSuchModuleError as error:
            raise RequestError(f"cannot open the store: {error}") from error
    path = Path(str(url.database))
    if not path.parent.is_dir():
        raise RequestError(f"store {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not os.access(path, os.R_OK):
        raise RequestError(f"store {path} must not be read; name another")
    engine = create_engine(url, connect_args={"timeout": BUSY_S})

    @event.listens_for(engine, "connect")
    def _opened(connection: Any, record: object) -> None:
        connection.isolation_level = None  # BEGIN is ours
        deadline = time.monotonic() + BUSY_S
        while create:
            try:
                # Waits for no lock by itself, and all who open a new file at once set it.
                connection.execute("PRAGMA journal_mode = WAL").close()
                break
            except connection.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        connection.execute("PRAGMA synchronous = NORMAL").close()

    return engine
