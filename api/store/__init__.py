"""Jobs, plans, keys and events in SQLite (WAL) or PostgreSQL; several servers may share one."""

from autoshard.api.store.errors import IdempotencyConflict, QueueFull, QuotaReached, StoreError
from autoshard.api.store.records import (
    Asked,
    Event,
    Job,
    Key,
    Lease,
    Result,
    StoredPlan,
    Sweep,
    SweepPoint,
)
from autoshard.api.store.store import Store

__all__ = [
    "Asked",
    "Event",
    "IdempotencyConflict",
    "Job",
    "Key",
    "Lease",
    "QueueFull",
    "QuotaReached",
    "Result",
    "Store",
    "StoreError",
    "StoredPlan",
    "Sweep",
    "SweepPoint",
]
