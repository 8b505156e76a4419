"""The tables of one schedule, by factor, and what choices cost by them.

All factors' entries lie in one flat array, so that a price of memory is added to all of them at
once, and many choices are measured at once: with f the first entry of a factor of the kinds a and
b, n(b) the number of b's strategies::

    seconds(choice)  =  sum over factors of  flat[ f + n(b) choice[a] + choice[b] ]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.search.eliminate import Array

Choice = NDArray[np.int64]
"""Number of the strategy of each kind of node; of several choices a row each."""


@dataclass(frozen=True, slots=True)
class Tied:
    """A choice for every kind of node, with its sums.

    Attributes:
        choice: number of the strategy of each kind.
        again: factors whose weights are gathered again in backward.
        seconds: sum of the tables.
        num_bytes: the same of bytes.
    """

    choice: Choice
    again: frozenset[int]
    seconds: float
    num_bytes: float

    @property
    def key(self) -> tuple[bytes, frozenset[int]]:
        """Equal for what is the same program."""
        return self.choice.tobytes(), self.again


@dataclass(frozen=True, slots=True)
class Others:
    """Another choice for some of the blocks, alike outside of them.

    Attributes:
        tied: the choice.
        blocks: how many blocks have it, see ``search.step.later_blocks``.
    """

    tied: Tied
    blocks: int


class Places:
    """Where the entries of some factors lie in a flat array, one factor after another.

    Args:
        scopes: the kinds of each factor, one or two.
        shapes: of each factor's table.
    """

    def __init__(
        self, scopes: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self.shapes = tuple(shapes)
        sizes = [int(np.prod(shape)) for shape in shapes]
        self.ends = np.cumsum([0, *sizes]).tolist()
        self._starts = np.array(self.ends[:-1], dtype=np.int64)
        self._rows = np.array([scope[0] for scope in scopes], dtype=np.int64)
        self._columns = np.array([scope[-1] for scope in scopes], dtype=np.int64)
        # Of one kind alone the column is all there is.
        self._strides = np.array(
            [shape[1] if len(shape) > 1 else 0 for shape in shapes], dtype=np.int64
        )

    def split(self, flat: Array) -> list[Array]:
        """Each factor's part, as a view of its shape."""
        ends = self.ends
        return [
            flat[a:b].reshape(shape)
            for a, b, shape in zip(ends[:-1], ends[1:], self.shapes, strict=True)
        ]

    def at(self, choices: Choice) -> Choice:
        """The entry of each factor (columns) that each of some choices (rows) has."""
        out: Choice = choices[:, self._rows] * self._strides
        out += choices[:, self._columns]
        out += self._starts
        return out


