"""Devices and the links between them, and what an operator or a message costs there.

A :class:`Cluster` is a hierarchy of any number of tiers: devices in a node, nodes in a rack or on a
rail, racks on a fabric. A mesh lies on it row-major, the last axis nearest, so each mesh axis
crosses some tiers and stays inside the others; :meth:`Cluster.collective_seconds` prices what the
axis really crosses. All units are SI; each figure names its source (``sources``, by dotted field
name).

Files: :mod:`parts` devices and tiers, :mod:`crossing` what a group of devices crosses,
:mod:`prices` algorithms and their prices, :mod:`hierarchy` the cluster, :mod:`known` presets and
links, :mod:`reading` documents.
"""

from autoshard.cluster.hierarchy import Cluster, figures
from autoshard.cluster.known import ALIASES, links, preset_document, presets
from autoshard.cluster.parts import (
    ALGORITHMS,
    WIRES,
    Algorithm,
    Device,
    Library,
    Reduction,
    Reserve,
    Tier,
    Wires,
)
from autoshard.cluster.prices import CollectivePrices
from autoshard.cluster.reading import CLUSTER_VERSION

__all__ = [
    "ALGORITHMS",
    "ALIASES",
    "CLUSTER_VERSION",
    "WIRES",
    "Algorithm",
    "Cluster",
    "CollectivePrices",
    "Device",
    "Library",
    "Reduction",
    "Reserve",
    "Tier",
    "Wires",
    "figures",
    "links",
    "preset_document",
    "presets",
]
