"""What every user of SQLite or PostgreSQL here needs alike: opening a file, time, taking turns."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, text


def open_sqlite(connection: Any, *, busy_s: float, wal: bool = True) -> None:
    """Set a fresh DBAPI connection up: transactions are begun by hand, writes go to a log.

    Args:
        connection: of the ``sqlite3`` module.
        busy_s: longest wait while others open the same new file.
        wal: whether the file may be switched to a write-ahead log.
    """
    connection.isolation_level = None  # BEGIN is ours
    deadline = time.monotonic() + busy_s
    while wal:
        try:
            # Waits for no lock by itself, and all who open a new file at once set it.
            connection.execute("PRAGMA journal_mode = WAL").close()
            break
        except connection.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    connection.execute("PRAGMA synchronous = NORMAL").close()


def now_s(connection: Connection) -> float:
    """Seconds since the epoch on the database's clock."""
    if connection.dialect.name == "sqlite":  # its users are on one machine
        return time.time()
    clock = text("SELECT extract(epoch FROM clock_timestamp())::float8")
    return float(connection.execute(clock).scalar_one())


def one_at_a_time(connection: Connection, number: int) -> None:
    """Wait until no other transaction that called this with the same number is open."""
    if connection.dialect.name != "sqlite":  # whose writers are alone anyway
        connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": number})
