"""Changes of a request, as people write them: ``link=2x``, ``nodes=+1``, ``memory=40GB``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cluster import Cluster
from autoshard.cluster.parts import Tier
from autoshard.errors import RequestError, UnknownNameError
from autoshard.quantities import BYTES, RATES, SECONDS, read

SIZES = {"devices": "devices", "global-batch": "global_batch", "seq-len": "seq_len"}
"""Whole numbers of a request, and what :func:`autoshard.optimize` calls them."""

NAMES = {"dtype": "dtype", "optimizer": "optimizer", "strategy": "strategy"}
"""What is changed by naming another."""

EXAMPLES = {
    "link": "link=2x",
    "latency": "latency=0.5x",
    "memory": "memory=0.5x",
    "memory-bandwidth": "memory-bandwidth=2x",
    "peak": "peak=2x",
    "nodes": "nodes=+1",
    "devices": "devices=16",
    "global-batch": "global-batch=2x",
    "seq-len": "seq-len=8192",
    "dtype": "dtype=fp32",
    "optimizer": "optimizer=sgd",
    "strategy": "strategy=fsdp",
}
"""Every change there is; ``link`` and ``latency`` may name one tier: ``link.node=2x``."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as :func:`autoshard.optimize` takes it, its cluster found.

    Attributes:
        cluster: what is planned for.
        options: the other arguments.
        rebuilds: whether the model itself is other than before.
    """

    cluster: Cluster
    options: Mapping[str, Any]
    rebuilds: bool = False


def changed(text: str, asked: Asked, batch: int, length: int | None) -> Asked:
    """The request with the changes of ``text``, which are separated by commas.

    Args:
        text: ``link=2x`` or ``memory=0.5x,nodes=+1``.
        asked: the request.
        batch: its global batch.
        length: tokens of its samples.

    Raises:
        UnknownNameError: no such change, or tier.
        RequestError: a value that cannot be.
    """
    now = {"global-batch": batch, "seq-len": length}
    for part in text.split(","):
        name, equals, value = (s.strip() for s in part.partition("="))
        kind, _, tier = name.partition(".")
        if kind not in EXAMPLES or (tier and kind not in ("link", "latency")):
            raise UnknownNameError("change", name, EXAMPLES)
        if not equals or not value:
            raise _unreadable(part, f"write it as {EXAMPLES[kind]}")
        if kind in NAMES:
            rebuilds = asked.rebuilds or kind == "dtype"
            asked = Asked(asked.cluster, {**asked.options, NAMES[kind]: value}, rebuilds)
        elif kind == "nodes" or kind in SIZES:
            asked = _resized(part, kind, value, asked, now)
        else:
            asked = _other_hardware(part, kind, tier, value, asked)
    return asked


def _resized(part: str, kind: str, value: str, asked: Asked, now: dict[str, int | None]) -> Asked:
    cluster = asked.cluster
    if kind == "nodes":
        if cluster.device.kind == "cpu":
            raise _unreadable(part, "processes of one machine have no nodes; change devices")
        count = _whole(part, value, cluster.nodes)
        return _on(part, asked, count * cluster.devices_per_node)
    if kind == "devices":
        return _on(part, asked, _whole(part, value, cluster.devices))
    before = now[kind]
    now[kind] = size = _whole(part, value, before)
    return Asked(cluster, {**asked.options, SIZES[kind]: size}, rebuilds=True)


def _on(part: str, asked: Asked, devices: int) -> Asked:
    if asked.options.get("mesh") is not None and devices != asked.cluster.devices:
        raise _unreadable(part, "the mesh that is forced has other devices; leave it out")
    return replace(asked, cluster=asked.cluster.with_devices(devices))


def _other_hardware(part: str, kind: str, tier: str, value: str, asked: Asked) -> Asked:
    cluster, device = asked.cluster, asked.cluster.device
    if kind == "memory":
        limit = asked.options.get("memory_limit_bytes")
        size = int(_scaled(part, value, limit or device.memory_bytes, BYTES))
        if limit is not None:
            return replace(asked, options={**asked.options, "memory_limit_bytes": size})
        return replace(asked, cluster=replace(cluster, device=replace(device, memory_bytes=size)))
    if kind in ("link", "latency"):
        return replace(asked, cluster=_with_links(part, kind, tier, value, cluster))
    if kind == "memory-bandwidth":
        rate = _scaled(part, value, device.memory_bytes_per_second, BYTES)
        device = replace(device, memory_bytes_per_second=rate)
    else:
        peaks = device.peak_flops_per_second
        highest = peaks.get("bfloat16", max(peaks.values()))
        factor = _scaled(part, value, highest, RATES) / highest
        device = replace(device, peak_flops_per_second={k: v * factor for k, v in peaks.items()})
    return replace(asked, cluster=replace(cluster, device=device))


def _with_links(part: str, kind: str, name: str, value: str, cluster: Cluster) -> Cluster:
    names = [t.name for t in cluster.tiers]
    if name and name not in names:
        raise UnknownNameError(f"tier of {cluster.name}", name, names)
    change: Callable[[str, str, Tier], Tier] = _faster if kind == "link" else _nearer
    for index, tier in enumerate(cluster.tiers):
        if name in ("", tier.name):
            cluster = cluster.with_tier(index, change(part, value, tier))
    return cluster


def _faster(part: str, value: str, tier: Tier) -> Tier:
    """Another bandwidth; what its switches sum keeps pace."""
    rate = _scaled(part, value.removesuffix("/s"), tier.bytes_per_second, BYTES)
    sums = tier.reduction
    if sums is not None:
        factor = rate / tier.bytes_per_second
        sums = replace(sums, bytes_per_second=sums.bytes_per_second * factor)
    return replace(tier, bytes_per_second=rate, reduction=sums)


def _nearer(part: str, value: str, tier: Tier) -> Tier:
    """Another latency of a hop; that of bulk transfers and of sums in proportion."""
    latency = _scaled(part, value, tier.latency_s, SECONDS)
    factor = latency / tier.latency_s if tier.latency_s else 1.0
    sums = tier.reduction
    if sums is not None:
        sums = replace(sums, latency_s=sums.latency_s * factor)
    return replace(
        tier, latency_s=latency, bulk_latency_s=tier.bulk_latency_s * factor, reduction=sums
    )


def _scaled(part: str, value: str, now: float, units: dict[str, float]) -> float:
    """``2x`` of what it is now, or a quantity."""
    factor = _factor(value)
    found = read(value, units) if factor is None else factor * now
    if found is None:
        raise _unreadable(part, "write a factor above 0 (2x) or a quantity")
    return found


def _whole(part: str, value: str, now: int | None) -> int:
    """``2x`` or ``+1`` of what it is now, or a whole number."""
    factor = _factor(value)
    if factor is not None or value[:1] in "+-":
        if now is None:
            raise _unreadable(part, "it is not known what it is now; write a whole number")
        step = value[1:].isdecimal()
        found = factor * now if factor is not None else float(now + int(value)) if step else 0.0
    else:
        found = float(value) if value.isdecimal() else 0.0
    if found < 1 or found != int(found):
        raise _unreadable(part, "write a whole number from 1, +1, -1 or a factor (2x)")
    return int(found)


def _factor(value: str) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)x", value)
    return float(found[1]) if found and float(found[1]) > 0 else None


def _unreadable(part: str, mend: str) -> RequestError:
    return RequestError(f"change {part.strip()!r}: {mend}")
