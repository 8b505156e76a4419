"""A model's graph at any sizes, from captures at two sets of them.

Captures are what pricing many rows takes longest, and most models of a file differ in sizes only.
Nearly every number of a graph (a size, an attribute, a count of operations) is a constant times
sizes of the model. Captured with a prime for each size, a number says by its factors which; a
second capture at other primes must agree. It does not where a number is a sum (what an RMS norm of
several operators keeps): such a model is captured by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from autoshard.analyzer import Captured
from benchmarks.published.batches import merged

FIRST = (13, 17, 19, 23, 29, 31, 37)
SECOND = (41, 43, 47, 53, 59, 61, 67)
"""Sizes that are captured: primes that hardly a constant has as a factor."""


class BySizes:
    """Captures of all models that differ in sizes only.

    Args:
        capture: the model at sizes.
        wanted: of one of them; a size of 1 stays 1, since it broadcasts (but the first, the batch).
    """

    def __init__(self, capture: Callable[[Sequence[int]], Captured], wanted: Sequence[int]) -> None:
        self._sizes = tuple(
            tuple(1 if i and n == 1 else p for i, (p, n) in enumerate(zip(ps, wanted, strict=True)))
            for ps in (FIRST, SECOND)
        )
        self._first, self._second = (capture(sizes) for sizes in self._sizes)

    def at(self, wanted: Sequence[int]) -> Captured:
        """The model at these sizes; its inputs are as they were captured.

        Raises:
            ValueError: the two captures differ in more than products of sizes.
        """
        first, second = self._sizes

        def number(a: int, b: int) -> int:
            powers = [_power(a, p) for p in first]
            constant = a // _product(first, powers)
            if constant * _product(second, powers) != b:
                raise ValueError(f"{a} and {b} are not one product of sizes")
            return constant * _product(wanted, powers)

        return merged(self._first, self._second, number)


def _product(sizes: Sequence[int], powers: Sequence[int]) -> int:
    return prod(n**e for n, e in zip(sizes, powers, strict=True))


def _power(number: int, prime: int) -> int:
    """How often ``prime`` is a factor; 1 is none."""
    found = 0
    while prime > 1 and number and number % prime == 0:
        number, found = number // prime, found + 1
    return found
