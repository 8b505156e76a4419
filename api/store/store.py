"""Every statement that reads or writes the database.

All methods block, so call them from a thread; many threads and many processes may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from autoshard.api.store.records import Event, Job, Key, Lease, Result, StoredPlan
from autoshard.api.wire import Kind
from autoshard.errors import AutoshardError


class StoreError(AutoshardError):
    """The database cannot be used; says which (without its password) and why."""


class QueueFull(AutoshardError):
    """Too many jobs wait already."""


class QuotaReached(AutoshardError):
    """This owner has too many unfinished jobs, or had too many today."""


class IdempotencyConflict(AutoshardError):
    """The same Idempotency-Key was used with another request."""


class Store:
    """See the module."""

    @classmethod
    def open(cls, url: str) -> Self:
        """Connect, make the folder of an SQLite file, and bring the tables up to date.

        Raises:
            StoreError: it cannot be reached, or was written by a newer version.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give all connections back."""
        raise NotImplementedError

    # ---- callers ----------------------------------------------------------------------------

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
        """A job for this request, and whether it is new.

        Not new where the same owner used this Idempotency-Key before, or has a queued, running or
        succeeded job of the same digest: that one is given. Limits hold for new jobs only.

        Raises:
            QueueFull: see there.
            QuotaReached: see there.
            IdempotencyConflict: see there.
        """
        raise NotImplementedError

    def job(self, job_id: str) -> Job | None:
        """A job by its id."""
        raise NotImplementedError

    def jobs(self, owner: str, *, limit: int, before: str | None = None) -> Sequence[Job]:
        """An owner's jobs, newest first; those older than the job ``before``."""
        raise NotImplementedError

    def cancel(self, job_id: str) -> Job | None:
        """Ask a job to stop: a queued one ends at once, a running one when its worker hears."""
        raise NotImplementedError

    def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Events of a job with ``seq`` above ``after``, in order."""
        raise NotImplementedError

    def plan(self, plan_id: str) -> StoredPlan | None:
        """A plan by its id."""
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        """Number of jobs by state."""
        raise NotImplementedError

    def ping(self) -> None:
        """Raises StoreError where the database does not answer."""
        raise NotImplementedError

    # ---- workers ----------------------------------------------------------------------------

    def claim(self, worker: str, lease_s: float) -> Lease | None:
        """The next job, estimates first, then oldest first; None where none waits."""
        raise NotImplementedError

    def heartbeat(self, lease: Lease, lease_s: float) -> Literal["go on", "cancel", "lost"]:
        """Prolong a lease; ``lost`` where the job was given to another or has ended."""
        raise NotImplementedError

    def progress(self, lease: Lease, data: dict[str, Any]) -> bool:
        """Record progress as an event; False where the lease was lost."""
        raise NotImplementedError

    def finish(self, lease: Lease, result: Result) -> bool:
        """End the job, store its plan, in one transaction; False where the lease was lost."""
        raise NotImplementedError

    def release(self, lease: Lease) -> None:
        """Give a job back unfinished: it is queued again, before those that came later."""
        raise NotImplementedError

    def reap(self, attempts: int) -> int:
        """Queue jobs again whose lease ran out or whose worker on this machine is gone.

        A job that was begun ``attempts`` times fails instead. Returns how many were touched.
        """
        raise NotImplementedError

    def workers_alive(self) -> int:
        """Workers that were heard of within three of their leases."""
        raise NotImplementedError

    def seen(self, worker: str, lease_s: float) -> None:
        """Note that a worker lives; ``lease_s=0``: that it has left."""
        raise NotImplementedError

    # ---- keys -------------------------------------------------------------------------------

    def add_key(self, key: Key) -> None:
        """Store a new key."""
        raise NotImplementedError

    def key(self, key_id: str) -> Key | None:
        """A key by its public part."""
        raise NotImplementedError

    def keys(self) -> Sequence[Key]:
        """All keys, oldest first."""
        raise NotImplementedError

    def revoke_key(self, key_id: str) -> bool:
        """Make a key invalid from now on; False where there is none, or it is revoked already."""
        raise NotImplementedError

    def touch_key(self, key_id: str) -> None:
        """Note that a key was used; at most once a minute is written."""
        raise NotImplementedError
