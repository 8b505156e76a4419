"""The normal form of operators, as the analyzer writes it: one way in, for the whole package."""

from __future__ import annotations

import autoshard.normal.rewrites_nn  # noqa: F401  (registers its rewrites)
from autoshard.normal.ir import Builder, Value
from autoshard.normal.rewrites import REWRITES, Call, attr, plain, split_arguments

__all__ = ["REWRITES", "Builder", "Call", "Value", "attr", "plain", "split_arguments"]
