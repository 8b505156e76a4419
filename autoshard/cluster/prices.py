"""Seconds of one message: which algorithms there are, and what each costs.

A group of p devices uses one or more tiers (:mod:`autoshard.cluster.crossing`). On a tier it joins
q units of the level below, each with w members; such a unit leaves over W bytes per second, the
cards (or parts of cards) of its members. a is the latency of a hop. Every law is a line in the
bytes n of the message, and the least of them is taken, as the libraries do. ``collective_s`` stands
on top of each. Neighbouring tiers may be taken together as one with the slowest figures (q
multiplied): so equal tiers cost what one flat tier does.

============  ==================================================================================
ring          s hop + s n / p / min W, s = p - 1 for all_gather and reduce_scatter, 2 (p - 1) for
              all_reduce; hop is the mean of a over the ring; dimensions of a torus add their rates
tree          all_reduce: sum over tiers of 2 ceil(log2 q) a, and c n / min W: a unit sends the
              message up and down (c = 2), or, two units that exchange halves, once (c = 1)
in-network    tree, with (q + 1) / q n / W and its own latency where switches sum
hierarchical  reduce_scatter from the inner tier out, all_gather back: the sum over tiers of
              s (ceil(log2 q) a + (q - 1) / q n / W), s = 2 for all_reduce, else 1
pairwise      all_to_all: sum over tiers of w (q - 1) (a + n / p / (W / w)); on a ring of q units
              each byte travels q / 4 links, of which it has two
send_recv     the slowest hop to the next member: a + n / W
============  ==================================================================================

``library`` has factors on the two parts of a line, for collectives that a library makes otherwise
than the laws say.

Each stands twice: short messages (``latency_s``, W times ``short_share``) and bulk transfers
(``bulk_latency_s``, W); sums by switches are bulk only.

Sources: ring and tree: NVIDIA/nccl src/graph/tuning.cc; a double tree over two nodes sends the
message once, NVIDIA/nccl-tests doc/PERFORMANCE.md and issue 309; hierarchical, logarithmic steps:
HCCL's published notes on its algorithms; (q + 1) / q: a device reads its part of the sum from the
switch, for which all send, and writes it once to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, log2, prod

import numpy as np
from numpy.typing import NDArray

from autoshard.cluster.crossing import Crossing, crossings, send_crossings, spread
from autoshard.cluster.parts import Algorithm, Library, Tier
from autoshard.sharding.collective import MessageOp
from autoshard.sharding.layout import Shape

Line = tuple[float, float]
"""Seconds, and seconds a byte."""


@dataclass(frozen=True, slots=True)
class _Level:
    """One tier as a message of one protocol sees it, or several taken together.

    Attributes:
        units: how many are joined.
        below: members of the group in one of them.
        latency_s: of one hop.
        rate: bytes per second of one unit, all its members together.
        reduced: (bytes per second, latency) where switches sum.
    """

    units: int
    below: int
    latency_s: float
    rate: float
    reduced: tuple[float, float] | None


class CollectivePrices:
    """Seconds of one collective on a mesh, a ``sharding.collective.CollectiveSeconds``.

    Args:
        tiers: links of the cluster, inner ones first.
        algorithms: what the library has.
        collective_s: seconds of starting one, whatever its size.
        devices_per_node: for :meth:`group`.
        sizes: of the mesh, which lies row-major on the devices.
        library: factors on what the laws say, by collective.
        parts: such meshes that lie one after another on the devices.
    """

    def __init__(
        self,
        tiers: tuple[Tier, ...],
        algorithms: tuple[Algorithm, ...],
        collective_s: float,
        devices_per_node: int,
        sizes: Shape,
        library: Mapping[MessageOp, Library] | None = None,
        parts: int = 1,
    ) -> None:
        self.library = library or {}
        self._all = (parts, *sizes)
        self.tiers, self.algorithms, self.collective_s = tiers, algorithms, collective_s
        self.devices_per_node, self.sizes = devices_per_node, sizes
        self._lines: dict[tuple[str, tuple[int, ...]], tuple[Line, ...]] = {}
        self._crossings: dict[tuple[int, ...], tuple[Crossing, ...]] = {}

    def __call__(self, op: MessageOp, axes: tuple[int, ...], num_bytes: int) -> float:
        """Seconds of ``op`` over ``axes`` with ``num_bytes`` as ``Collective`` counts them.

        ``send_recv`` counts what one device sends to the next member of its group.
        """
        lines = self._lines.get((op, axes)) or self.lines(op, axes)
        return min(a + num_bytes * b for a, b in lines)

    def many(
        self, op: MessageOp, axes: tuple[int, ...], num_bytes: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """The same for an array of sizes."""
        first, *rest = self.lines(op, axes)
        size = np.asarray(num_bytes, dtype=np.float64)
        out: NDArray[np.float64] = first[0] + size * first[1]
        for a, b in rest:
            np.minimum(out, a + size * b, out=out)
        return out

    def group(self, axes: tuple[int, ...]) -> tuple[int, int, int]:
        """(members, members that share a node, nodes) of the worst group over ``axes``."""
        return spread(self._all, _inside(axes), self.devices_per_node)

    def tiers_of(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of the tiers that a message over ``axes`` uses, inner ones first."""
        return tuple(self.tiers.index(crossed.tier) for crossed in self._crossed(axes))

    def lines(self, op: MessageOp, axes: tuple[int, ...]) -> tuple[Line, ...]:
        """(latency, seconds per byte) of each algorithm that is the fastest at some size."""
        key = (op, tuple(axes))
        if key not in self._lines:
            members = prod(self.sizes[a] for a in key[1])
            found = [(0.0, 0.0)] if members == 1 else self._algorithms(op, key[1], members)
            self._lines[key] = _envelope(found)
        return self._lines[key]

    def _algorithms(self, op: MessageOp, axes: tuple[int, ...], members: int) -> Iterator[Line]:
        base, made = self.collective_s, self.library.get(op, Library())
        if op == "send_recv":
            for latency, slope in _send(send_crossings(self.tiers, self._all, _inside(axes))):
                yield (base + latency) * made.latency, slope * made.bytes
            return
        crossed = self._crossed(axes)
        for bulk in (False, True):
            levels = tuple(_level(c, bulk) for c in crossed)
            for latency, slope in self._of(op, members, crossed, levels, bulk):
                yield (base + latency) * made.latency, slope * made.bytes

    def _crossed(self, axes: tuple[int, ...]) -> tuple[Crossing, ...]:
        if axes not in self._crossings:
            self._crossings[axes] = crossings(self.tiers, self._all, _inside(axes))
        return self._crossings[axes]

    def _of(
        self,
        op: MessageOp,
        members: int,
        crossed: tuple[Crossing, ...],
        levels: tuple[_Level, ...],
        bulk: bool,
    ) -> Iterator[Line]:
        if op == "all_to_all":
            yield _pairwise(members, crossed, levels)
            return
        passes = 2 if op == "all_reduce" else 1
        if "ring" in self.algorithms:
            yield _ring(passes, members, crossed, levels)
        for joined in _joined(levels, members):
            if op == "all_reduce" and "tree" in self.algorithms:
                yield _tree(joined, reduced=False)
                if bulk and any(level.reduced for level in joined):
                    yield _tree(joined, reduced=True)
            if "hierarchical" in self.algorithms:
                yield _hierarchical(passes, joined)


