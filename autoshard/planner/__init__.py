"""Analyze, search, validate: the one path that Python, the command line and the service share.

Names are imported when they are first used: a plan can be read, drawn and fetched without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.planner.altered import what_if
    from autoshard.planner.checking import analyze, validate
    from autoshard.planner.fewest import smallest
    from autoshard.planner.foreign import from_export
    from autoshard.planner.fronts import front
    from autoshard.planner.plan import Plan
    from autoshard.planner.planning import estimate, optimize

_HOME = {
    "Plan": "autoshard.planner.plan",
    "analyze": "autoshard.planner.checking",
    "estimate": "autoshard.planner.planning",
    "from_export": "autoshard.planner.foreign",
    "front": "autoshard.planner.fronts",
    "optimize": "autoshard.planner.planning",
    "smallest": "autoshard.planner.fewest",
    "validate": "autoshard.planner.checking",
    "what_if": "autoshard.planner.altered",
}

__all__ = [
    "Plan",
    "analyze",
    "estimate",
    "from_export",
    "front",
    "optimize",
    "smallest",
    "validate",
    "what_if",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'autoshard.planner' has no attribute {name!r}")
    return getattr(import_module(home), name)
