"""Sweeps: many points planned, priced or measured, and a store that outlives the process.

The package is called ``sweeps`` because ``autoshard.sweep`` is the function. The way through the
files: ``config`` reads what is asked for and ``resolve`` makes ``points`` of it; ``store`` keeps
them in a ``database``; ``run`` sets workers (``worker``) to them, each of which does points
(``work``) while the ``machine`` is free; the result is ``rows``, written by ``export``.
"""

from autoshard.sweeps.config import Sweep, read_sweep
from autoshard.sweeps.export import write_rows
from autoshard.sweeps.points import Point
from autoshard.sweeps.rows import COLUMNS, Row
from autoshard.sweeps.run import SweepResult, sweep
from autoshard.sweeps.store import Store, read_rows

__all__ = [
    "COLUMNS",
    "Point",
    "Row",
    "Store",
    "Sweep",
    "SweepResult",
    "read_rows",
    "read_sweep",
    "sweep",
    "write_rows",
]
