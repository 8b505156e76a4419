"""Constants that were put into measurements come out of the fit."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.calibrate import messages
from autoshard.calibrate import run as calibration
from autoshard.calibrate.catalogue import Sizes, catalogue
from autoshard.calibrate.clock import Clock
from autoshard.calibrate.document import toml
from autoshard.calibrate.fit import contention, fit_device, nonnegative, predicted, predicted_step
from autoshard.calibrate.fit_messages import fit_messages, predicted_message
from autoshard.calibrate.messages import Hosts
from autoshard.calibrate.operators import calls
from autoshard.calibrate.readings import (
    MessageReading,
    OperatorReading,
    OverlapReading,
    Readings,
    StepReading,
    WaitReading,
    joined,
)
from autoshard.calibrate.run import host, hosts_of
from autoshard.cluster import Cluster, Device, Library, Tier
from autoshard.errors import MeshError
from autoshard.kernels import Kernels
from autoshard.measured import RANDOM, SCORES, UPDATE, Factor, Measured
from autoshard.search.work import ATTENTION, CONVOLUTIONS, PRODUCTS
from autoshard.sharding.collective import MESSAGE_OPS

TIER = Tier(
    name="node",
    link="link",
    devices=None,
    bytes_per_second=1e9,
    latency_s=1e-4,
    bulk_latency_s=1e-4,
    short_share=1.0,
)


def cluster(
    device: Device, tiers: tuple[Tier, ...] = (TIER,), hosts: Hosts | None = None
) -> Cluster:
    hosts = hosts or Hosts(1, 4)
    return Cluster(
        name="made up",
        devices=hosts.count * hosts.each,
        devices_per_node=hosts.each,
        device=device,
        tiers=tiers,
        algorithms=("ring",),
        collective_s=0.0,
        reserve_bytes=0,
    )


@cache
def empty_readings() -> tuple[OperatorReading, ...]:
    """What would be measured, without seconds."""
    out = []
    for call in calls(catalogue(Sizes())):
        for phase, work in (("forward", call.forward), ("backward", call.backward)):
            out.append(
                OperatorReading(
                    name=call.name,
                    family=call.family,
                    phase=phase,  # type: ignore[arg-type]
                    work=work,
                    dtype="float32",
                    itemsize=4,
                    seconds=1.0,
                )
            )
    return tuple(out)


def families() -> set[str]:
    return {r.family for r in empty_readings()} - PRODUCTS


def device(chance: random.Random) -> Device:
    """A device with constants as they may be."""

    def factor(most: float) -> Factor:
        return Factor(forward=chance.uniform(0.5, most), backward=chance.uniform(0.5, most))

    return Device(
        name="made up",
        kind="cpu",
        peak_flops_per_second={"float32": 10 ** chance.uniform(10, 12)},
        efficiency=1.0,
        memory_bytes=10**9,
        memory_bytes_per_second=10 ** chance.uniform(9.7, 10.7),
        memory_efficiency=1.0,
        launch_s=10 ** chance.uniform(-6, -5.3),
        kernels=Kernels(
            depth=chance.uniform(1, 60),
            attention=chance.uniform(0.1, 0.9),
            attention_backward=chance.uniform(0.1, 0.9),
        ),
        measured=Measured(
            operators={
                **{name: factor(15.0) for name in sorted(families())},
                ATTENTION: Factor(forward=0.0),
                SCORES: factor(50.0),
                RANDOM: Factor(forward=chance.uniform(1, 20)),
                UPDATE: factor(4.0),
            },
            edge=chance.uniform(1, 60),
            convolution=chance.uniform(0.2, 1.5),
            convolution_backward=chance.uniform(0.2, 1.5),
            update_launches=chance.uniform(1, 20),
            step_s=chance.uniform(0, 1e-3),
            gradient_copies=chance.uniform(0.5, 4),
            contention=chance.uniform(0, 1),
            waiting=chance.uniform(0, 0.3),
        ),
    )


STEPS = (
    ("copy", 1 << 25, 1, 0),
    ("update", 8 * 28 * 64, 8, 0),
    ("update", 8 * 28 << 20, 8, 0),
    ("gradients", 1 << 25, 16, 16),
    ("step", 0, 1, 4),
)


@pytest.mark.parametrize("seed", range(4))
def test_a_device_is_found_again(seed: int) -> None:
    chance = random.Random(seed)
    made = device(chance)
    there = cluster(made)
    steps = [
        StepReading(kind=k, num_bytes=n, tensors=t, launches=x, seconds=1.0)  # type: ignore[arg-type]
        for k, n, t, x in STEPS
    ]
    found = fit_device(
        there,
        Readings(
            operators=tuple(
                replace(r, seconds=predicted(there, r) * chance.uniform(0.99, 1.01))
                for r in empty_readings()
                if predicted(there, r)
            ),
            steps=tuple(replace(s, seconds=predicted_step(there, s)) for s in steps),
            overlaps=(
                OverlapReading(
                    computing_s=2.0,
                    message_s=1.0,
                    seconds=2.0 + (made.measured or Measured()).contention,
                ),
            ),
            waits=(
                WaitReading(computing_s=0.04, seconds=0.04 * (made.measured or Measured()).waiting),
            ),
        ),
    )
    fitted = cluster(found)
    assert found.memory_bytes_per_second == pytest.approx(made.memory_bytes_per_second)
    for r in empty_readings():
        right = predicted(there, r)
        if right > 20 * made.launch_s and r.family != "aten.add":
            assert predicted(fitted, r) == pytest.approx(right, rel=0.25), r
    for s in steps:
        right = predicted_step(there, s)
        assert predicted_step(fitted, s) == pytest.approx(right, rel=0.25, abs=2e-5), s
    assert made.measured is not None
    assert found.measured is not None
    assert found.measured.contention == pytest.approx(made.measured.contention)
    assert found.measured.waiting == pytest.approx(made.measured.waiting)
    for name in families() - CONVOLUTIONS - {ATTENTION, "autoshard.dropout"}:
        was, now = made.measured.operators[name], found.measured.operators[name]
        assert now.forward == pytest.approx(was.forward, rel=0.4), name


@settings(max_examples=40, deadline=None)
@given(
    start=st.floats(1e-5, 1e-3),
    hop=st.floats(1e-5, 1e-3),
    rate=st.floats(1e8, 1e11),
    factors=st.lists(st.tuples(st.floats(0.5, 3), st.floats(0.5, 4)), min_size=3, max_size=3),
)
def test_tiers_and_the_library_are_found_again(
    start: float,
    hop: float,
    rate: float,
    factors: list[tuple[float, float]],
) -> None:
    hosts = Hosts(1, 4)
    bare = cluster(Cluster.preset("h100").device, (TIER,), hosts)
    tier = replace(bare.inside, bytes_per_second=rate, latency_s=hop, bulk_latency_s=hop)
    library = {
        op: Library(latency=a, bytes=b)
        for op, (a, b) in zip(("all_gather", "reduce_scatter", "all_to_all"), factors, strict=True)
    }
    made = replace(bare.with_tier(0, tier), collective_s=start, library=library)
    found = fit_messages(bare, hosts, readings(made, hosts))
    for op in MESSAGE_OPS:
        for mesh, axes in (((4,), (0,)), ((2, 2), (0,)), ((2, 2), (1,))):
            for n in (100, 10**5, 10**8):
                right = made.collective_seconds(mesh)(op, axes, n)
                assert found.collective_seconds(mesh)(op, axes, n) == pytest.approx(right, rel=0.01)


def readings(made: Cluster, hosts: Hosts) -> list[MessageReading]:
    out = []
    for mesh, axes, alone in hosts.groups():
        for op in MESSAGE_OPS:
            for n in Sizes().message_bytes:
                row = MessageReading(
                    op=op, mesh=mesh, axes=axes, num_bytes=n, alone=alone, seconds=1.0
                )
                priced = made
                if alone:  # its card to itself
                    tiers = tuple(replace(t, devices_per_card=1) for t in made.tiers)
                    priced = replace(made, tiers=tiers)
                out.append(replace(row, seconds=predicted_message(priced, row)))
    return out


@pytest.mark.parametrize("cards", [1, 2, 4])
def test_two_hosts_have_a_node_and_a_fabric_whose_card_is_shared(cards: int) -> None:
    hosts = Hosts(2, 4)
    node = replace(TIER, devices=4, bytes_per_second=5e9, latency_s=2e-5, bulk_latency_s=2e-5)
    fabric = replace(
        TIER,
        name="fabric",
        bytes_per_second=1e8,
        latency_s=5e-4,
        bulk_latency_s=5e-4,
        devices_per_card=cards,
    )
    made = cluster(Cluster.preset("h100").device, (node, fabric), hosts)
    bare = cluster(made.device, (replace(TIER, devices=4), replace(TIER, name="fabric")), hosts)
    found = fit_messages(bare, hosts, readings(made, hosts))
    assert found.across.devices_per_card == cards
    assert found.across.bytes_per_second == pytest.approx(1e8, rel=0.01)
    assert found.across.latency_s == pytest.approx(5e-4, rel=0.01)
    assert found.inside.bytes_per_second == pytest.approx(5e9, rel=0.01)


def test_a_fit_has_no_negative_constants() -> None:
    assert nonnegative([(1.0, 1.0), (1.0, 2.0)], [2.0, 1.0])[1] == 0.0


def test_contention_is_a_share() -> None:
    hidden = OverlapReading(computing_s=1.0, message_s=0.5, seconds=0.9)
    worse = OverlapReading(computing_s=1.0, message_s=0.5, seconds=2.5)
    half = OverlapReading(computing_s=1.0, message_s=0.5, seconds=1.25)
    assert [contention([o]) for o in (hidden, half, worse)] == [0.0, 0.5, 1.0]
    assert contention([]) == 0.0


def test_processes_count_alike() -> None:
    one = StepReading(kind="copy", num_bytes=1, tensors=1, launches=1, seconds=1.0)
    both = joined(
        [
            Readings(operators=(), steps=(one,)),
            Readings(operators=(), steps=(replace(one, seconds=3.0),)),
        ]
    )
    assert both.steps[0].seconds == 2.0


def test_hosts_hold_neighbouring_ranks() -> None:
    assert hosts_of(["a", "a", "b", "b"]) == Hosts(2, 2)
    assert hosts_of(["a", "b"]) == Hosts(2, 1)
    with pytest.raises(MeshError, match=r"different numbers of processes \(a: 2, b: 1\)"):
        hosts_of(["a", "a", "b"])
    with pytest.raises(MeshError, match="not neighbours"):
        hosts_of(["a", "b", "a", "b"])


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a network of one's own needs root"
)
def test_containers_of_one_machine_are_hosts_by_themselves() -> None:
    # They may have the machine's name: told apart by it, a slow link between them was not seen.
    program = [sys.executable, "-c", "from autoshard.calibrate.run import host; print(host())"]

    def named(*prefix: str) -> str:
        done = subprocess.run(
            [*prefix, *program], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    assert named() == f"{host()}\n"
    assert named("unshare", "--net") != f"{host()}\n"


@pytest.mark.parametrize(("seconds", "calls"), [(1e-3, 2 + 3 * 60), (0.05, 2 + 3 * 2), (9.0, 5)])
def test_a_window_holds_calls_of_its_length_and_one_that_is_longer(
    monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int
) -> None:
    now, called = [0.0], 0

    def call() -> None:
        nonlocal called
        called += 1
        now[0] += seconds

    monkeypatch.setattr(Clock, "now", lambda clock: now[0])
    assert Clock(torch.device("cpu"), None, 0.0605).seconds(call) == pytest.approx(seconds)
    assert called == calls


def test_a_calibrated_document_is_read_as_it_was_written() -> None:
    measured = Measured(operators={"aten.tanh": Factor(forward=5.0, backward=1.25)}, edge=3.0)
    device = replace(Cluster.preset("h100").device, measured=measured)
    library = {"reduce_scatter": Library(latency=2.0, bytes=3.0)}
    made = replace(cluster(device), library=library, sources={"collective_s": "none at all"})  # type: ignore[arg-type]
    assert Cluster.from_json(json.loads(json.dumps(made.to_json()))) == made
    text = toml(made.to_json(), "A title")
    assert Cluster.from_json(tomllib.loads(text)) == made
    assert text.startswith("# A title\n")


def test_each_cold_call_finds_swept_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    swept, found = [False], []

    def sweep(clock: Clock) -> None:
        swept[0] = True

    def call() -> None:
        found.append(swept[0])
        swept[0] = False

    monkeypatch.setattr(Clock, "sweep", sweep)
    assert Clock(torch.device("cpu"), None, 1e-4).cold(call) >= 0
    assert found
    assert all(found)


def test_a_message_that_took_long_is_not_measured_in_larger_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    def measure(
        comm: object, axes: tuple[int, ...], op: str, n: int, clock: Clock, *, alone: bool
    ) -> MessageReading:
        asked.append((op, n))
        seconds = 2 * messages.LONG_S if op == "all_gather" and n >= 1 << 16 else 1e-3
        return MessageReading(op=op, mesh=(1, 2), axes=axes, num_bytes=n, seconds=seconds)  # type: ignore[arg-type]

    monkeypatch.setattr(messages, "measure", measure)
    monkeypatch.setattr(calibration, "Communicator", lambda *_, **__: None)
    world = SimpleNamespace(device=torch.device("cpu"), timeout_s=1.0)
    sizes = Sizes()
    found = calibration._messages(
        world,  # type: ignore[arg-type]
        Clock(torch.device("cpu")),
        Hosts(1, 2),
        sizes,
        lambda text, done, total: None,
    )
    assert len(found) == len(asked)
    assert [n for op, n in asked if op == "all_gather"] == [1 << 10, 1 << 16]
    assert [n for op, n in asked if op == "all_reduce"] == list(sizes.message_bytes)
