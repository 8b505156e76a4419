"""``@spmd``: ordinary functions of whole arrays, run on every device of a mesh."""

from autoshard.runtime.spmd.function import SpmdFunction, spmd
from autoshard.runtime.spmd.worth import SmallCutWarning

__all__ = ["SmallCutWarning", "SpmdFunction", "spmd"]
