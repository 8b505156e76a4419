"""From a program to the ordinary module that one device runs."""

from autoshard.runtime.lower.build import Values, Watch, lower
from autoshard.runtime.lower.module import LoweredModule, Stored

__all__ = ["LoweredModule", "Stored", "Values", "Watch", "lower"]
