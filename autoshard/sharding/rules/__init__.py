"""The sharding rule of each op family: one line of named factors."""

from autoshard.sharding.rules import (
    assembly,
    attention,
    creation,
    elementwise,
    lookup,
    loss,
    normalization,
    products,
    reductions,
    views,
    windows,
)

__all__ = [
    "assembly",
    "attention",
    "creation",
    "elementwise",
    "lookup",
    "loss",
    "normalization",
    "products",
    "reductions",
    "views",
    "windows",
]
