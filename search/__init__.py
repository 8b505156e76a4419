"""What a plan costs, and the search for the best one: arithmetic on values, without torch."""

from autoshard.search.feasible import Asked
from autoshard.search.inner import Prepared, Solution, solve
from autoshard.search.nearest import explained
from autoshard.search.outer import Configuration, SearchResult, Standing, configurations, search

__all__ = [
    "Asked",
    "Configuration",
    "Prepared",
    "SearchResult",
    "Solution",
    "Standing",
    "configurations",
    "explained",
    "search",
    "solve",
]
