"""From readings to the constants of a device.

Each constant is fitted to the readings that depend on it and on constants that are known already,
by relative errors: launches from the smallest operators, bandwidth from long copies, products,
attention, convolutions, then every family's factor, updates and what a step costs beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import exp, log
from statistics import fmean, median

import numpy as np
from scipy.optimize import least_squares

from autoshard.calibrate.readings import (
    SMALL_BYTES,
    OperatorReading,
    OverlapReading,
    Readings,
    StepReading,
    WaitReading,
)
from autoshard.cluster import Cluster, Device
from autoshard.kernels import Kernels
from autoshard.measured import CUT, RANDOM, SCORES, UPDATE, Factor, Measured
from autoshard.search.roofline import Phase, pass_seconds, update_seconds
from autoshard.search.work import ATTENTION, CONVOLUTIONS, PRODUCTS

MOST_WASTE = 256.0
"""Rows, columns or elements that a product may waste."""

DROPOUT = "autoshard.dropout"
LEAST_FACTOR = 0.02
LEAST_S = 1e-9


def predicted(cluster: Cluster, r: OperatorReading) -> float:
    """What the cost model says of a reading."""
    return pass_seconds(
        cluster,
        r.work,
        r.phase,
        family=r.family,
        dtype=r.dtype,
        itemsize=r.itemsize,
        traffic=1.0,
    )


def fit_device(base: Cluster, found: Readings) -> Device:
    """The device of ``base`` with every figure that the readings tell.

    Args:
        base: a cluster whose device has the right kind, name and memory.
        found: what was measured, means over processes.
    """
    device = replace(
        base.device,
        efficiency=1.0,
        memory_efficiency=1.0,
        memory_bytes_per_second=_bandwidth(found.steps),
        launch_s=_launch(found.operators),
        kernels=Kernels(),
        measured=Measured(),
    )
    cluster = replace(base, device=device)
    for stage in (_products, _random, _attention, _convolutions, _families):
        cluster = stage(cluster, found.operators)
    cluster = _steps(cluster, found.steps, found.overlaps)
    cluster = _measured(cluster, waiting=waiting(found.waits))
    return cluster.device


def _bandwidth(steps: Iterable[StepReading]) -> float:
    copies = [s.num_bytes / s.seconds for s in steps if s.kind == "copy"]
    return median(copies)


def _launch(operators: Iterable[OperatorReading]) -> float:
    small = [
        r.seconds / r.work.launches
        for r in operators
        if r.work.launches and not r.work.products and _traffic(r) < SMALL_BYTES
        if not r.family.endswith(CUT)
    ]
    return median(small)


def _traffic(r: OperatorReading) -> float:
    return r.work.num_bytes + 1e3 * bool(r.work.flops or r.work.attention_flops)


def _with(cluster: Cluster, **fields: object) -> Cluster:
    return replace(cluster, device=replace(cluster.device, **fields))  # type: ignore[arg-type]


def _measured(cluster: Cluster, **fields: object) -> Cluster:
    measured = cluster.device.measured or Measured()
    return _with(cluster, measured=replace(measured, **fields))  # type: ignore[arg-type]


def _products(cluster: Cluster, operators: Sequence[OperatorReading]) -> Cluster:
    """Peak, edge and depth from float32; of other dtypes the peak alone."""
    rows = [r for r in operators if r.family in PRODUCTS]
    first = [r for r in rows if r.dtype == "float32"]
    start = max(_flops(r) / r.seconds for r in first)

    def of(values: Sequence[float]) -> Cluster:
        rate, edge, depth = values
        peaks = {"float32": exp(rate)}
        kernels = replace(cluster.device.kernels, depth=depth)
        return _measured(_with(cluster, peak_flops_per_second=peaks, kernels=kernels), edge=edge)

    bounds = [(log(start) - 2, log(start) + 1), (0.0, MOST_WASTE), (0.0, MOST_WASTE)]
    best = _least(of, first, [log(start), 8.0, 8.0], bounds)
    fitted = of(best)
    peaks = dict(fitted.device.peak_flops_per_second)
    for dtype in sorted({r.dtype for r in rows} - {"float32"}):
        own = [r for r in rows if r.dtype == dtype]
        ratio = _geometric(
            r.seconds / max(LEAST_S, predicted(fitted, replace(r, dtype="float32"))) for r in own
        )
        peaks[dtype] = peaks["float32"] / ratio
    return _with(fitted, peak_flops_per_second=peaks)


def _least(
    of: Callable[[Sequence[float]], Cluster],
    rows: Sequence[OperatorReading],
    start: Sequence[float],
    bounds: Sequence[tuple[float, float]],
) -> list[float]:
    """Values within bounds with the least sum of squared log ratios."""

    def residuals(values: Sequence[float]) -> list[float]:
        cluster = of(values)
        return [log(max(LEAST_S, predicted(cluster, r)) / r.seconds) for r in rows]

    low, high = zip(*bounds, strict=True)
    inside = np.clip(start, np.array(low) + 1e-6, np.array(high) - 1e-6)
    return [float(v) for v in least_squares(residuals, inside, bounds=(low, high)).x]


def _flops(r: OperatorReading) -> float:
    return sum(2.0 * p.batch * p.m * p.n * p.k for p in r.work.products)


def _geometric(values: Iterable[float]) -> float:
    found = [log(max(LEAST_S, v)) for v in values]
    return exp(fmean(found)) if found else 1.0


def _random(cluster: Cluster, operators: Sequence[OperatorReading]) -> Cluster:
    """Dropout whole and cut: what it draws, which is never cut, and what it moves."""
    launch, bandwidth = cluster.device.launch_s, cluster.copy_bytes_per_second
    rows = [
        r
        for r in operators
        if r.family == DROPOUT and r.work.random_bytes and r.work.num_bytes >= SMALL_BYTES
    ]
    if not rows:
        return cluster
    sizes = [(r.work.num_bytes / bandwidth, r.work.random_bytes / bandwidth) for r in rows]
    _, drawn = nonnegative(sizes, [max(LEAST_S, r.seconds - launch) for r in rows])
    return _measured(cluster, operators={RANDOM: Factor(forward=drawn)})


def _attention(cluster: Cluster, operators: Sequence[OperatorReading]) -> Cluster:
    """Shares of the peak without dropout; what the scores cost beside with it."""
    kernels = cluster.device.kernels
    rows = [r for r in operators if r.family == ATTENTION]
    shares: dict[Phase, float] = {}
    for phase in ("forward", "backward"):
        own = [r for r in rows if r.phase == phase and not r.work.scores_bytes]
        if own:
            shares[phase] = 1.0 / _geometric(
                (r.seconds - r.work.launches * cluster.device.launch_s)
                * cluster.flops_per_second(r.dtype)
                / (r.work.attention_flops + r.work.attention_backward_flops)
                for r in own
            )
    known = (cluster.device.measured or Measured()).operators
    free = {**known, ATTENTION: Factor(forward=0.0)}
    cluster = _with(
        cluster,
        kernels=replace(
            kernels,
            attention=min(1.0, shares.get("forward", kernels.attention)),
            attention_backward=min(1.0, shares.get("backward", kernels.attention_backward)),
        ),
    )
    cluster = _measured(cluster, operators=free)
    scores = _factor(cluster, [r for r in rows if r.work.scores_bytes], _scores_bytes)
    return _measured(cluster, operators={**free, SCORES: scores})


def _scores_bytes(r: OperatorReading) -> float:
    return r.work.scores_bytes


def _moved_bytes(r: OperatorReading) -> float:
    return r.work.num_bytes


def _factor(
    cluster: Cluster,
    rows: Sequence[OperatorReading],
    size: Callable[[OperatorReading], float],
) -> Factor:
    """What is left of the seconds after all else, by those of a copy."""
    bandwidth = cluster.copy_bytes_per_second
    out: dict[str, float] = {}
    for phase in ("forward", "backward"):
        own = [r for r in rows if r.phase == phase and size(r) > 0]
        out[phase] = _geometric(
            max(LEAST_FACTOR, (r.seconds - predicted(cluster, r)) * bandwidth / size(r))
            for r in own
        )
    return Factor(**out)


def _convolutions(cluster: Cluster, operators: Sequence[OperatorReading]) -> Cluster:
    """Work and traffic add up: two unknowns a direction, both from 0."""
    rows = [r for r in operators if r.family in CONVOLUTIONS]
    if not rows:
        return cluster
    bandwidth = cluster.copy_bytes_per_second
    shares, factors = {}, {}
    for phase in ("forward", "backward"):
        own = [r for r in rows if r.phase == phase]
        shape = [
            (r.work.flops / cluster.flops_per_second(r.dtype), r.work.num_bytes / bandwidth)
            for r in own
        ]
        left = [max(LEAST_S, r.seconds - r.work.launches * cluster.device.launch_s) for r in own]
        slower, factor = nonnegative(shape, left)
        shares[phase], factors[phase] = 1.0 / max(0.1, slower), factor
    operators_ = dict((cluster.device.measured or Measured()).operators)
    for family in {r.family for r in rows}:
        operators_[family] = Factor(**factors)
    return _measured(
        cluster,
        convolution=shares["forward"],
        convolution_backward=shares["backward"],
        operators=operators_,
    )


def nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """X from 0 with the least sum of squared relative errors of ``rows x = values``."""
    from scipy.optimize import nnls

    scale = np.array(values)
    matrix = np.array(rows, dtype=float) / scale[:, None]
    columns = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    found, _ = nnls(matrix / columns, np.ones(len(scale)))
    return [float(v) for v in found / columns]


def _families(cluster: Cluster, operators: Sequence[OperatorReading]) -> Cluster:
    """Factors of memory-bound families, from those readings that are no mere launch."""
    found = dict((cluster.device.measured or Measured()).operators)
    rows = [
        r
        for r in operators
        if not r.work.products and r.family not in CONVOLUTIONS and r.family != ATTENTION
    ]
    for family in sorted({r.family for r in rows}):
        own = [r for r in rows if r.family == family]
        none = _measured(cluster, operators={**found, family: Factor(forward=0.0)})
        large = [r for r in own if r.work.num_bytes >= SMALL_BYTES] or own
        found[family] = _factor(none, large, _moved_bytes)
    return _measured(cluster, operators=found)


def _steps(
    cluster: Cluster, steps: Sequence[StepReading], overlaps: Sequence[OverlapReading]
) -> Cluster:
    launch, bandwidth = cluster.device.launch_s, cluster.copy_bytes_per_second
    found = dict((cluster.device.measured or Measured()).operators)
    updates = sorted((s for s in steps if s.kind == "update"), key=lambda s: s.num_bytes)
    launches = updates[0].seconds / updates[0].tensors / launch
    large = updates[-1]
    left = large.seconds / large.tensors - launches * launch
    found[UPDATE] = Factor(
        forward=max(LEAST_FACTOR, left * bandwidth / (large.num_bytes / large.tensors))
    )
    copies = [s for s in steps if s.kind == "gradients"]
    beside = [s.seconds - s.launches * launch for s in steps if s.kind == "step"]
    return _measured(
        cluster,
        operators=found,
        update_launches=launches,
        gradient_copies=fmean(
            max(0.0, s.seconds - s.launches * launch) * bandwidth / s.num_bytes for s in copies
        )
        if copies
        else 0.0,
        step_s=max(0.0, fmean(beside)) if beside else 0.0,
        contention=contention(overlaps),
    )


def contention(overlaps: Sequence[OverlapReading]) -> float:
    """Seconds that both together take beyond the longer, by the shorter; from 0 to 1."""
    shares = [
        (o.seconds - max(o.computing_s, o.message_s)) / min(o.computing_s, o.message_s)
        for o in overlaps
    ]
    return min(1.0, max(0.0, fmean(shares))) if shares else 0.0


def waiting(waits: Sequence[WaitReading]) -> float:
    """Seconds waited by those computed; from 0 to 1."""
    if not waits:
        return 0.0
    return min(1.0, sum(w.seconds for w in waits) / sum(w.computing_s for w in waits))


def predicted_step(cluster: Cluster, s: StepReading) -> float:
    """What the cost model says of a reading."""
    measured = cluster.device.measured or Measured()
    launches, bandwidth = s.launches * cluster.device.launch_s, cluster.copy_bytes_per_second
    if s.kind == "update":
        return s.tensors * update_seconds(cluster, s.num_bytes / s.tensors)
    if s.kind == "gradients":
        return launches + measured.gradient_copies * s.num_bytes / bandwidth
    if s.kind == "step":
        return launches + measured.step_s
    return s.num_bytes / bandwidth
