"""Free constants of the cost model, as a fit over published runs sees them.

Each has a meaning and belongs to a type of device, or to all; none to a publisher or a row. What
runs cannot identify is not here: launches, latencies, bandwidths, contention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.cluster import Device

V100 = ("V100",)
A100 = ("A100",)
H100 = ("H100", "H200")
BLACKWELL = ("B200", "GB200", "GB300")
ALL = (*V100, *A100, *H100, *BLACKWELL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """One constant.

    Attributes:
        name: for people.
        meaning: what it is, physically.
        devices: beginnings of the devices' names that it applies to.
        field: ``efficiency``, ``efficiencies.tf32`` or ``kernels.waste``.
        prior: what is expected before any run is seen.
        spread: by which factor that may well be off.
    """

    name: str
    meaning: str
    devices: tuple[str, ...]
    field: str
    prior: float
    spread: float = 1.15


FREE = (
    Free(
        name="V100, 16 bits",
        meaning="share of the peak that large products sustain",
        devices=V100,
        field="efficiency",
        prior=0.83,
    ),
    Free(
        name="V100, float32",
        meaning="share of the peak that large products sustain",
        devices=V100,
        field="efficiencies.float32",
        prior=0.9,
        spread=1.05,
    ),
    Free(
        name="A100, 16 bits",
        meaning="share of the peak that large products sustain; 0.87 was measured",
        devices=A100,
        field="efficiency",
        prior=0.83,
    ),
    Free(
        name="A100, TF32",
        meaning="share of the peak that large products sustain",
        devices=A100,
        field="efficiencies.tf32",
        prior=0.83,
    ),
    Free(
        name="H100, 16 bits",
        meaning="share of the peak that large products sustain; 0.80 was measured",
        devices=H100,
        field="efficiency",
        prior=0.73,
    ),
    Free(
        name="H100, FP8",
        meaning="share of the peak that large products sustain",
        devices=H100,
        field="efficiencies.float8_e4m3fn",
        prior=0.75,
    ),
    Free(
        name="Blackwell, 16 bits",
        meaning="share of the peak that large products sustain; 0.73 was measured",
        devices=BLACKWELL,
        field="efficiency",
        prior=0.6,
    ),
    Free(
        name="Blackwell, FP8",
        meaning="share of the peak that large products sustain",
        devices=BLACKWELL,
        field="efficiencies.float8_e4m3fn",
        prior=0.65,
    ),
    Free(
        name="Blackwell, MXFP8",
        meaning="share of the peak that large products sustain",
        devices=BLACKWELL,
        field="efficiencies.mxfp8",
        prior=0.55,
    ),
    Free(
        name="Blackwell, NVFP4",
        meaning="share of the peak that large products sustain",
        devices=BLACKWELL,
        field="efficiencies.nvfp4",
        prior=0.5,
    ),
    Free(
        name="attention on A100",
        meaning="share of the peak that fused attention sustains, forward and backward",
        devices=(*V100, *A100),
        field="kernels.attention",
        prior=0.35,
        spread=1.15,
    ),
    Free(
        name="attention on H100",
        meaning="share of the peak that fused attention of frameworks sustains, both ways",
        devices=(*H100, *BLACKWELL),
        field="kernels.attention",
        prior=0.2,
        spread=1.15,
    ),
    Free(
        name="vendor's attention on H100",
        meaning="how much faster the vendor's own kernels are",
        devices=H100,
        field="kernels.vendor_attention",
        prior=2.5,
        spread=1.3,
    ),
    Free(
        name="vendor's attention on Blackwell",
        meaning="how much faster the vendor's own kernels are",
        devices=BLACKWELL,
        field="kernels.vendor_attention",
        prior=2.5,
        spread=1.3,
    ),
    Free(
        name="waste of waves",
        meaning="share of a wave of tiles that is lost at the end of a product",
        devices=ALL,
        field="kernels.waste",
        prior=0.46,
        spread=1.3,
    ),
    Free(
        name="depth of products",
        meaning="elements of the inner dimension that filling and draining the pipeline cost",
        devices=ALL,
        field="kernels.depth",
        prior=72,
        spread=1.3,
    ),
    Free(
        name="traffic, eager",
        meaning="bytes moved by those counted, operators one by one",
        devices=ALL,
        field="kernels.eager",
        prior=1.5,
        spread=1.4,
    ),
    Free(
        name="traffic, autocast",
        meaning="bytes moved by those counted, with casts around norms and losses",
        devices=ALL,
        field="kernels.autocast",
        prior=2.5,
        spread=1.4,
    ),
    Free(
        name="traffic, fused",
        meaning="bytes moved by those counted, operators between products fused",
        devices=ALL,
        field="kernels.fused",
        prior=0.8,
        spread=1.4,
    ),
    Free(
        name="traffic of scores",
        meaning="bytes moved by those counted, softmax, mask and dropout of attention scores",
        devices=ALL,
        field="kernels.scores",
        prior=1.0,
        spread=1.3,
    ),
)
"""The free constants; a product of the priors' errors is what a fit pays for leaving them."""


def with_constants(device: Device, values: Sequence[float], free: Sequence[Free] = FREE) -> Device:
    """The device with these values of the free constants that apply to it."""
    own: dict[str, float] = {}
    kernels: dict[str, float] = {}
    shares: dict[str, float] = dict(device.efficiencies)
    for constant, value in zip(free, values, strict=True):
        if not any(device.name.startswith(d) for d in constant.devices):
            continue
        section, _, name = constant.field.partition(".")
        if section == "kernels":
            kernels[name] = value
        elif section == "efficiencies":
            shares[name] = value
        else:
            own[section] = value
    if "attention" in kernels:
        kernels["attention_backward"] = kernels["attention"]
    return replace(
        device,
        **own,  # type: ignore[arg-type]  # names of numbers
        efficiencies=shares,
        kernels=replace(device.kernels, **kernels),
    )
