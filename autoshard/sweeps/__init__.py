"""Sweeps: many points planned, priced or measured, and a store that outlives the process.

The package is called ``sweeps`` because ``autoshard.sweep`` is the function.
"""

from autoshard.sweeps.rows import COLUMNS, Row

__all__ = ["COLUMNS", "Row"]
