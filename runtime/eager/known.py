"""An input that is cut, and that every device was given whole: what can be told without a message.

The mean of a cross-entropy divides by the number of targets that are not ignored. Where the targets
are an input, every device counts all of them itself; a message would cost a thousand times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from autoshard.runtime.eager.planning import Move, Run, Store
from autoshard.sharding.layout import R

_NAME: Final = "_autoshard_whole"


def remember(shard: Tensor, whole: Tensor) -> None:
    """Note that a shard was cut from ``whole``, as long as nobody writes into the shard."""
    shard.__dict__[_NAME] = whole, shard._version


def whole_of(tensor: Tensor) -> Tensor | None:
    """What a shard was cut from, if it is known on every device and still what it was."""
    whole, version = tensor.__dict__.get(_NAME, (None, 0))
    return whole if whole is not None and tensor._version == version else None


def is_count(steps: Sequence[Move | Run | Store], at: int) -> bool:
    """Whether step ``at`` counts targets, and the next one sums the counts of all devices."""
    run, move = steps[at], steps[at + 1] if at + 1 < len(steps) else None
    return (
        isinstance(run, Run)
        and run.call.family == "autoshard.count_valid"
        and isinstance(move, Move)
        and move.source == run.slot
        and all(state is R for state in move.target)
    )
