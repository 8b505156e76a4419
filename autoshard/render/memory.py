"""Memory by category: names, and predicted beside measured."""

from __future__ import annotations

from autoshard.plan import Categories

NAMES = (
    ("parameters_bytes", "parameters"),
    ("gradients_bytes", "gradients"),
    ("optimizer_bytes", "optimizer"),
    ("activations_bytes", "activations"),
    ("kv_cache_bytes", "KV cache"),
    ("gathered_bytes", "gathered parameters"),
    ("temporary_bytes", "temporaries"),
)
"""Categories, as fields and in words, in the order in which they are shown."""


def beside_each_other(
    predicted: Categories | None, measured: Categories | None
) -> list[tuple[str, int, int]]:
    """(category, predicted, measured), where both are known and one of them is not zero."""
    if predicted is None or measured is None:
        return []
    rows = [(name, getattr(predicted, field), getattr(measured, field)) for field, name in NAMES]
    return [row for row in rows if row[1] or row[2]]
