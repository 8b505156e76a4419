"""Brings a database's tables up to date with ``migrations/``."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text

from autoshard.api.store.errors import StoreError

LOCK = 7_310_001
"""Advisory lock of PostgreSQL under which migrations run; SQLite's transaction is one itself."""


def upgrade(connection: Connection, where: str) -> None:
    """Run the migrations that are missing, inside the transaction of ``connection``.

    Raises:
        StoreError: the tables are newer than this version knows.
    """
    if connection.dialect.name != "sqlite":
        connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": LOCK})
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    head = scripts.get_current_head()
    current = MigrationContext.configure(connection).get_current_revision()
    if current == head:
        return
    try:
        if current is not None:
            scripts.get_revision(current)
    except CommandError:
        raise StoreError(
            f"database {where} was written by a newer version of autoshard (its tables have "
            f"version {current}, this one knows {head}); run that version, or use another database"
        ) from None
    command.upgrade(config, "head")
