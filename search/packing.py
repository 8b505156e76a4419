"""Choosing one option of every group within a number of bytes: a multiple-choice knapsack.

Dynamic programming over bytes in :data:`STEPS` equal parts of the room, each option's rounded up::

    best(k, n) = min over the options of group k of ( seconds + best(k - 1, n - parts) )

So what is chosen fits, and is the best of all that would fit with a part more for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

STEPS = 4096
"""Parts of the room."""

Option = tuple[float, float]
"""Seconds and bytes."""


def packed(groups: Sequence[Sequence[Option]], room: float) -> list[int] | None:
    """Number of the option of each group: least seconds in all within ``room`` bytes.

    None where even the smallest options are too much.
    """
    least = [min(size for _, size in options) for options in groups]
    free = room - sum(least)
    if free < 0:
        return None
    unit = free / STEPS or 1.0
    best = np.zeros(STEPS + 1)
    taken = []
    for options, smallest in zip(groups, least, strict=True):
        rows = np.full((len(options), STEPS + 1), inf)
        for row, (seconds, size) in zip(rows, options, strict=True):
            parts = int(np.ceil((size - smallest) / unit * (1 - 1e-12)))
            if parts <= STEPS:
                row[parts:] = best[: STEPS + 1 - parts] + seconds
        taken.append(rows.argmin(axis=0))
        best = rows.min(axis=0)
    out: list[int] = []
    at = STEPS
    for options, smallest, chosen in reversed(list(zip(groups, least, taken, strict=True))):
        number = int(chosen[at])
        out.append(number)
        at -= int(np.ceil((options[number][1] - smallest) / unit * (1 - 1e-12)))
    return out[::-1]
