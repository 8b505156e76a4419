"""Analyze, search, validate: the one path that Python, the command line and the service share."""

from autoshard.planner.checking import analyze, validate
from autoshard.planner.plan import Plan
from autoshard.planner.planning import estimate, optimize

__all__ = ["Plan", "analyze", "estimate", "optimize", "validate"]
