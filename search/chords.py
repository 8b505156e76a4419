"""The price of memory where the bound is highest, by chords between what fits and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar


class Sized(Protocol):
    """What a solve found."""

    @property
    def seconds(self) -> float:
        """Its time."""

    @property
    def num_bytes(self) -> float:
        """Its memory."""


S = TypeVar("S", bound=Sized)


def between(
    minimum: Callable[[float], tuple[float, S]],
    large: S,
    small: S,
    limit: float,
    *,
    bound: float,
    rounds: int,
) -> tuple[S, S, float, float]:
    """(the best within ``limit``, the last that is too large, the bound, its price of memory).

    Args:
        minimum: price of a byte -> (least seconds + price * bytes, what has it).
        large: the fastest; it is over the limit.
        small: the leanest; it is within.
        limit: bytes.
        bound: seconds that nothing beats, known before.
        rounds: most prices that are tried.
    """
    best, at = small, 0.0
    for _ in range(rounds):
        gap = large.num_bytes - small.num_bytes
        if gap <= 0 or small.seconds <= large.seconds:
            break
        price = (small.seconds - large.seconds) / gap
        value, found = minimum(price)
        if value - price * limit > bound:
            bound, at = value - price * limit, price
        chord = large.seconds + price * large.num_bytes
        if found.num_bytes <= limit:
            if found.seconds < best.seconds:
                best = found
            small = found
        else:
            large = found
        if value >= chord - 1e-9 * abs(chord):
            break
    return (small if small.seconds < best.seconds else best), large, bound, at
