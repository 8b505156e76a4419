"""What each segment of a mesh takes at least, its strategies chosen for it alone.

Segments have strategies in common, so that is less than any plan takes: bounds of thousands of
arrangements are sums of these few numbers (:meth:`autoshard.search.floors.Floors.with_storing`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.plan import Schedule
from autoshard.search.folded import Folded, Weights
from autoshard.search.sums import Sums


@dataclass(frozen=True, slots=True)
class Least:
    """What the segments of one mesh take at least, each chosen for itself.

    Attributes:
        seconds: of one microbatch.
        kept: bytes for its backward; empty: not known.
        halves: seconds without gradients of weights, see :meth:`Alone.halves`; empty: not known.
        waiting: bytes for these where they are tasks of their own; empty: not known.
        passing: bytes that there are for a while beside what is kept, see :meth:`Alone.passing`.
    """

    seconds: tuple[float, ...]
    kept: tuple[float, ...] = ()
    halves: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()
    passing: float = 0.0


class Alone:
    """The segments of one mesh, each alone; everything is found once.

    Args:
        folded: the problem of one microbatch.
    """

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self._least: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._passing: dict[str, float] = {}

    def seconds(self, recompute: str) -> tuple[float, ...]:
        """The least seconds of one microbatch in each segment.

        The optimizer and the sum of several microbatches' gradients are left out.
        """
        return self._least_of(recompute, "seconds")

    def halves(self, recompute: str) -> tuple[float, ...]:
        """The least of each segment, as :meth:`seconds`, without gradients of weights.

        First of forward and backward, where these are tasks of their own, then of forward alone.
        """
        both = self._least_of(recompute, "seconds", is_apart=True)
        return both + self._least_of("none", "seconds", is_forward=True)

    def kept(self, recompute: str) -> tuple[float, ...]:
        """The least bytes that each segment keeps for the backward of one microbatch.

        Gathered weights are not counted.
        """
        return self._least_of(recompute, "bytes")

    def waiting(self) -> tuple[float, ...]:
        """The same for gradients of weights, where these are tasks of their own."""
        return self._least_of("none", "bytes", is_apart=True)

    def passing(self, recompute: str) -> float:
        """The least bytes that there are for a while, see :meth:`Folded.passing`."""
        if recompute not in self._passing:
            sizes = self.folded.passing(recompute)
            self._passing[recompute] = self.folded.elimination.least(sizes)
        return self._passing[recompute]

    def _least_of(
        self, recompute: str, of: str, *, is_apart: bool = False, is_forward: bool = False
    ) -> tuple[float, ...]:
        """The least ``seconds`` or ``bytes`` of each segment; with bytes, seconds are found too.

        Args:
            recompute: what backward computes again.
            of: which of them.
            is_apart: where gradients of weights are tasks of their own: seconds without them, and
                bytes that wait for them; else those of whole backwards, and what is kept for them.
            is_forward: of forward alone.
        """
        key = recompute, is_apart, is_forward
        if (of, *key) not in self._least:
            least = self.folded.elimination.least
            seconds: list[float] = []
            sizes: list[float] = []
            for part in range(len(self.folded.parts)):
                sums = self._of_part(part, *key)
                seconds.append(max(least(each.touched_seconds) for each in sums))
                if of == "bytes":
                    sizes.append(least(sums[0].touched_bytes))
            self._least["seconds", *key] = tuple(seconds)
            if of == "bytes":
                self._least["bytes", *key] = tuple(sizes)
        return self._least[of, *key]

    def _of_part(self, part: int, recompute: str, is_apart: bool, is_forward: bool) -> list[Sums]:
        """The tables of one segment, one for each of what messages beside computing may count."""
        count = len(self.folded.parts)
        none: tuple[float, ...] = (0.0,) * count
        one = tuple(float(i == part) for i in range(count))
        weights = Weights(
            forward=one,
            backward=none if is_forward else one,
            update=none,
            late=none,
            stored=none,
            kept=none if is_apart else one,
            weight=none if is_apart else None,
            waiting=one if is_apart else None,
        )
        return [
            self.folded.sums(Schedule(recompute=recompute), replace(weights, beside=shares))
            for shares in self.folded.extremes
        ]
