"""A cluster document, checked field by field.

Version 2 has ``tiers``, a section each, with any number of them; a tier may name a known ``link``
and then gives only what differs (:func:`autoshard.cluster.known.with_links`). Version 1 had two,
``inside`` a node and ``across`` nodes, of one protocol each; it is read as what it said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from autoshard.cluster.parts import (
    ALGORITHMS,
    WIRES,
    Algorithm,
    Device,
    Library,
    Reduction,
    Reserve,
    Tier,
    Wires,
)
from autoshard.errors import RequestError
from autoshard.kernels import Kernels
from autoshard.measured import Measured
from autoshard.sharding.collective import MESSAGE_OPS, MessageOp

CLUSTER_VERSION = 2
KIND = "autoshard.cluster"


def read(document: object) -> dict[str, Any]:
    """Arguments of :class:`~autoshard.cluster.Cluster` from a document whose links are spelled out.

    Raises:
        RequestError: not a cluster document; the message names the field.
    """
    values = upgraded(document)
    device = _section(values, "device")
    peaks = device.pop("peak_flops_per_second", None)
    if not isinstance(peaks, Mapping) or "float32" not in peaks:
        raise RequestError("device.peak_flops_per_second needs a figure for float32 at least")
    tiers = [_tier(name, _section(values, "tiers")) for name in _section(values, "tiers") if name]
    if not tiers:
        raise RequestError("cluster document: section 'tiers' is empty; it needs one at least")
    reserve = _reserve(values)
    return {
        "name": _text("name", values),
        "devices": _whole("devices", values),
        "devices_per_node": _whole("devices_per_node", values),
        "collective_s": _float("collective_s", values, zero=True),
        "reserve_bytes": _whole("reserve_bytes", values, zero=True)
        if reserve is None
        else reserve.total_bytes,
        "reserve": reserve,
        "algorithms": _algorithms(values),
        "library": _library(values),
        "device": Device(
            name=_text("name", device),
            kind=_text("kind", device),
            peak_flops_per_second={
                str(k): _number("device.peak_flops_per_second", v) for k, v in peaks.items()
            },
            efficiency=_float("efficiency", device),
            memory_bytes=_whole("memory_bytes", device),
            memory_bytes_per_second=_float("memory_bytes_per_second", device),
            memory_efficiency=_float("memory_efficiency", device),
            launch_s=_float("launch_s", device, zero=True),
            kernels=Kernels.from_json(device.get("kernels", {})),
            efficiencies=_efficiencies(device.get("efficiencies", {})),
            measured=Measured.from_json(device["measured"]) if "measured" in device else None,
        ),
        # Sorted, since JSON objects have no order: the one without a bound is the outermost.
        "tiers": tuple(sorted(tiers, key=lambda t: (t.devices is None, t.devices or 0))),
        "sources": {
            str(k): str(v) for k, v in _section(values, "sources", optional=True).items() if k
        },
    }


def upgraded(document: object) -> dict[str, Any]:
    """The document in the present version, without its kind and version.

    Raises:
        RequestError: not a cluster document, or of a version that is not known.
    """
    if not isinstance(document, Mapping) or document.get("kind") != KIND:
        raise RequestError(f"not a cluster document: its 'kind' is not {KIND!r}")
    version = document.get("schema_version")
    if version not in (1, CLUSTER_VERSION):
        raise RequestError(
            f"cluster document of version {version!r}; this autoshard reads versions 1 and "
            f"{CLUSTER_VERSION}"
        )
    values = {k: v for k, v in document.items() if k not in ("kind", "schema_version")}
    return _from_version_1(values) if version == 1 else values


def _from_version_1(values: dict[str, Any]) -> dict[str, Any]:
    """``inside`` and ``across`` as tiers; one tier where they are one (processes of a machine)."""
    device = values.get("device")
    kind = device.get("kind") if isinstance(device, Mapping) else None
    found = {"node": values.pop("inside", None), "fabric": values.pop("across", None)}
    named = {"node": "inside", "fabric": "across"}
    if kind == "cpu" and found["node"] == found["fabric"]:
        del found["fabric"]
    tiers = {}
    for name, tier in found.items():
        if not isinstance(tier, Mapping):
            raise RequestError(f"cluster document: section {named[name]!r} is missing")
        tiers[name] = {**tier, "link": tier.get("name")}
        del tiers[name]["name"]
    if "fabric" in tiers:
        tiers["node"]["devices"] = values.get("devices_per_node")
    sources = values.get("sources")
    if isinstance(sources, Mapping):
        values["sources"] = {_renamed(str(k)): v for k, v in sources.items()}
    return {**values, "tiers": tiers, "algorithms": list(ALGORITHMS)}


def _renamed(field: str) -> str:
    for old, new in (("inside.", "tiers.node."), ("across.", "tiers.fabric.")):
        if field.startswith(old):
            return new + field.removeprefix(old)
    return field


def tier_document(tier: Tier) -> dict[str, Any]:
    """A tier as the document has it."""
    out: dict[str, Any] = {
        "link": tier.link,
        "bytes_per_second": tier.bytes_per_second,
        "latency_s": tier.latency_s,
        "bulk_latency_s": tier.bulk_latency_s,
        "short_share": tier.short_share,
        "devices_per_card": tier.devices_per_card,
        "wires": tier.wires,
    }
    if tier.devices is not None:
        out["devices"] = tier.devices
    if tier.reduction is not None:
        out["reduction"] = {
            "bytes_per_second": tier.reduction.bytes_per_second,
            "latency_s": tier.reduction.latency_s,
        }
    return out


def _tier(name: str, tiers: Mapping[str, Any]) -> Tier:
    values = _section(tiers, name)
    values[""] = f"tiers.{name}"
    latency_s = _float("latency_s", values, zero=True)
    reduction = None
    if "reduction" in values:
        sums = _section(values, "reduction")
        sums[""] = f"tiers.{name}.reduction"
        reduction = Reduction(
            bytes_per_second=_float("bytes_per_second", sums),
            latency_s=_float("latency_s", sums, zero=True),
        )
    wires = values.get("wires", "switch")
    if wires not in WIRES:
        raise RequestError(
            f"cluster document: tiers.{name}.wires must be one of {', '.join(WIRES)}, found "
            f"{wires!r}"
        )
    return Tier(
        name=name,
        link=_text("link", values),
        devices=_whole("devices", values) if "devices" in values else None,
        bytes_per_second=_float("bytes_per_second", values),
        latency_s=latency_s,
        bulk_latency_s=(
            _float("bulk_latency_s", values, zero=True) if "bulk_latency_s" in values else latency_s
        ),
        short_share=_float("short_share", values) if "short_share" in values else 1.0,
        devices_per_card=_whole("devices_per_card", values) if "devices_per_card" in values else 1,
        wires=cast(Wires, wires),
        reduction=reduction,
    )


def _reserve(values: Mapping[str, Any]) -> Reserve | None:
    """The parts of the reserve; None where only their sum is given.

    Raises:
        RequestError: a sum beside the parts that is another.
    """
    if "reserve" not in values:
        return None
    parts = _section(values, "reserve")
    names = ("context_bytes", "communication_bytes", "fragmentation_bytes")
    found = Reserve(**{name: _whole(name, parts, zero=True) for name in names})
    total = values.get("reserve_bytes", found.total_bytes)
    if total != found.total_bytes:
        raise RequestError(
            f"cluster document: reserve_bytes is {total!r}, and the parts in reserve add up to "
            f"{found.total_bytes}; leave reserve_bytes out, or make it their sum"
        )
    return found


def _algorithms(values: Mapping[str, Any]) -> tuple[Algorithm, ...]:
    found = values.get("algorithms")
    names = found if isinstance(found, list | tuple) else ()
    strange = any(a not in ALGORITHMS for a in names)
    if strange or not any(a in ("ring", "hierarchical") for a in names):
        raise RequestError(
            "cluster document: algorithms must be a list of what the library of collectives has, "
            f"of {', '.join(ALGORITHMS)}, with ring or hierarchical at least; found {found!r}"
        )
    return tuple(a for a in ALGORITHMS if a in names)


def _library(values: Mapping[str, Any]) -> dict[MessageOp, Library]:
    out: dict[MessageOp, Library] = {}
    for op in _section(values, "library", optional=True):
        if not op:
            continue
        if op not in MESSAGE_OPS:
            raise RequestError(
                f"cluster document: library.{op} is no collective; known: {', '.join(MESSAGE_OPS)}"
            )
        found = _section(values["library"], op)
        found[""] = f"library.{op}"
        out[op] = Library(latency=_float("latency", found, zero=True), bytes=_float("bytes", found))
    return out


def _section(values: Mapping[str, Any], name: str, optional: bool = False) -> dict[str, Any]:
    found = values.get(name, {} if optional else None)
    if not isinstance(found, Mapping):
        raise RequestError(f"cluster document: section {name!r} is missing")
    return {**found, "": name}


def _where(name: str, values: Mapping[str, Any]) -> str:
    section = values.get("", "")
    return f"{section}.{name}" if section else name


def _efficiencies(found: object) -> dict[str, float]:
    if not isinstance(found, Mapping):
        raise RequestError(
            f"device.efficiencies must be a section of shares by dtype, found {found!r}"
        )
    return {str(k): _number(f"device.efficiencies.{k}", v) for k, v in found.items()}


def _number(where: str, value: object, zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"cluster document: {where} must be a number, found {value!r}")
    if value < 0 or (value == 0 and not zero) or value != value:
        raise RequestError(f"cluster document: {where} must be positive, found {value!r}")
    return float(value)


def _float(name: str, values: Mapping[str, Any], zero: bool = False) -> float:
    return _number(_where(name, values), values.get(name), zero)


def _whole(name: str, values: Mapping[str, Any], zero: bool = False) -> int:
    number = _float(name, values, zero)
    if number != int(number):
        raise RequestError(f"cluster document: {_where(name, values)} must be whole")
    return int(number)


def _text(name: str, values: Mapping[str, Any]) -> str:
    found = values.get(name)
    if not isinstance(found, str):
        raise RequestError(f"cluster document: {_where(name, values)} must be a text")
    return found