def _level(crossed: Crossing, bulk: bool) -> _Level:
    tier = crossed.tier
    share = crossed.share * _wired(crossed)
    sums = tier.reduction if bulk else None
    return _Level(
        units=crossed.units,
        below=crossed.below,
        latency_s=tier.bulk_latency_s if bulk else tier.latency_s,
        rate=tier.bytes_per_second * share * (1.0 if bulk else tier.short_share),
        reduced=None if sums is None else (sums.bytes_per_second * share, sums.latency_s),
    )


def _wired(crossed: Crossing) -> float:
    """Share of a device's links that a group of so many units can use."""
    units, parts = crossed.units, crossed.parts
    if parts is None or units >= parts:
        return 1.0
    if crossed.tier.wires == "mesh":
        return (units - 1) / (parts - 1)
    return 0.5 if crossed.tier.wires == "ring" else 1.0


def _ring(
    passes: int, members: int, crossed: tuple[Crossing, ...], levels: tuple[_Level, ...]
) -> Line:
    steps = passes * (members - 1)
    both = list(zip(crossed, levels, strict=True))
    hop = sum(c.hops * level.latency_s for c, level in both) / sum(c.hops for c in crossed)
    if all(c.tier.wires == "ring" for c in crossed):
        rate = sum(level.rate / c.below for c, level in both)
    else:
        rate = min(level.rate for level in levels)
    return steps * hop, steps / members / rate


