"""API keys: ``ask_ID_SECRET``. The database holds the SHA-256 of the secret, never the secret.

The secret has 256 random bits, so a fast hash without salt is enough: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import anyio.to_thread

from autoshard.api.store import Key, Store
from autoshard.errors import RequestError

REMEMBER_S = 5.0
"""How long a verified key is not looked up again; a revoked one is refused after this at latest."""

REMEMBERED = 10_000
_DUMMY = hashlib.sha256(b"no such key").hexdigest()
_KEY = re.compile(r"ask_([0-9a-z]{1,64})_([0-9A-Za-z_-]{1,128})")
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the owner of the jobs, and the public part of the key."""

    owner: str
    key_id: str


def create_key(store: Store, owner: str, name: str = "") -> tuple[Key, str]:
    """Make a key; the text is what its user sends, and cannot be had again.

    Raises:
        RequestError: an owner's name that cannot be.
    """
    if not _OWNER.fullmatch(owner):
        raise RequestError(
            f"the owner {owner!r} cannot be; use up to 100 letters, digits, and . _ @ -, the first "
            "one a letter or digit"
        )
    identity, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    key = Key(
        id=identity, owner=owner, name=name[:200], hash=_hashed(secret), created_s=time.time()
    )
    store.add_key(key)
    return key, f"ask_{identity}_{secret}"


def _hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def verify(store: Store, presented: str) -> Caller | None:
    """Who presents this key, or None.

    Every key, even one that is malformed, unknown or revoked, takes the same way: one look-up, one
    hash, one comparison in constant time.
    """
    found = _KEY.fullmatch(presented)
    identity, secret = (found[1], found[2]) if found else ("none", presented[:200])
    key = store.key(identity)
    same = hmac.compare_digest(_hashed(secret), _DUMMY if key is None else key.hash)
    if key is None or not same or key.revoked_s is not None or found is None:
        return None
    store.touch_key(key.id)
    return Caller(key.owner, key.id)


class Keys:
    """Verifies keys, and remembers verified ones for a few seconds.

    Args:
        store: where they are.
        now: seconds of a clock that only goes forward.
    """

    def __init__(self, store: Store, now: Callable[[], float] = time.monotonic) -> None:
        self._store, self._now = store, now
        # By the hash of what was presented: the memory holds no secrets, and how long finding an
        # entry takes says nothing about one.
        self._verified: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()

    def remembered(self, presented: bytes) -> Caller | None:
        """Who presents this, where that was found out moments ago."""
        entry = self._verified.get(hashlib.sha256(presented).digest())
        return entry[0] if entry and self._now() < entry[1] else None

    async def caller(self, presented: bytes) -> Caller | None:
        """Who presents this, or None."""
        if known := self.remembered(presented):
            return known
        text = presented.decode("latin-1")
        found = await anyio.to_thread.run_sync(verify, self._store, text)
        if found is not None:
            self._verified[hashlib.sha256(presented).digest()] = (found, self._now() + REMEMBER_S)
            if len(self._verified) > REMEMBERED:
                self._verified.popitem(last=False)
        return found
