"""A cluster: devices on a hierarchy of tiers, and what work and messages cost there."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from autoshard.cluster.known import preset_document, with_links
from autoshard.cluster.parts import Algorithm, Device, Library, Reserve, Tier
from autoshard.cluster.prices import CollectivePrices
from autoshard.cluster.reading import CLUSTER_VERSION, KIND, read, tier_document
from autoshard.errors import MeshError, RequestError
from autoshard.sharding.collective import MessageOp
from autoshard.sharding.layout import Shape

_FALLBACK_DTYPES = {
    "bfloat16": ("float16", "float32"),
    "float16": ("bfloat16", "float32"),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("bfloat16", "float16", "float32"),
    "mxfp8": ("float8_e4m3fn", "bfloat16", "float16", "float32"),
    "nvfp4": ("mxfp8", "float8_e4m3fn", "bfloat16", "float16", "float32"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices, tiers of links, and the library that sends messages over them.

    Attributes:
        name: preset's or file's name.
        devices: how many there are.
        devices_per_node: how many stand in one machine.
        device: what each of them is.
        tiers: links, inner ones first; each joins units of the one before.
        algorithms: what the library of collectives may choose from.
        collective_s: seconds that starting one collective costs, whatever its size.
        reserve_bytes: memory of a device that no tensor gets.
        reserve: the same in its parts; None where a document tells their sum alone.
        parts: 1; of a part of a cluster that lies across nodes, how many there are, one after
            another: see :meth:`part`.
        sources: where each figure comes from, by dotted field name.
        library: what the library makes of single kinds of collectives; 1 where it is missing.
    """

    name: str
    devices: int
    devices_per_node: int
    device: Device
    tiers: tuple[Tier, ...]
    algorithms: tuple[Algorithm, ...]
    collective_s: float
    reserve_bytes: int
    sources: Mapping[str, str] = field(default_factory=dict)
    library: Mapping[MessageOp, Library] = field(default_factory=dict)
    reserve: Reserve | None = None
    parts: int = 1

    def __post_init__(self) -> None:
        """Check the number of devices, and that the tiers stand in each other."""
        _check_tiers(self.tiers)
        every = self.devices if self.parts == 1 else self.devices * self.parts
        _check_devices(every, self.devices_per_node, self.name)
        most = self.tiers[-1].devices
        if most is not None and every > most:
            raise MeshError(
                f"cluster {self.name} has links for at most {most} devices "
                f"(tier {self.tiers[-1].name}), asked for {self.devices}; use at most {most}"
            )

    @property
    def inside(self) -> Tier:
        """The innermost links."""
        return self.tiers[0]

    @property
    def across(self) -> Tier:
        """The outermost links."""
        return self.tiers[-1]

    @property
    def nodes(self) -> int:
        """How many nodes the devices stand in."""
        return -(-self.devices // self.devices_per_node)

    @property
    def usable_bytes(self) -> int:
        """Memory of one device less the reserve."""
        return self.device.memory_bytes - self.reserve_bytes

    def with_devices(self, devices: int) -> Cluster:
        """The same kind of cluster with another number of devices.

        Raises:
            MeshError: a number that fills no whole nodes; the message lists valid ones.
        """
        if self.device.kind == "cpu" and [t.name for t in self.tiers] == ["node"]:
            return _shared_machine(self, devices)
        return replace(self, devices=devices, parts=1)

    def part(self, count: int) -> Cluster:
        """One of ``count`` equal parts, one after another: what a stage of a pipeline has.

        Where parts lie across nodes, messages inside one cost what they cost in the worst of them,
        while all others send theirs.
        """
        devices, node = self.devices // count, self.devices_per_node
        if devices % node == 0 or node % devices == 0 or self.devices <= node:
            return self.with_devices(devices)  # all parts lie alike
        return replace(self, devices=devices, parts=count)

    def with_tier(self, index: int, tier: Tier) -> Cluster:
        """The same cluster with other links on one tier (0: the innermost; -1: the outermost)."""
        tiers = list(self.tiers)
        tiers[index] = tier
        return replace(self, tiers=tuple(tiers))

    # ---- prices -----------------------------------------------------------------------------

    def flops_per_second(self, dtype: str) -> float:
        """Sustained rate of matrix products in ``dtype``; other dtypes count as float32."""
        name = self._peak(dtype)
        return self.device.peak_flops_per_second[name] * self.efficiency(dtype)

    def efficiency(self, dtype: str) -> float:
        """Share of the peak in ``dtype`` that a large matrix product sustains."""
        return self.device.efficiencies.get(self._peak(dtype), self.device.efficiency)

    def _peak(self, dtype: str) -> str:
        """The dtype whose peak counts for ``dtype``."""
        for name in (dtype, *_FALLBACK_DTYPES.get(dtype, ())):
            if name in self.device.peak_flops_per_second:
                return name
        return "float32"

    @property
    def copy_bytes_per_second(self) -> float:
        """Sustained rate of a long copy (bytes read plus bytes written)."""
        return self.device.memory_bytes_per_second * self.device.memory_efficiency

    def operator_seconds(
        self, flops: float, num_bytes: float, dtype: str, launches: int = 1
    ) -> float:
        """Roofline: ``max(flops / rate, bytes / bandwidth) + launch`` of a local operator."""
        work = max(flops / self.flops_per_second(dtype), num_bytes / self.copy_bytes_per_second)
        return work + launches * self.device.launch_s

    def collective_seconds(self, sizes: Shape) -> CollectivePrices:
        """Prices of messages on a mesh of ``sizes`` that lies row-major on the devices.

        Raises:
            MeshError: the sizes do not multiply to the number of devices.
        """
        if prod(sizes) != self.devices:
            raise MeshError(
                f"mesh {'x'.join(map(str, sizes)) or '1'} has {prod(sizes)} devices, "
                f"cluster {self.name} has {self.devices}; their numbers must agree"
            )
        return CollectivePrices(
            self.tiers,
            self.algorithms,
            self.collective_s,
            self.devices_per_node,
            tuple(sizes),
            self.library,
            self.parts,
        )

    # ---- where one comes from ---------------------------------------------------------------

    @classmethod
    def preset(cls, name: str, devices: int | None = None) -> Cluster:
        """A known cluster with ``devices`` devices (default: one node; ``local``: 4 processes).

        Raises:
            UnknownNameError: no such preset.
            MeshError: a number of devices that cannot be.
        """
        document = preset_document(name)
        if document["device"]["kind"] == "cpu":
            return _local(document, document["devices"] if devices is None else devices)
        cluster = cls.from_json(document)
        return cluster if devices is None else cluster.with_devices(devices)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster from a TOML or JSON file.

        Raises:
            RequestError: no such file, or not a cluster; the message names the field.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise RequestError(f"cannot read cluster {path}: {error.strerror}") from error
        try:
            document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except ValueError as error:
            raise RequestError(f"cluster {path}: {error}") from error
        try:
            return cls.from_json(document)
        except RequestError as error:
            raise RequestError(f"cluster {path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        measured = self.device.measured
        library = {op: {"latency": f.latency, "bytes": f.bytes} for op, f in self.library.items()}
        return {
            "kind": KIND,
            "schema_version": CLUSTER_VERSION,
            "name": self.name,
            "devices": self.devices,
            "devices_per_node": self.devices_per_node,
            "collective_s": self.collective_s,
            "reserve_bytes": self.reserve_bytes,
            **({} if self.reserve is None else {"reserve": asdict(self.reserve)}),
            "algorithms": list(self.algorithms),
            "device": {
                "name": self.device.name,
                "kind": self.device.kind,
                "peak_flops_per_second": dict(self.device.peak_flops_per_second),
                "efficiency": self.device.efficiency,
                "memory_bytes": self.device.memory_bytes,
                "memory_bytes_per_second": self.device.memory_bytes_per_second,
                "memory_efficiency": self.device.memory_efficiency,
                "launch_s": self.device.launch_s,
                "kernels": self.device.kernels.to_json(),
                "efficiencies": dict(self.device.efficiencies),
                **({} if measured is None else {"measured": measured.to_json()}),
            },
            "tiers": {tier.name: tier_document(tier) for tier in self.tiers},
            **({"library": library} if library else {}),
            "sources": dict(self.sources),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Cluster:
        """The cluster that ``to_json`` wrote, or that a person wrote with known links.

        Raises:
            RequestError: not a cluster document; the message names the field.
        """
        found = with_links(document) if isinstance(document, Mapping) else document
        return cls(**read(found))

    def figures(self) -> dict[str, float]:
        """Every figure by dotted field name, as ``sources`` names them."""
        return figures(self.to_json())


def figures(document: Mapping[str, Any]) -> dict[str, float]:
    """Every figure of a cluster document by dotted field name, as ``sources`` names them."""
    out: dict[str, float] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key != "sources":
                    walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif isinstance(value, int | float) and prefix not in ("devices", "schema_version"):
            out[prefix] = value

    walk("", document)
    if "reserve" in document:
        out.pop("reserve_bytes", None)  # the sum of its parts
    return out


def _check_tiers(tiers: tuple[Tier, ...]) -> None:
    for inner, outer in pairwise(tiers):
        if inner.devices is None or (outer.devices is not None and outer.devices % inner.devices):
            raise RequestError(
                f"tier {outer.name} must hold whole units of tier {inner.name}: found "
                f"{outer.devices} devices of {inner.devices}; only the outermost may be unbounded"
            )


def _check_devices(devices: object, per_node: int, name: str) -> None:
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise MeshError(f"cluster {name}: devices must be a whole number from 1, found {devices!r}")
    if devices > per_node and devices % per_node:
        below = devices // per_node * per_node
        raise MeshError(
            f"cluster {name} has nodes of {per_node} devices, so {devices} devices fill no whole "
            f"nodes; use 1 to {per_node}, or a multiple of {per_node} such as {below} or "
            f"{below + per_node}"
        )


def _local(document: Mapping[str, Any], devices: int) -> Cluster:
    """Processes on this machine, which share its cores and its memory."""
    _check_devices(devices, max(1, devices) if isinstance(devices, int) else 1, document["name"])
    values = {k: dict(v) if isinstance(v, Mapping) else v for k, v in document.items()}
    values["devices"] = values["devices_per_node"] = 1
    values["device"]["memory_bytes"] = _machine_bytes()
    values["sources"] = {
        **values["sources"],
        "devices_per_node": "all processes run on this machine",
        "device.memory_bytes": "psutil.virtual_memory().total, divided by the number of processes",
    }
    return _shared_machine(Cluster.from_json(values), devices)


def _machine_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _cores() -> int:
    import psutil

    return int(psutil.cpu_count() or 1)


def _shared_machine(cluster: Cluster, devices: int) -> Cluster:
    """``cluster`` (processes on one machine) with another number of processes.

    A process has one core to itself while there are enough; beyond that all of them share: rates
    fall and what a launch costs rises in proportion. A hop of a message takes what it took before:
    it waits to be woken, not for a core (``autoshard calibrate`` with 2 and 4 processes).
    """
    _check_devices(devices, max(1, devices) if isinstance(devices, int) else 1, cluster.name)
    cores = _cores()
    ratio = min(1.0, cores / devices) / min(1.0, cores / cluster.devices)
    device = cluster.device
    measured = device.measured
    return replace(
        cluster,
        devices=devices,
        devices_per_node=devices,
        device=replace(
            device,
            peak_flops_per_second={k: v * ratio for k, v in device.peak_flops_per_second.items()},
            memory_bytes=device.memory_bytes * cluster.devices // devices,
            memory_bytes_per_second=device.memory_bytes_per_second * ratio,
            launch_s=device.launch_s / ratio,
            measured=measured and replace(measured, step_s=measured.step_s / ratio),
        ),
    )