def _tree(levels: tuple[_Level, ...], reduced: bool) -> Line:
    latency, slope = 0.0, 0.0
    for level in levels:
        if reduced and level.reduced:
            rate, once = level.reduced
            latency += once
            slope = max(slope, (level.units + 1) / level.units / rate)
        else:
            latency += 2 * ceil(log2(level.units)) * level.latency_s
            times = 1 if level is levels[-1] and level.units == 2 else 2
            slope = max(slope, times / level.rate)
    return latency, slope


def _hierarchical(passes: int, levels: tuple[_Level, ...]) -> Line:
    latency = sum(ceil(log2(level.units)) * level.latency_s for level in levels)
    slope = sum((level.units - 1) / level.units / level.rate for level in levels)
    return passes * latency, passes * slope


def _pairwise(members: int, crossed: tuple[Crossing, ...], levels: tuple[_Level, ...]) -> Line:
    """All handshakes of bulk transfers are under way at once, so the longest is paid once."""
    latency, slope, handshake = 0.0, 0.0, 0.0
    for c, level in zip(crossed, levels, strict=True):
        peers = level.below * (level.units - 1)
        links = max(1.0, level.units / 4) if c.tier.wires == "ring" else 1.0
        latency += peers * c.tier.latency_s
        handshake = max(handshake, level.latency_s - c.tier.latency_s)
        slope += peers / members * links * level.below / level.rate
    return latency + handshake, slope


def _send(crossed: tuple[tuple[Tier, float], ...]) -> Iterator[Line]:
    for bulk in (False, True):
        latency, slope = 0.0, 0.0
        for tier, share in crossed:
            rate = tier.bytes_per_second * share * (1.0 if bulk else tier.short_share)
            latency = max(latency, tier.bulk_latency_s if bulk else tier.latency_s)
            slope = max(slope, 1 / (rate * _neighbour(tier)))
        yield latency, slope


def _neighbour(tier: Tier) -> float:
    """Share of a device's links that reach one neighbour."""
    if tier.wires == "mesh" and tier.devices is not None:
        return 1 / max(1, tier.devices - 1)
    return 0.5 if tier.wires == "ring" else 1.0


def _joined(levels: tuple[_Level, ...], members: int) -> Iterator[tuple[_Level, ...]]:
    """All ways to take neighbouring levels together."""
    for bits in range(1 << max(0, len(levels) - 1)):
        runs = [[levels[0]]]
        for i, level in enumerate(levels[1:]):
            if bits >> i & 1:
                runs[-1].append(level)
            else:
                runs.append([level])
        yield tuple(_join(run, members) for run in runs)


def _join(run: list[_Level], members: int) -> _Level:
    if len(run) == 1:
        return run[0]
    first = run[0]
    sums = [level.reduced and (level.reduced[0] / level.below, level.reduced[1]) for level in run]
    found = [s for s in sums if s]
    return _Level(
        units=min(prod(level.units for level in run), -(-members // first.below)),
        below=first.below,
        latency_s=max(level.latency_s for level in run),
        rate=first.below * min(level.rate / level.below for level in run),
        reduced=(first.below * min(s[0] for s in found), max(s[1] for s in found))
        if len(found) == len(run)
        else None,
    )


def _envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Those that are the least at some size, by rising latency."""
    kept: list[Line] = []
    for a, b in sorted(lines):
        if kept and b >= kept[-1][1]:
            continue
        while len(kept) > 1:
            (a0, b0), (a1, b1) = kept[-2:]
            # The last one is never the least if the new one meets the one before it earlier.
            if (a - a0) * (b0 - b1) > (a1 - a0) * (b0 - b):
                break
            kept.pop()
        kept.append((a, b))
    return tuple(kept)


def _inside(axes: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of one mesh among those of several, which are the outermost axis."""
    return tuple(a + 1 for a in axes)
