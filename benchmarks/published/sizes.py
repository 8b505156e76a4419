"""A model's graph at any sizes, from captures at two sets of them.

Captures are what pricing many rows takes longest, and most models of a file differ in sizes only.
Nearly every number of a graph (a size, an attribute, a count of operations) is a constant times
sizes of the model. Captured with a prime for each size, a number says by its factors which; a
second capture at other primes must agree. What a norm keeps is so many bytes for each of its rows,
a few beside those of the row's elements: sizes times (a constant times sizes, and a few). Where a
number is another sum, its model is captured by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from autoshard.analyzer import Captured
from benchmarks.published.batches import merged

FIRST = (13, 17, 19, 23, 29, 31, 37)
SECOND = (67, 61, 59, 53, 47, 43, 41)
"""Sizes that are captured: primes that hardly a constant has as a factor. One row rises and the
other falls, so that a sum of two sizes is not taken for one of them twice and a little."""

BESIDE = range(17)
"""Bytes that may be kept of a row beside its elements: two numbers at most."""


@dataclass(frozen=True, slots=True)
class Number:
    """``rows * (constant * elements + beside)``; rows and elements are products of sizes.

    Attributes:
        rows: power of each size.
        constant: a factor.
        elements: power of each size.
        beside: added to each row.
    """

    rows: tuple[int, ...]
    constant: int
    elements: tuple[int, ...]
    beside: int

    def at(self, sizes: Sequence[int]) -> int:
        """The number at these sizes."""
        inner = self.constant * _product(sizes, self.elements) + self.beside
        return _product(sizes, self.rows) * inner


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
        self._numbers: dict[tuple[int, int], Number] = {}

    def at(self, wanted: Sequence[int]) -> Captured:
        """The model at these sizes; its inputs are as they were captured.

        Raises:
            ValueError: the two captures differ in more than such numbers.
        """

        @cache
        def number(a: int, b: int) -> int:
            if (a, b) not in self._numbers:
                self._numbers[a, b] = self._read(a, b)
            return self._numbers[a, b].at(wanted)

        return merged(self._first, self._second, number)

    def _read(self, a: int, b: int) -> Number:
        """What a number of the captures is."""
        first, second = self._sizes
        rows, each = _split(a, first)
        for beside in BESIDE:
            elements, constant = _split(each - beside, first)
            found = Number(rows, constant, elements, beside)
            if found.at(second) == b:
                return found
        raise ValueError(f"{a} and {b} are not one product of sizes")


def _split(number: int, primes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """How often each prime is a factor, and what is left."""
    powers = tuple(_power(number, p) for p in primes)
    return powers, number // _product(primes, powers)


def _product(sizes: Sequence[int], powers: Sequence[int]) -> int:
    return prod(n**e for n, e in zip(sizes, powers, strict=True))


def _power(number: int, prime: int) -> int:
    """How often ``prime`` is a factor; 1 is none."""
    found = 0
    while prime > 1 and number and number % prime == 0:
        number, found = number // prime, found + 1
    return found
