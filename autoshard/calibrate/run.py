"""All of it: measure on every process, fit, and say how well that went."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import median

import torch

from autoshard.calibrate import messages, operators, steps
from autoshard.calibrate.catalogue import Sizes, catalogue
from autoshard.calibrate.clock import Clock
from autoshard.calibrate.document import toml
from autoshard.calibrate.fit import fit_device, predicted, predicted_step
from autoshard.calibrate.fit_messages import fit_messages, predicted_message
from autoshard.calibrate.messages import Hosts
from autoshard.calibrate.readings import (
    MessageReading,
    OverlapReading,
    Readings,
    WaitReading,
    joined,
)
from autoshard.cluster import Cluster, Device, Tier
from autoshard.errors import MeshError, RequestError
from autoshard.runtime.comm import Communicator
from autoshard.runtime.processes import Pool, Progress, World, current_world, under_launcher
from autoshard.search.work import ATTENTION, CONVOLUTIONS, PRODUCTS
from autoshard.sharding.collective import MESSAGE_OPS

RESERVE_BYTES = 300_000_000
"""A Python process with torch loaded (assumed)."""

FITTED = ("depth", "attention", "attention_backward")
"""What is measured of ``Kernels``; the others have their defaults and no part in the prices."""

OVERLAP_BYTES = (2 << 20, 4 << 20, 8 << 20)
WAITS = 2
COPIES = 3
"""Times that the bandwidth is measured: all memory-bound operators are priced by it."""

GRADIENTS = 16
"""Tensors of a message of fused gradients."""

Say = Callable[[str, int | None, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement beside what the fitted cost model says of it.

    Attributes:
        kind: what it belongs to.
        name: what was measured.
        measured_s: seconds that it took.
        fitted_s: seconds that the cost model says.
    """

    kind: str
    name: str
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """Of the fitted seconds, relative to the measured ones."""
        return self.fitted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration found.

    Attributes:
        cluster: what was measured, with the constants that fit.
        rows: every measurement beside the fit.
        processes: how many measured at the same time.
        hosts: on how many machines.
        seconds: how long it took.
    """

    cluster: Cluster
    rows: tuple[Row, ...]
    processes: int
    hosts: int
    seconds: float

    def kinds(self) -> dict[str, list[Row]]:
        """Rows by kind, in order."""
        out: dict[str, list[Row]] = {}
        for row in self.rows:
            out.setdefault(row.kind, []).append(row)
        return out

    def median_error(self, kind: str | None = None) -> float:
        """Median of the absolute errors of one kind, or of all."""
        return median(abs(r.error) for r in self.rows if kind in (None, r.kind))

    def save(self, path: str | Path) -> None:
        """Write the cluster as TOML."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def to_toml(self) -> str:
        """The cluster file."""
        return toml(self.cluster.to_json(), f"Measured by autoshard calibrate, {_where(self)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where one process stands, and what it found."""

    host: str
    device: str
    kind: str
    memory_bytes: int
    readings: Readings


def calibrate(
    processes: int | None = None,
    *,
    sizes: Sizes | None = None,
    window_s: float = 0.06,
    timeout_s: float = 120.0,
    name: str = "calibrated",
    progress: Say | None = None,
) -> Calibration | None:
    """Measure, fit, and say how well the fit goes.

    In a plain program ``processes`` processes of this machine measure at the same time. Under
    ``torchrun`` the processes that are there do, on as many hosts as they stand on; the result is
    that of rank 0, and None on the others.

    Args:
        processes: how many; None: one for each core, at least two. Not under ``torchrun``.
        sizes: of what is measured.
        window_s: seconds of one window of a measurement.
        timeout_s: limit of the silence of a process, and of a collective.
        name: of the cluster.
        progress: called with what is being done, and how many of how many are.

    Raises:
        RequestError: ``processes`` under ``torchrun``, or a number that cannot be.
        MeshError: hosts with different numbers of processes, or ranks that are no neighbours.
        RankError: a process failed or did not answer.
    """
    import time

    began = time.monotonic()
    say = progress or (lambda text, done, total: None)
    chosen = sizes or Sizes()
    world = current_world(timeout_s) if under_launcher() else None
    if world is None:
        places = _spawned(processes, chosen, window_s, timeout_s, say)
    else:
        if processes not in (None, world.size):
            raise RequestError(
                f"torchrun started {world.size} processes; leave out --processes {processes}"
            )
        comm = Communicator((world.size,), ("world",), timeout_s=timeout_s)
        heard = say if world.rank == 0 else (lambda text, done, total: None)
        places = comm.gathered(_measure(world, chosen, window_s, heard))
        if world.rank:
            return None
    say("fitting", None, None)
    hosts = hosts_of([p.host for p in places])
    found = joined([p.readings for p in places])
    base = _base(name, places[0], hosts)
    device = fit_device(base, found)
    cluster = fit_messages(replace(base, device=device), hosts, found.messages)
    out = Calibration(
        cluster=cluster,
        rows=tuple(_rows(cluster, found)),
        processes=len(places),
        hosts=hosts.count,
        seconds=time.monotonic() - began,
    )
    return replace(out, cluster=replace(cluster, sources=_sources(out)))


def _spawned(
    processes: int | None, sizes: Sizes, window_s: float, timeout_s: float, say: Say
) -> list[_Place]:
    count = max(2, os.cpu_count() or 2) if processes is None else processes
    if isinstance(count, bool) or count < 1:
        raise RequestError(f"--processes must be a whole number from 1, found {processes!r}")

    def heard(rank: int, message: Progress) -> None:
        if rank == 0:
            text, _, place = message.text.partition("\t")
            done, _, total = place.partition("/")
            say(text, int(done) if done else None, int(total) if total else None)

    with Pool(count, timeout_s=timeout_s) as pool:
        return pool.call(
            _measure_in_pool, (sizes, window_s), timeout_s=timeout_s, on_progress=heard
        )


def _measure_in_pool(world: World, sizes: Sizes, window_s: float) -> _Place:
    def say(text: str, done: int | None, total: int | None) -> None:
        world.progress(text if done is None else f"{text}\t{done}/{total}")

    return _measure(world, sizes, window_s, say)


def _measure(world: World, sizes: Sizes, window_s: float, say: Say) -> _Place:
    """One process's part."""
    here = host()
    whole = Communicator((world.size,), ("world",), device=world.device, timeout_s=world.timeout_s)
    several = world.size > 1
    clock = Clock(world.device, whole if several else None, window_s)
    say("reading the operators", None, None)
    if several and world.device.type == "cpu":
        torch.set_num_threads(1)
    calls = list(operators.calls(catalogue(sizes)))
    clock.meet()
    found = []
    for i, call in enumerate(calls):
        say("operators", i, len(calls))
        found += operators.measure(call, clock)
    for dtype in operators.OTHER_DTYPES:
        if dtype == "float16" and world.device.type == "cpu":
            continue
        for call in operators.in_other_dtypes(calls):
            found += operators.measure(call, clock, dtype)
    say("memory, updates, steps", None, None)
    gradient = sizes.update_elements[-1]
    beside = [
        *(steps.copy(clock) for _ in range(COPIES)),
        *(steps.update(clock, n) for n in sizes.update_elements),
        steps.gradients(clock, [gradient // 3] * GRADIENTS),
        steps.step(clock),
    ]
    sent: tuple[MessageReading, ...] = ()
    overlaps: tuple[OverlapReading, ...] = ()
    waits: tuple[WaitReading, ...] = ()
    if several:
        hosts = hosts_of(whole.gathered(here))
        overlaps = _overlaps(clock, whole, sizes)
        waits = tuple(steps.wait(clock, whole) for _ in range(WAITS))
        sent = _messages(world, clock, hosts, sizes, say)
    return _Place(
        host=here,
        device=_device_name(world.device),
        kind=world.device.type,
        memory_bytes=_memory_bytes(world.device),
        readings=Readings(
            operators=tuple(found),
            steps=tuple(beside),
            messages=sent,
            overlaps=overlaps,
            waits=waits,
        ),
    )


def _messages(
    world: World, clock: Clock, hosts: Hosts, sizes: Sizes, say: Say
) -> tuple[MessageReading, ...]:
    """Every kind over every group, small ones first, up to one that is long."""
    plan = [
        (mesh, axes, alone, op, n)
        for mesh, axes, alone in hosts.groups()
        for op in MESSAGE_OPS
        for n in sizes.message_bytes
    ]
    found: list[MessageReading] = []
    comms: dict[tuple[int, ...], Communicator] = {}
    long: set[object] = set()
    for i, (mesh, axes, alone, op, n) in enumerate(plan):
        say("messages", i, len(plan))
        if (mesh, axes, alone, op) in long:
            continue
        if mesh not in comms:
            names = [f"axis{k}" for k in range(len(mesh))]
            comms[mesh] = Communicator(mesh, names, device=world.device, timeout_s=world.timeout_s)
        reading = messages.measure(comms[mesh], axes, op, n, clock, alone=alone)
        if reading is not None:
            found.append(reading)
            if clock.least(reading.seconds) > messages.LONG_S:
                long.add((mesh, axes, alone, op))
    return tuple(found)


def _overlaps(clock: Clock, whole: Communicator, sizes: Sizes) -> tuple[OverlapReading, ...]:
    """Computing beside messages, up to one that is long."""
    found: list[OverlapReading] = []
    for n in OVERLAP_BYTES:
        found.append(steps.overlap(clock, whole, min(n, sizes.message_bytes[-1])))
        if clock.least(found[-1].message_s) > messages.LONG_S:
            break
    return tuple(found)


def host() -> str:
    """Equal for processes between which there is no network: their machine's, and their network's.

    Containers of one machine may have its name, and one boot, but each its own network.
    """
    name = socket.gethostname()
    try:
        return f"{name}, network {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no Linux
        return name


def hosts_of(names: Sequence[str]) -> Hosts:
    """How ranks stand on hosts, by the host's name of each rank.

    Raises:
        MeshError: not the same number on each, or ranks of a host are no neighbours.
    """
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    counts = Counter(names)
    if len(set(counts.values())) > 1:
        there = ", ".join(f"{name}: {n}" for name, n in counts.items())
        raise MeshError(
            f"hosts run different numbers of processes ({there}); start as many on each: "
            "torchrun --nproc-per-node N"
        )
    if len(runs) != len(counts):
        raise MeshError(
            "ranks of one host are not neighbours; start them with torchrun, which numbers them "
            f"host by host (found {', '.join(name for name, _ in runs)})"
        )
    return Hosts(len(runs), runs[0][1])


def _base(name: str, place: _Place, hosts: Hosts) -> Cluster:
    """A cluster of the right shape whose figures are still to be fitted."""
    tier = Tier(
        name="node",
        link="loopback" if place.kind == "cpu" else "links of the node",
        devices=hosts.each if hosts.count > 1 else None,
        bytes_per_second=1e9,
        latency_s=1e-4,
        bulk_latency_s=1e-4,
        short_share=1.0,
    )
    fabric = replace(tier, name="fabric", link="network", devices=None)
    tiers: tuple[Tier, ...] = (tier,)
    if hosts.count > 1:
        tiers = (tier, fabric) if hosts.each > 1 else (fabric,)
    return Cluster(
        name=name,
        devices=hosts.count * hosts.each,
        devices_per_node=hosts.each,
        device=Device(
            name=place.device,
            kind=place.kind,
            peak_flops_per_second={"float32": 1e9},
            efficiency=1.0,
            memory_bytes=place.memory_bytes // (hosts.each if place.kind == "cpu" else 1),
            memory_bytes_per_second=1e9,
            memory_efficiency=1.0,
            launch_s=1e-6,
        ),
        tiers=tiers,
        algorithms=("ring",) if place.kind == "cpu" else ("ring", "tree"),
        collective_s=0.0,
        reserve_bytes=RESERVE_BYTES,
    )


def _rows(cluster: Cluster, found: Readings) -> list[Row]:
    out = []
    for r in found.operators:
        kind = f"products {r.dtype}" if r.family in PRODUCTS else "operators"
        if r.family in CONVOLUTIONS:
            kind = "convolutions"
        elif r.family == ATTENTION:
            kind = "attention"
        fitted = predicted(cluster, r)
        out.append(
            Row(kind=kind, name=f"{r.name} {r.phase}", measured_s=r.seconds, fitted_s=fitted)
        )
    for s in found.steps:
        out.append(
            Row(
                kind="step",
                name=f"{s.kind} {s.num_bytes:,} bytes, {s.tensors} tensors",
                measured_s=s.seconds,
                fitted_s=predicted_step(cluster, s),
            )
        )
    for o in found.overlaps:
        contention = cluster.device.measured.contention if cluster.device.measured else 0.0
        longer, shorter = max(o.computing_s, o.message_s), min(o.computing_s, o.message_s)
        out.append(
            Row(
                kind="step",
                name="computing beside a message",
                measured_s=o.seconds,
                fitted_s=longer + contention * shorter,
            )
        )
    for w in found.waits:
        share = cluster.device.measured.waiting if cluster.device.measured else 0.0
        out.append(
            Row(
                kind="step",
                name=f"waiting for the slowest after {w.computing_s * 1e3:.0f} ms",
                measured_s=w.seconds,
                fitted_s=share * w.computing_s,
            )
        )
    for m in found.messages:
        if not m.alone:
            mesh = " x ".join(map(str, m.mesh))
            axes = ", ".join(map(str, m.axes))
            out.append(
                Row(
                    kind=f"{m.op} on {mesh}, axis {axes}",
                    name=f"{m.num_bytes:,} bytes",
                    measured_s=m.seconds,
                    fitted_s=predicted_message(cluster, m),
                )
            )
    return out


def _where(found: Calibration) -> str:
    on = f"{found.processes} processes"
    if found.hosts > 1:
        on += f" on {found.hosts} hosts"
    return (
        f"{on}, {found.cluster.device.name}, {_cores()} cores, torch {torch.__version__}, "
        f"{datetime.now(UTC):%Y-%m-%d}"
    )


def _sources(found: Calibration) -> dict[str, str]:
    measured = f"measured: autoshard calibrate, {_where(found)}"
    known = {
        "devices_per_node": "processes that measured on each host",
        "reserve_bytes": "assumed: a Python process with torch loaded keeps some 300 MB",
        "device.efficiency": "the peak is what was measured",
        "device.memory_efficiency": "the bandwidth is what was measured",
        "device.memory_bytes": "of this machine, divided by the processes of a host",
    }
    out = {}
    for field in found.cluster.figures():
        section, _, name = field.rpartition(".")
        fixed = section == "device.kernels" and name not in FITTED
        out[field] = known.get(field, "not used: measured factors stand" if fixed else measured)
        if field.endswith((".short_share", ".devices")):
            out[field] = "one protocol" if field.endswith("share") else "processes of a host"
    return out


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _cores() -> int:
    found = getattr(os, "sched_getaffinity", None)
    return len(found(0)) if found else os.cpu_count() or 1


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    import psutil

    return int(psutil.virtual_memory().total)
