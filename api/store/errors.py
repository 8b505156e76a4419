"""What the store refuses."""

from __future__ import annotations

from autoshard.errors import AutoshardError


class StoreError(AutoshardError):
    """The database cannot be used; says which (without its password) and why."""


class QueueFull(AutoshardError):
    """Too many jobs wait already."""


class QuotaReached(AutoshardError):
    """This owner has too many unfinished jobs, or had too many today."""


class IdempotencyConflict(AutoshardError):
    """The same Idempotency-Key was used with another request."""
