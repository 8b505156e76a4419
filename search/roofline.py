"""Seconds of what an operator's kernels do on a device: the law and its constants in one place.

    products     max(operations with what shapes waste / rate, bytes / bandwidth), each
    attention    operations / (share of the peak that attention reaches)
    convolution  operations / (share of the rate)
    the rest     factor x bytes / bandwidth
    and a launch for each kernel

Where the device was measured (``Device.measured``), factors are those of the operator's family;
there, too, work and traffic of convolutions and attention add up, as they do where one core does
both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from autoshard.cluster import Cluster, Device
from autoshard.kernels import Products
from autoshard.measured import BIAS, RANDOM, SCORES, UPDATE, Factor
from autoshard.search.work import CONVOLUTIONS, Pass

Phase = Literal["forward", "backward"]


PRODUCT_DTYPES: Mapping[Products, str] = {
    "tf32": "tf32",
    "fp8": "float8_e4m3fn",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""Name of a device's peak by what products run in."""

CAST_BYTES = 4
"""Bytes moved for each element that is cast for a product below 16 bits: 2 read, 1 written in
rows and 1 in columns (its gradient's product wants it transposed)."""


def pass_seconds(
    cluster: Cluster,
    work: Pass,
    phase: Phase,
    *,
    family: str,
    dtype: str,
    itemsize: int,
    traffic: float,
    products: Products = "native",
    attention: float = 1.0,
    launch_s: float | None = None,
    splits: bool = False,
) -> float:
    """Seconds of one pass of an operator.

    Args:
        cluster: whose device runs it.
        work: what its kernels do.
        phase: forward or backward.
        family: of the operator, for the factor of its memory-bound work.
        dtype: that it computes in.
        itemsize: bytes of an element.
        traffic: factor on memory-bound bytes where the family was not measured.
        products: what products run in, where not in ``dtype``.
        attention: how much faster fused attention is than the device's figures say.
        launch_s: seconds of a launch; None: as the device says.
        splits: whether small products are split along K, as in inference.
    """
    device, measured = cluster.device, cluster.device.measured
    launch_s = device.launch_s if launch_s is None else launch_s
    rate, bandwidth = cluster.flops_per_second(dtype), cluster.copy_bytes_per_second
    kernels, edge = device.kernels, 0.0 if measured is None else measured.edge
    total, bytes_moved = work.launches * launch_s, work.num_bytes
    in_products = rate
    if products != "native" and work.products:
        in_products = cluster.flops_per_second(PRODUCT_DTYPES[products])
        bytes_moved += cast_bytes(work, products)
    for p in work.products:
        flops = kernels.product_flops(p.batch, p.m + edge, p.n + edge, p.k, splits=splits)
        total += max(flops / in_products, p.elements * itemsize / bandwidth)
    attended = attention_seconds(cluster, work, dtype, attention)
    found = None if measured is None else measured.operators.get(family)
    moved = (traffic if found is None else _of(found, phase)) * bytes_moved / bandwidth
    if measured is None:
        return total + max(work.flops / rate + attended, moved)
    if family in CONVOLUTIONS:
        share = measured.convolution if phase == "forward" else measured.convolution_backward
        total += work.flops / (share * rate) + moved
    else:
        total += max(work.flops / rate, moved) + attended
    none = Factor(forward=0.0)
    beside = _of(measured.operators.get(SCORES, none), phase) * work.scores_bytes
    beside += _of(measured.operators.get(RANDOM, none), phase) * work.random_bytes
    return total + beside / bandwidth


def cast_bytes(work: Pass, products: Products) -> float:
    """Bytes moved to write the operand that is new once more in fewer bits."""
    if products in ("native", "tf32") or not work.products:
        return 0.0
    first = work.products[0]
    return float(first.batch * first.m * first.k * CAST_BYTES)


def attention_seconds(cluster: Cluster, work: Pass, dtype: str, gain: float) -> float:
    """Seconds of fused attention; ``gain``: how much faster than the device's figures it is."""
    kernels = cluster.device.kernels
    peak = gain * cluster.flops_per_second(dtype) / cluster.efficiency(dtype)
    forward = work.attention_flops / (kernels.attention * peak)
    return forward + work.attention_backward_flops / (kernels.attention_backward * peak)


def update_seconds(cluster: Cluster, traffic_bytes: float) -> float:
    """Seconds of an optimizer's update of one tensor that needs so much traffic at least."""
    device, measured = cluster.device, cluster.device.measured
    factor = 1.0
    if measured is None:
        launches = CPU_UPDATE_LAUNCHES if device.kind == "cpu" else FUSED_UPDATE_LAUNCHES
    else:
        launches = measured.update_launches
        factor = measured.operators.get(UPDATE, Factor(forward=1.0)).forward
    return factor * traffic_bytes / cluster.copy_bytes_per_second + launches * device.launch_s


def waiting(cluster: Cluster) -> float:
    """Factor on what every device computes, since a step takes as long as the slowest of them."""
    measured = cluster.device.measured
    return 1.0 if measured is None or cluster.devices == 1 else 1.0 + measured.waiting


def replayed_launch_s(device: Device) -> float:
    """Seconds between two kernels of one CUDA graph, which is launched as a whole."""
    return device.launch_s if device.kind == "cpu" else min(device.launch_s, REPLAYED_LAUNCH_S)


def adds_biases(cluster: Cluster) -> bool:
    """Whether a bias is added to a product by an operator of its own."""
    measured = cluster.device.measured
    return measured is not None and BIAS in measured.operators


def _of(factor: Factor, phase: Phase) -> float:
    return factor.forward if phase == "forward" else factor.backward


CPU_UPDATE_LAUNCHES = 12
"""Small operators of one AdamW update of one tensor on a CPU, where torch updates one by one."""

REPLAYED_LAUNCH_S = 0.5e-6
"""Kernels of 2.9 us take 3.4 us each where 20 of them are one CUDA graph (Gray 2019, "Getting
Started with CUDA Graphs", https://developer.nvidia.com/blog/cuda-graphs/)."""

FUSED_UPDATE_LAUNCHES = 0.1
"""The same elsewhere, where torch updates many tensors with one kernel (assumed)."""
