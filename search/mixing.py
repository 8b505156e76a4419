"""Blocks that are not all alike: some with one choice of strategies, the others with another.

A price of memory finds choices that take more than there is and choices that leave some of it free.
Where two of them are alike outside of the blocks and in what one block hands to the next, any
number of blocks may have the one and the rest the other: no message is added between them, and
seconds and bytes lie between those of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoshard.search.folded import Folded
from autoshard.search.sums import Sums, Tied


@dataclass(frozen=True, slots=True)
class Pair:
    """Two choices that differ inside of blocks alone.

    Attributes:
        rest: the leaner one, within the room.
        some: the faster one, which takes more.
        share: of the blocks that may have ``some``, by the tables.
        seconds: of the tables, with so many.
    """

    rest: Tied
    some: Tied
    share: float
    seconds: float


def inside(folded: Folded) -> NDArray[np.bool_]:
    """Of each kind of node whether it stands in blocks alone, and no other segment uses it."""
    graph, of = folded.graph, folded.segment_of
    out = np.ones(len(folded.lists), dtype=bool)
    for name, kind in zip(folded.tables.variables, folded.kind, strict=True):
        own = of[name]
        if not folded.is_block[own] or any(of[user] != own for user, _ in graph.uses[name]):
            out[kind] = False
    return out


def pairs(folded: Folded, sums: Sums, pool: Sequence[Tied], room: float) -> list[Pair]:
    """The best pair for each choice outside of blocks, the fastest first.

    Args:
        folded: the problem.
        sums: of one schedule; what is told of ``seconds`` and bytes is by them.
        pool: choices; what one has outside of blocks is put beside what others have inside.
        room: bytes, by the tables.
    """
    inner = inside(folded)
    factors = frozenset(f for f in sums.gathered if inner[[*sums.scopes[f]]].any())
    outers = {tied.choice[~inner].tobytes(): tied for tied in reversed(pool)}
    inners = {(tied.choice[inner].tobytes(), tied.again & factors): tied for tied in reversed(pool)}
    found = []
    for outer in outers.values():
        trials = []
        for tied in inners.values():
            choice = np.where(inner, tied.choice, outer.choice)
            again = sums.keeping(choice, tied.again & factors)
            trials.append((choice, again | (outer.again - factors)))
        seconds, sizes = sums.totals(
            np.array([choice for choice, _ in trials]), [again for _, again in trials]
        )
        at = _beside(seconds, sizes, room)
        if at is None:
            continue
        rest, some = (Tied(*trials[i], float(seconds[i]), float(sizes[i])) for i in at)
        share = (room - rest.num_bytes) / (some.num_bytes - rest.num_bytes)
        between = rest.seconds + share * (some.seconds - rest.seconds)
        found.append(Pair(rest, some, share, between))
    return sorted(found, key=lambda pair: pair.seconds)


def _beside(
    seconds: NDArray[np.float64], sizes: NDArray[np.float64], room: float
) -> tuple[int, int] | None:
    """The points before and after ``room`` on the lower hull; None where it lies on one side."""
    order = [i for i in np.lexsort((seconds, sizes)).tolist() if np.isfinite(seconds[i])]
    hull: list[int] = []
    for i in order:
        if hull and seconds[i] >= seconds[hull[-1]]:
            continue  # slower, and takes no less
        while len(hull) > 1 and _is_above(*((sizes[j], seconds[j]) for j in (*hull[-2:], i))):
            hull.pop()
        hull.append(i)
    for low, high in pairwise(hull):
        if sizes[low] <= room < sizes[high]:
            return low, high
    return None


def _is_above(
    one: tuple[float, float], middle: tuple[float, float], other: tuple[float, float]
) -> bool:
    """Whether a point lies on the line between its neighbours or above it."""
    share = (middle[0] - one[0]) / (other[0] - one[0])
    return middle[1] >= one[1] + share * (other[1] - one[1])