class Sums:
    """Tables of one schedule and one set of weights.

    Args:
        scopes: the kinds of each factor.
        places: where its entries are in both flat arrays.
        seconds: of all entries.
        num_bytes: of all entries.
        gathered: bytes of gathered weights that are kept, where a factor has any.
        again: seconds of gathering them again instead.
    """

    def __init__(
        self,
        scopes: Sequence[tuple[int, ...]],
        places: Places,
        seconds: Array,
        num_bytes: Array,
        gathered: dict[int, Array],
        again: dict[int, Array],
    ) -> None:
        self.scopes, self.places = scopes, places
        self.flat_seconds, self.flat_bytes = seconds, num_bytes
        self.gathered, self.again = gathered, again
        self.minima: dict[float, tuple[float, Tied]] = {}
        """What was solved already, by the price of a byte."""
        self._masks: dict[frozenset[int], NDArray[np.bool_]] = {}

    @cached_property
    def seconds(self) -> tuple[Array, ...]:
        """Of each factor."""
        return tuple(self.places.split(self.flat_seconds))

    @cached_property
    def num_bytes(self) -> tuple[Array, ...]:
        """Of each factor."""
        return tuple(self.places.split(self.flat_bytes))

    @property
    def touched_seconds(self) -> list[Array | None]:
        """Of each factor; None where they are all zero."""
        return self._touched(self.flat_seconds, self.seconds)

    @property
    def touched_bytes(self) -> list[Array | None]:
        """Of each factor; None where they are all zero."""
        return self._touched(self.flat_bytes, self.num_bytes)

    def _touched(self, flat: Array, parts: Sequence[Array]) -> list[Array | None]:
        any_ = np.logical_or.reduceat(flat != 0, self.places.ends[:-1]).tolist()
        return [part if some else None for part, some in zip(parts, any_, strict=True)]

    @cached_property
    def _held(self) -> tuple[Places, Array, Array]:
        """Where gathered weights are, their bytes, and the seconds of gathering them again."""
        places = Places(
            [self.scopes[f] for f in self.gathered], [t.shape for t in self.gathered.values()]
        )
        gathered = [self.gathered[f].ravel() for f in self.gathered]
        again = [self.again[f].ravel() for f in self.gathered]
        return places, np.concatenate(gathered), np.concatenate(again)

    def with_seconds(self, flat: Array, again: dict[int, Array]) -> Sums:
        """Other seconds beside the same bytes."""
        return Sums(self.scopes, self.places, flat, self.flat_bytes, self.gathered, again)

    def towards(self, other: Sums, share: float) -> Sums:
        """Between these seconds and another's; bytes are the same."""
        flat = self.flat_seconds + share * (other.flat_seconds - self.flat_seconds)
        again = {f: (1 - share) * a + share * other.again[f] for f, a in self.again.items()}
        return self.with_seconds(flat, again)

    def plus(self, other: Sums) -> Sums:
        """The sums of both."""

        def added(mine: dict[int, Array], others: dict[int, Array]) -> dict[int, Array]:
            both = {f: mine[f] + others[f] for f in mine if f in others}
            return {**mine, **others, **both}

        return Sums(
            self.scopes,
            self.places,
            self.flat_seconds + other.flat_seconds,
            self.flat_bytes + other.flat_bytes,
            added(self.gathered, other.gathered),
            added(self.again, other.again),
        )

    def at(self, per_byte: float) -> Sequence[Array]:
        """Seconds with every byte at a price."""
        if not per_byte:
            return self.seconds
        out = self.places.split(self.flat_seconds + per_byte * self.flat_bytes)
        for factor, gathered in self.gathered.items():
            out[factor] += np.minimum(per_byte * gathered, self.again[factor])
        return out

    def keeping(self, choice: Choice, factors: Iterable[int]) -> frozenset[int]:
        """Those of ``factors`` that keep a gathered weight with a choice, if they may."""
        return frozenset(
            f for f in factors if self.gathered[f][tuple(choice[k] for k in self.scopes[f])] > 0
        )

    def chosen_again(self, choice: Choice, per_byte: float) -> frozenset[int]:
        """Factors for which gathering again is worth the bytes at a price."""
        if not per_byte or not self.gathered:
            return frozenset()
        places, gathered, again = self._held
        at = places.at(choice[None, :])[0]
        sizes = gathered[at]
        chosen = (sizes > 0) & (per_byte * sizes > again[at])
        return frozenset(f for f, c in zip(self.gathered, chosen.tolist(), strict=True) if c)

    def totals(self, choices: Choice, again: Sequence[frozenset[int]]) -> tuple[Array, Array]:
        """(seconds, bytes) of each of some choices, each with what it gathers again."""
        at = self.places.at(choices)
        seconds, sizes = self.flat_seconds[at], self.flat_bytes[at]
        if self.gathered:
            places, gathered, gathering = self._held
            held = places.at(choices)
            mask = np.array([self._mask(factors) for factors in again])
            seconds = np.hstack([seconds, np.where(mask, gathering[held], 0.0)])
            sizes = np.hstack([sizes, np.where(mask, 0.0, gathered[held])])
        # One after another, however many choices there are: sums of one choice are always the same.
        return seconds.cumsum(axis=1)[:, -1], sizes.cumsum(axis=1)[:, -1]

    def _mask(self, factors: frozenset[int]) -> NDArray[np.bool_]:
        found = self._masks.get(factors)
        if found is None:
            found = self._masks[factors] = np.array([f in factors for f in self.gathered])
        return found

    def measure(self, choice: Choice, again: frozenset[int]) -> Tied:
        """Seconds and bytes of one choice."""
        seconds, sizes = self.totals(choice[None, :], [again])
        return Tied(choice, again, float(seconds[0]), float(sizes[0]))
