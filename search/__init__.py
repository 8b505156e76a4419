"""What a plan costs, and the search for the best one: arithmetic on values, without torch."""

from autoshard.search.inner import Prepared, Solution, solve
from autoshard.search.outer import Configuration, SearchResult, Standing, configurations, search

__all__ = [
    "Configuration",
    "Prepared",
    "SearchResult",
    "Solution",
    "Standing",
    "configurations",
    "search",
    "solve",
]
