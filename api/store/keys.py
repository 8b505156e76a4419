"""API keys, as the command line makes them and the HTTP side looks them up."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sqlalchemy import bindparam, insert, or_, select, update

from autoshard.api.store.database import Database
from autoshard.api.store.records import Key
from autoshard.api.store.rows import key_of
from autoshard.api.store.tables import keys

_FORM = re.compile("[A-Za-z0-9_-]{1,100}")
TOUCH_S = 60.0
KEY_BY_ID = select(keys).where(keys.c.id == bindparam("id"))


class Keys(Database):
    """See the module."""

    def add_key(self, key: Key) -> None:
        """Store a new key."""
        row = {
            "id": key.id,
            "owner": key.owner,
            "name": key.name,
            "hash": key.hash,
            "created_s": key.created_s,
            "revoked_s": key.revoked_s,
            "last_used_s": key.last_used_s,
        }
        with self.writing() as connection:
            connection.execute(insert(keys), row)

    def key(self, key_id: str) -> Key | None:
        """A key by its public part."""
        if not _FORM.fullmatch(key_id):
            return None
        with self.reading() as connection:
            row = connection.execute(KEY_BY_ID, {"id": key_id}).one_or_none()
            return None if row is None else key_of(row)

    def keys(self) -> Sequence[Key]:
        """All keys, oldest first."""
        with self.reading() as connection:
            rows = connection.execute(select(keys).order_by(keys.c.created_s, keys.c.id))
            return [key_of(row) for row in rows]

    def revoke_key(self, key_id: str) -> bool:
        """Make a key invalid from now on; False where there is none, or it is revoked already."""
        with self.writing() as connection:
            mine = update(keys).where(keys.c.id == key_id, keys.c.revoked_s.is_(None))
            return connection.execute(mine.values(revoked_s=self.now(connection))).rowcount > 0

    def touch_key(self, key_id: str) -> None:
        """Note that a key was used; at most once a minute is written."""
        with self.reading() as connection:
            used = connection.execute(select(keys.c.last_used_s).where(keys.c.id == key_id))
            before, now = used.scalar_one_or_none(), self.now(connection)
        if before is not None and before > now - TOUCH_S:
            return
        with self.writing() as connection:
            mine = keys.c.id == key_id
            old = or_(keys.c.last_used_s.is_(None), keys.c.last_used_s < now - TOUCH_S)
            connection.execute(update(keys).where(mine, old).values(last_used_s=now))
