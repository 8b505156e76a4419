"""Analyze, search, validate: the one path that Python, the command line and the service share."""

from autoshard.planner.optimize import estimate, optimize
from autoshard.planner.plan import Plan
from autoshard.planner.validate import analyze, validate

__all__ = ["Plan", "analyze", "estimate", "optimize", "validate"]
