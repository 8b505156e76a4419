"""Products in another dtype than their operands': which ones, and what they keep for backward.

Recipes of FP8 and of fewer bits run the products of blocks with their weights so, and leave those
of the embedding, the head and attention scores as they are; TF32 is of all products of float32.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.graph import ModelGraph
from autoshard.kernels import Products
from autoshard.program import ALIASES
from autoshard.search.kept import users_of
from autoshard.search.work import PRODUCTS

KEPT_BITS: Mapping[Products, float] = {"fp8": 8, "mxfp8": 8.25, "nvfp4": 4.5}
"""Bits of an element that a product keeps for backward, scales of blocks of elements included."""


def in_fewer_bits(graph: ModelGraph, products: Products) -> frozenset[str]:
    """Operators that run in ``products``."""
    if products == "native":
        return frozenset()
    if products == "tf32":
        return frozenset(
            n.name for n in graph.nodes if n.family in PRODUCTS and n.dtype == "float32"
        )
    return frozenset(
        node.name
        for repeat in graph.repeats
        for start in repeat.starts
        for node in graph.nodes[start : start + repeat.length]
        if node.family in PRODUCTS
        and any(graph.by_name[o].op == "parameter" for o in node.operands)
    )


def kept_shares(graph: ModelGraph, products: Products) -> dict[str, float]:
    """Of values that such products alone read: the share of their bytes that is kept.

    What keeps its own result, as attention does, keeps all of it.
    """
    if products not in KEPT_BITS:
        return {}
    low = in_fewer_bits(graph, products)
    return {
        node.name: KEPT_BITS[products] / (8 * node.itemsize)
        for node in graph.nodes
        if not node.is_leaf
        and node.op not in ALIASES
        and "result" not in node.saved
        and (users := users_of(graph, node.name))
        and all(user.name in low for user in users)
    }
