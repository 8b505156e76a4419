"""From readings of messages to the constants of tiers and of the library that sends them.

The laws are lines in constants: a message costs its start, its hops, and its bytes
over the bandwidth (``autoshard.cluster.prices``). Start, hops and bandwidth of a tier come from
all_reduce; what a library makes of the other kinds is a factor on each part. Where all groups have
as many hops, nothing tells their start from their hops, and hops take it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.calibrate.fit import nonnegative
from autoshard.calibrate.messages import Hosts
from autoshard.calibrate.readings import MessageReading
from autoshard.cluster import Cluster, Library, Tier
from autoshard.sharding.collective import MESSAGE_OPS, MessageOp

FASTEST = 1e18
"""Bytes per second of a link that costs nothing."""

LAWFUL: MessageOp = "all_reduce"
"""What tiers are fitted to."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """A price in its constants: coefficients of start, of a hop, and of seconds a byte."""

    start: float
    hop: float
    byte: float


def fit_messages(cluster: Cluster, hosts: Hosts, found: Sequence[MessageReading]) -> Cluster:
    """``cluster`` with tiers and library as measured; tiers that were not measured stay."""
    for index in range(len(cluster.tiers)):
        own = [r for r in found if _tier_of(cluster, hosts, r) == index]
        if any(r.op == LAWFUL and not r.alone for r in own):
            cluster = _fit_tier(cluster, index, own, first=index == 0)
    return _fit_library(cluster, hosts, found)


def predicted_message(cluster: Cluster, r: MessageReading) -> float:
    """What the cost model says of a reading, all groups sending."""
    return cluster.collective_seconds(r.mesh)(r.op, r.axes, r.num_bytes)


def _tier_of(cluster: Cluster, hosts: Hosts, r: MessageReading) -> int | None:
    """The only tier that a reading's groups use, or None."""
    _, inside, nodes = cluster.collective_seconds(r.mesh).group(r.axes)
    if nodes == 1:
        return 0
    return len(cluster.tiers) - 1 if inside == 1 else None


def _fit_tier(
    cluster: Cluster, index: int, rows: Sequence[MessageReading], *, first: bool
) -> Cluster:
    lawful = [r for r in rows if r.op == LAWFUL]
    together = [r for r in lawful if not r.alone]
    alone = [r for r in lawful if r.alone]
    tier = replace(cluster.tiers[index], devices_per_card=1)
    start, hop, byte = _constants(cluster, index, tier, alone or together, free_start=first)
    if alone:
        _, _, shared = _constants(cluster, index, tier, together, free_start=first)
        tier = replace(tier, devices_per_card=_sharing(shared / byte, cluster.devices_per_node))
    tier = replace(
        tier,
        latency_s=hop,
        bulk_latency_s=hop,
        short_share=1.0,
        bytes_per_second=1.0 / max(byte, 1.0 / FASTEST),
    )
    cluster = cluster.with_tier(index, tier)
    return replace(cluster, collective_s=start) if first else cluster


def _sharing(ratio: float, most: int) -> int:
    return max(1, min(most, round(ratio)))


def _constants(
    cluster: Cluster, index: int, tier: Tier, rows: Sequence[MessageReading], *, free_start: bool
) -> tuple[float, float, float]:
    """Start, seconds of a hop and seconds a byte; a start that is known is kept."""
    coefficients: list[tuple[float, ...]] = []
    seconds = []
    every = [_parts(cluster, index, tier, r) for r in rows]
    if len({round(p.hop / p.start, 6) for p in every}) == 1 and free_start:
        cluster, free_start = replace(cluster, collective_s=0.0), False
    for r, parts in zip(rows, every, strict=True):
        if free_start:
            coefficients.append((parts.start, parts.hop, parts.byte))
            seconds.append(r.seconds)
        else:
            coefficients.append((parts.hop, parts.byte))
            seconds.append(max(r.seconds / 10, r.seconds - parts.start * cluster.collective_s))
    found = nonnegative(coefficients, seconds)
    hop, byte = found[-2:]
    return found[0] if free_start else cluster.collective_s, hop, byte


def _parts(cluster: Cluster, index: int, tier: Tier, r: MessageReading) -> _Parts:
    def price(start: float, hop: float, rate: float, num_bytes: int) -> float:
        changed = replace(
            tier, latency_s=hop, bulk_latency_s=hop, short_share=1.0, bytes_per_second=rate
        )
        one = replace(cluster.with_tier(index, changed), collective_s=start, library={})
        return one.collective_seconds(r.mesh)(r.op, r.axes, num_bytes)

    return _Parts(
        start=price(1.0, 0.0, FASTEST, 0),
        hop=price(0.0, 1.0, FASTEST, 0),
        byte=price(0.0, 0.0, 1.0, r.num_bytes),
    )


def _fit_library(cluster: Cluster, hosts: Hosts, found: Sequence[MessageReading]) -> Cluster:
    """Factors of each kind on the two parts of its law."""
    library: dict[MessageOp, Library] = {}
    bare = replace(cluster, library={})
    for op in MESSAGE_OPS:
        rows = [r for r in found if r.op == op and not r.alone]
        if not rows:
            continue
        coefficients = []
        for r in rows:
            prices = bare.collective_seconds(r.mesh)
            latency = prices(r.op, r.axes, 0)
            coefficients.append((latency, prices(r.op, r.axes, r.num_bytes) - latency))
        latency, num_bytes = nonnegative(coefficients, [r.seconds for r in rows])
        library[op] = Library(latency=max(latency, 1e-3), bytes=max(num_bytes, 1e-3))
    return replace(cluster, library=library)
