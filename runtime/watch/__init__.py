"""Watching: what was sent, when, and how much of it was hidden. Nothing here loads torch."""

from autoshard.runtime.watch.profiling import Profiler, profiler
from autoshard.runtime.watch.records import CallTrace, CollectiveRecord, RankTrace, Span

__all__ = ["CallTrace", "CollectiveRecord", "Profiler", "RankTrace", "Span", "profiler"]
