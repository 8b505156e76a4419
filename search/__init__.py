"""What a plan costs, and the search for the best one: arithmetic on values, without torch."""

from autoshard.search.feasible import Asked, Feasible
from autoshard.search.inner import Prepared, Solution, solve
from autoshard.search.nearest import explained, length_of
from autoshard.search.outer import (
    Configuration,
    SearchResult,
    Standing,
    alternatives,
    binding,
    configurations,
    search,
    slower_by,
)
from autoshard.search.solved import Solved

__all__ = [
    "Asked",
    "Configuration",
    "Feasible",
    "Prepared",
    "SearchResult",
    "Solution",
    "Solved",
    "Standing",
    "alternatives",
    "binding",
    "configurations",
    "explained",
    "length_of",
    "search",
    "slower_by",
    "solve",
]
