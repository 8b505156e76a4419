"""What a group of devices crosses: how it lies on the tiers, and what it gets of their cards."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from autoshard.cluster.parts import Tier
from autoshard.sharding.layout import Shape

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Crossing:
    """How the worst group over some axes lies on one tier.

    Attributes:
        tier: the tier.
        below: members of the group in one unit of the level below.
        units: units of the level below that the group joins in one unit of this tier.
        hops: of a ring through all members, those that end on this tier.
        share: of ``bytes_per_second`` of a card, what all members of one unit of the level below
            have together to leave it, while all other groups over the same axes leave as well.
        parts: of this tier, how many units of the level below there are; None: not bounded.
    """

    tier: Tier
    below: int
    units: int
    hops: int
    share: float
    parts: int | None


def crossings(tiers: tuple[Tier, ...], sizes: Shape, axes: tuple[int, ...]) -> tuple[Crossing, ...]:
    """The tiers that the groups over ``axes`` use, inner ones first.

    Groups that lie unevenly are priced by the worst of them.
    """
    groups = _groups(sizes, axes)
    members = len(groups)
    out = []
    lower: Ints = groups
    lower_count = members
    for i, tier in enumerate(tiers):
        upper = _units(groups, tier)
        count = _most_units(upper)
        if lower_count > 1:
            found = Crossing(
                tier=tier,
                below=max(1, members // lower_count),
                units=-(-lower_count // count),
                hops=lower_count - (count if count > 1 else 0),
                share=_least_share(groups, lower, tier),
                parts=_parts(tiers, i),
            )
            if found.units > 1:
                out.append(found)
        lower, lower_count = upper, count
    return tuple(out)


def send_crossings(
    tiers: tuple[Tier, ...], sizes: Shape, axes: tuple[int, ...]
) -> tuple[tuple[Tier, float], ...]:
    """Tiers that a message to the next member crosses, and what a device gets of a card there."""
    groups = _groups(sizes, axes)
    out = []
    lower = groups
    for tier in tiers:
        upper = _units(groups, tier)
        here = (lower[:-1] != lower[1:]) & (upper[:-1] == upper[1:])
        if here.any():
            # A device that receives and one that sends use the two directions of a card.
            cards = groups[:-1][here] // tier.devices_per_card
            out.append((tier, 1.0 / int(np.bincount(cards).max())))
        lower = upper
    return tuple(out)


def spread(sizes: Shape, axes: tuple[int, ...], per_node: int) -> tuple[int, int, int]:
    """(members, members that share a node, nodes) of the worst group over ``axes``."""
    groups = _groups(sizes, axes)
    nodes = _most_units(groups // per_node)
    return len(groups), max(1, len(groups) // nodes), nodes


def _groups(sizes: Shape, axes: tuple[int, ...]) -> Ints:
    """Devices by member (rows) and group (columns)."""
    members = prod(sizes[a] for a in axes)
    ranks = np.arange(prod(sizes), dtype=np.int64).reshape(sizes)
    return np.moveaxis(ranks, axes, range(len(axes))).reshape(members, -1)


def _units(groups: Ints, tier: Tier) -> Ints:
    return np.zeros_like(groups) if tier.devices is None else groups // tier.devices


def _most_units(units: Ints) -> int:
    ordered = np.sort(units, axis=0)
    return int((np.diff(ordered, axis=0) > 0).sum(axis=0).max(initial=0)) + 1


def _parts(tiers: tuple[Tier, ...], index: int) -> int | None:
    devices = tiers[index].devices
    below = tiers[index - 1].devices if index else 1
    return None if devices is None or below is None else devices // below


def _least_share(groups: Ints, lower: Ints, tier: Tier) -> float:
    """Cards with which one unit's members leave it together, where that is least.

    A card serves those of its devices whose group leaves the unit, in equal parts.
    """
    leave = (lower != lower[0]).any(axis=0)
    cards = groups[:, leave] // tier.devices_per_card
    parts = 1.0 / np.bincount(cards.ravel())[cards]
    stride = int(lower.max()) + 1
    keys = np.arange(cards.shape[1], dtype=np.int64)[None, :] * stride + lower[:, leave]
    _, where = np.unique(keys.ravel(), return_inverse=True)
    return float(np.bincount(where, weights=parts.ravel()).min())
