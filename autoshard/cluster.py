"""Devices and the links between them, and what an operator or a collective costs there.

A :class:`Cluster` is a hierarchy of two tiers: devices inside a node, and nodes on a fabric. A mesh
lies on it row-major, the last axis nearest, so each mesh axis crosses a tier or stays inside a
node; :meth:`Cluster.collective_seconds` prices what the axis really crosses. All units are SI; each
figure names its source (``sources``, by dotted field name).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from math import ceil, log2, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import MeshError, RequestError, UnknownNameError
from autoshard.sharding.collective import CollectiveOp
from autoshard.sharding.layout import Shape

CLUSTER_VERSION = 1

ALIASES: Mapping[str, str] = {"a100": "a100-80"}
"""Other names of presets."""

_FALLBACK_DTYPES = {
    "bfloat16": ("float16", "float32"),
    "float16": ("bfloat16", "float32"),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("bfloat16", "float16", "float32"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        name: as the vendor calls it.
        kind: ``cuda``, ``cpu``, or what torch calls the accelerator.
        peak_flops_per_second: by dtype, dense, as the data sheet says (or as measured).
        efficiency: share of the peak that a large matrix product sustains.
        memory_bytes: of one device.
        memory_bytes_per_second: peak of its memory.
        memory_efficiency: share of that which a long copy sustains.
        launch_s: least seconds of one operator, launch included.
    """

    name: str
    kind: str
    peak_flops_per_second: Mapping[str, float]
    efficiency: float
    memory_bytes: int
    memory_bytes_per_second: float
    memory_efficiency: float
    launch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Links of one level of the hierarchy.

    Attributes:
        name: ``node`` or ``fabric``, or the link's own name.
        bytes_per_second: one direction, of one card (or of the device's own link).
        devices_per_card: devices that share a card; 1 where each has its own.
        latency_s: of one hop.
    """

    name: str
    bytes_per_second: float
    latency_s: float
    devices_per_card: int = 1

    @property
    def device_bytes_per_second(self) -> float:
        """What one device gets while all devices of its node send."""
        return self.bytes_per_second / self.devices_per_card


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices, nodes and links; see the module's docstring.

    Attributes:
        name: preset's or file's name.
        devices: how many there are.
        devices_per_node: how many share the inner tier.
        device: what each of them is.
        inside: links inside a node.
        across: links between nodes.
        collective_s: seconds that starting one collective costs, whatever its size.
        reserve_bytes: memory of a device that no tensor gets: context, communication buffers,
            fragmentation.
        sources: where each figure comes from, by dotted field name.
    """

    name: str
    devices: int
    devices_per_node: int
    device: Device
    inside: Tier
    across: Tier
    collective_s: float
    reserve_bytes: int
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the device count."""
        _check_devices(self.devices, self.devices_per_node, self.name)

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
        if self.device.kind == "cpu" and self.across == self.inside:
            return _shared_machine(self, devices)
        return replace(self, devices=devices)

    # ---- prices -----------------------------------------------------------------------------

    def flops_per_second(self, dtype: str) -> float:
        """Sustained rate of matrix products in ``dtype``; other dtypes count as float32."""
        peaks = self.device.peak_flops_per_second
        for name in (dtype, *_FALLBACK_DTYPES.get(dtype, ())):
            if name in peaks:
                return peaks[name] * self.device.efficiency
        return peaks["float32"] * self.device.efficiency

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
        """Prices of collectives on a mesh of ``sizes`` that lies row-major on the devices.

        Raises:
            MeshError: the sizes do not multiply to the number of devices.
        """
        if prod(sizes) != self.devices:
            raise MeshError(
                f"mesh {'x'.join(map(str, sizes)) or '1'} has {prod(sizes)} devices, "
                f"cluster {self.name} has {self.devices}; their numbers must agree"
            )
        return CollectivePrices(self, tuple(sizes))

    # ---- where one comes from ---------------------------------------------------------------

    @classmethod
    def preset(cls, name: str, devices: int | None = None) -> Cluster:
        """A known cluster with ``devices`` devices (default: one node; ``local``: 4 processes).

        Raises:
            UnknownNameError: no such preset.
            MeshError: a number of devices that cannot be.
        """
        key = ALIASES.get(name, name)
        if key not in presets():
            raise UnknownNameError("cluster preset", name, [*presets(), *ALIASES])
        text = (resources.files("autoshard.clusters") / f"{key}.toml").read_text(encoding="utf-8")
        document = tomllib.loads(text)
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
        return {
            "kind": "autoshard.cluster",
            "schema_version": CLUSTER_VERSION,
            "name": self.name,
            "devices": self.devices,
            "devices_per_node": self.devices_per_node,
            "collective_s": self.collective_s,
            "reserve_bytes": self.reserve_bytes,
            "device": {
                "name": self.device.name,
                "kind": self.device.kind,
                "peak_flops_per_second": dict(self.device.peak_flops_per_second),
                "efficiency": self.device.efficiency,
                "memory_bytes": self.device.memory_bytes,
                "memory_bytes_per_second": self.device.memory_bytes_per_second,
                "memory_efficiency": self.device.memory_efficiency,
                "launch_s": self.device.launch_s,
            },
            "inside": _tier_json(self.inside),
            "across": _tier_json(self.across),
            "sources": dict(self.sources),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Cluster:
        """The cluster that ``to_json`` wrote.

        Raises:
            RequestError: not a cluster document; the message names the field.
        """
        if not isinstance(document, Mapping) or document.get("kind") != "autoshard.cluster":
            raise RequestError("not a cluster document: its 'kind' is not 'autoshard.cluster'")
        if document.get("schema_version") != CLUSTER_VERSION:
            raise RequestError(
                f"cluster document of version {document.get('schema_version')!r}; "
                f"this autoshard reads version {CLUSTER_VERSION}"
            )
        values = {k: v for k, v in document.items() if k not in ("kind", "schema_version")}
        device = _section(values, "device")
        peaks = device.pop("peak_flops_per_second", None)
        if not isinstance(peaks, Mapping) or "float32" not in peaks:
            raise RequestError("device.peak_flops_per_second needs a figure for float32 at least")
        checked_peaks = {
            str(k): _number("device.peak_flops_per_second", v) for k, v in peaks.items()
        }
        return cls(
            name=_text("name", values),
            devices=_whole("devices", values),
            devices_per_node=_whole("devices_per_node", values),
            collective_s=_float("collective_s", values, zero=True),
            reserve_bytes=_whole("reserve_bytes", values, zero=True),
            device=Device(
                name=_text("name", device),
                kind=_text("kind", device),
                peak_flops_per_second=checked_peaks,
                efficiency=_float("efficiency", device),
                memory_bytes=_whole("memory_bytes", device),
                memory_bytes_per_second=_float("memory_bytes_per_second", device),
                memory_efficiency=_float("memory_efficiency", device),
                launch_s=_float("launch_s", device, zero=True),
            ),
            inside=_tier(_section(values, "inside")),
            across=_tier(_section(values, "across")),
            sources={
                str(k): str(v) for k, v in _section(values, "sources", optional=True).items() if k
            },
        )

    def figures(self) -> dict[str, float]:
        """Every figure by dotted field name, as ``sources`` names them."""
        out: dict[str, float] = {}

        def walk(prefix: str, value: Any) -> None:
            if isinstance(value, Mapping):
                for key, inner in value.items():
                    if key != "sources":
                        walk(f"{prefix}.{key}" if prefix else str(key), inner)
            elif isinstance(value, int | float) and prefix not in ("devices", "schema_version"):
                out[prefix] = value

        walk("", self.to_json())
        return out


def presets() -> tuple[str, ...]:
    """Names of the known clusters, sorted."""
    folder = resources.files("autoshard.clusters")
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(n.removesuffix(".toml") for n in names if n.endswith(".toml")))


class CollectivePrices:
    """Seconds of one collective on a mesh, a ``sharding.collective.CollectiveSeconds``.

    For a group of p devices, of which m share a node and k = p / m nodes take part, n bytes, hop
    latencies a (inside) and A (across), bytes per second b and B of one device on each tier
    (algorithms of NCCL's and HCCL's published notes; the least is taken, as the libraries do)::

        ring       steps * (share of hops inside * a + across * A) + steps * n / p / min(b, m B)
                   steps = p - 1 for all_gather and reduce_scatter, 2 (p - 1) for all_reduce
        tree       all_reduce: 2 ((m - 1) a + ceil(log2 k) A) + 2 n / min(b, m B)
        sequence   reduce_scatter inside (m), all_reduce across (k) of n / m, all_gather inside;
                   for all_gather and reduce_scatter the one half of it
        pairwise   all_to_all: (m - 1) a + (p - m) A
                   + max((m - 1) n / p / b, (p - m) n / p / B)

    All groups of an axis communicate at once, so a device never gets more than its share B of the
    cards; a ring of m members in a node leaves it over m shares.
    """

    def __init__(self, cluster: Cluster, sizes: Shape) -> None:
        self.cluster, self.sizes = cluster, sizes
        self._lines: dict[tuple[str, tuple[int, ...]], tuple[tuple[float, float], ...]] = {}

    def __call__(self, op: CollectiveOp, axes: tuple[int, ...], num_bytes: int) -> float:
        """Seconds of ``op`` over ``axes`` with ``num_bytes`` as ``Collective`` counts them."""
        lines = self._lines.get((op, axes)) or self.lines(op, axes)
        return min(a + num_bytes * b for a, b in lines)

    def many(
        self, op: CollectiveOp, axes: tuple[int, ...], num_bytes: NDArray[np.int64]
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
        members = prod(self.sizes[a] for a in axes)
        ranks = np.arange(prod(self.sizes)).reshape(self.sizes)
        groups = np.moveaxis(ranks, axes, range(len(axes))).reshape(members, -1)
        of_node = np.sort(groups // self.cluster.devices_per_node, axis=0)
        nodes = int((np.diff(of_node, axis=0) > 0).sum(axis=0).max(initial=0)) + 1
        return members, max(1, members // nodes), nodes

    def lines(self, op: str, axes: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """(latency, seconds per byte) of each algorithm."""
        key = (op, tuple(axes))
        if key not in self._lines:
            p, m, k = self.group(key[1])
            self._lines[key] = ((0.0, 0.0),) if p == 1 else self._algorithms(op, p, m, k)
        return self._lines[key]

    def _algorithms(self, op: str, p: int, m: int, k: int) -> tuple[tuple[float, float], ...]:
        inside, across = self.cluster.inside, self.cluster.across
        base, near, far = self.cluster.collective_s, inside.latency_s, across.latency_s
        inner = 1 / inside.device_bytes_per_second
        outer = 1 / across.device_bytes_per_second if k > 1 else 0.0
        ring = max(inner, outer / m) if m > 1 else outer or inner
        if op == "all_to_all":
            bandwidth = max((m - 1) / p * inner, (p - m) / p * outer)
            return ((base + (m - 1) * near + (p - m) * far, bandwidth),)
        passes = 2 if op == "all_reduce" else 1
        hops = (p - k) / p * near + k / p * far if k > 1 else near
        steps = passes * (p - 1)
        found = [(base + steps * hops, passes * (p - 1) / p * ring)]
        if op == "all_reduce":
            latency = 2 * ((m - 1) * near + ceil(log2(k)) * far)
            found.append((base + latency, 2 * ring))
        if m > 1 and k > 1:
            latency = passes * ((m - 1) * near + (k - 1) * far)
            bandwidth = passes * ((m - 1) / m * inner + (k - 1) / k / m * outer)
            found.append((base + latency, bandwidth))
        return tuple(found)


# ---- reading ----------------------------------------------------------------------------------


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
    fall and what a launch costs rises in proportion. Each hop of a message then waits for a core
    twice, to be sent and to be received: 4 processes on 2 cores measured 0.6 to 1 ms a hop against
    0.15 ms (``python -m benchmarks.local_constants 4``).
    """
    _check_devices(devices, max(1, devices) if isinstance(devices, int) else 1, cluster.name)
    cores = _cores()
    ratio = min(1.0, cores / devices) / min(1.0, cores / cluster.devices)
    device = cluster.device
    memory = device.memory_bytes * cluster.devices // devices
    link = replace(cluster.inside, latency_s=cluster.inside.latency_s / ratio**2)
    return replace(
        cluster,
        inside=link,
        across=link,
        devices=devices,
        devices_per_node=devices,
        device=replace(
            device,
            peak_flops_per_second={k: v * ratio for k, v in device.peak_flops_per_second.items()},
            memory_bytes=memory,
            memory_bytes_per_second=device.memory_bytes_per_second * ratio,
            launch_s=device.launch_s / ratio,
        ),
    )


def _section(values: Mapping[str, Any], name: str, optional: bool = False) -> dict[str, Any]:
    found = values.get(name, {} if optional else None)
    if not isinstance(found, Mapping):
        raise RequestError(f"cluster document: section {name!r} is missing")
    return {**found, "": name}


def _where(name: str, values: Mapping[str, Any]) -> str:
    section = values.get("", "")
    return f"{section}.{name}" if section else name


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


def _tier(values: Mapping[str, Any]) -> Tier:
    return Tier(
        name=_text("name", values),
        bytes_per_second=_float("bytes_per_second", values),
        latency_s=_float("latency_s", values, zero=True),
        devices_per_card=_whole("devices_per_card", values) if "devices_per_card" in values else 1,
    )


def _tier_json(tier: Tier) -> dict[str, Any]:
    return {
        "name": tier.name,
        "bytes_per_second": tier.bytes_per_second,
        "latency_s": tier.latency_s,
        "devices_per_card": tier.devices_per_card,
    }
