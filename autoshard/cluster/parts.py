"""What a cluster is made of: devices, tiers of links, reduction in the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from autoshard.errors import RequestError
from autoshard.kernels import Kernels
from autoshard.measured import Measured

Wires = Literal["switch", "mesh", "ring"]
WIRES: tuple[Wires, ...] = get_args(Wires)
"""How the units of a tier are joined, see :class:`Tier`."""

Algorithm = Literal["ring", "tree", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
"""What a library of collectives may choose from."""


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
        kernels: what shapes do to the rates above.
        efficiencies: shares of the peak by dtype, where another than ``efficiency``.
        measured: what ``autoshard calibrate`` found; None: it was not run there.
    """

    name: str
    kind: str
    peak_flops_per_second: Mapping[str, float]
    efficiency: float
    memory_bytes: int
    memory_bytes_per_second: float
    memory_efficiency: float
    launch_s: float
    kernels: Kernels = field(default_factory=Kernels)
    efficiencies: Mapping[str, float] = field(default_factory=dict)
    measured: Measured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Memory of a device that no tensor gets.

    Attributes:
        context_bytes: what driver, context and loaded kernels take.
        communication_bytes: buffers of the library of collectives.
        fragmentation_bytes: what lies between tensors, and rounding.
    """

    context_bytes: int
    communication_bytes: int
    fragmentation_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.context_bytes + self.communication_bytes + self.fragmentation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Sums made by the switches of a tier (NVLS inside a node, SHARP between nodes).

    Attributes:
        bytes_per_second: of one card while the switch reduces; a member of q moves
            (q + 1) / q of the message each way.
        latency_s: of one all_reduce, all members' agreement to start included.
    """

    bytes_per_second: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What a library makes of one kind of collective, by what the law of its algorithm says.

    Gloo's reduce_scatter, for one, sends as much as an all_reduce.

    Attributes:
        latency: factor on what does not depend on the bytes.
        bytes: factor on what does.
    """

    latency: float = 1.0
    bytes: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Links of one level of the hierarchy: they join units of the level below.

    A library sends a message in one of two ways, whichever is faster: *short* messages carry
    their flags with the data (NCCL's LL and LL128), which wakes the receiver at once and wastes a
    share of the link; *bulk* transfers (NCCL's Simple) fill the link and pay for a handshake at
    each hop.

    Attributes:
        name: ``node``, ``rack``, ``fabric``.
        link: what the links are called.
        devices: how many devices one unit of this tier holds; None: as many as there are.
        bytes_per_second: one direction, of one card (or of the device's own links), bulk.
        latency_s: of one hop, short.
        bulk_latency_s: of one hop, bulk.
        short_share: share of ``bytes_per_second`` that short messages get.
        devices_per_card: devices that share a card; 1 where each has its own.
        wires: ``switch``: any two units reach each other at the full rate; ``mesh``: each pair has
            a link of its own, so q of N units use (q - 1) / (N - 1) of a device's links; ``ring``:
            a ring with links both ways (a dimension of a torus), of which a part of the ring has
            half the rate.
        reduction: what the tier's switches sum, if they do.
    """

    name: str
    link: str
    devices: int | None
    bytes_per_second: float
    latency_s: float
    bulk_latency_s: float
    short_share: float
    devices_per_card: int = 1
    wires: Wires = "switch"
    reduction: Reduction | None = None

    def __post_init__(self) -> None:
        """Check what the prices rely on."""
        if self.wires not in WIRES:
            raise RequestError(
                f"tier {self.name}: wires are {', '.join(WIRES)}; found {self.wires!r}"
            )
        if not 0 < self.short_share <= 1:
            raise RequestError(
                f"tier {self.name}: short_share is a share of bytes_per_second, above 0 and at "
                f"most 1; found {self.short_share!r}"
            )

    @property
    def device_bytes_per_second(self) -> float:
        """What one device gets while all devices of its card send."""
        return self.bytes_per_second / self.devices_per_card
