"""The store as one object.

All methods block, so call them from a thread; many threads and many processes may.

    ids         names of jobs and plans
    tables      the tables; rows: their rows as the records of ``records``
    migrate     brings a database up to date, with ``migrations/``
    database    connections, transactions, clocks, and the one way in which a job changes
    callers     submit, read, cancel
    sweeps      lists of points, each a job
    workers     claim, heartbeat, finish, reap
    keys        API keys
"""

from __future__ import annotations

from autoshard.api.store.keys import Keys
from autoshard.api.store.sweeps import Sweeps
from autoshard.api.store.workers import Workers


class Store(Sweeps, Workers, Keys):
    """Every statement that reads or writes the database; made by ``Store.open(url)``."""
