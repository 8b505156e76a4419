"""Prices of messages: laws that hold on every cluster, and figures that were worked by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster import ALGORITHMS, WIRES, Cluster, Library, Reduction, Tier, presets

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
BASE = Cluster.preset("h100")
ALIKE = ("bytes_per_second", "latency_s", "bulk_latency_s", "short_share", "reduction")


def seconds(cluster: Cluster, mesh: tuple[int, ...], op: str, axes: Any, size: int) -> float:
    return cluster.collective_seconds(mesh)(op, tuple(axes), size)  # type: ignore[arg-type]


@st.composite
def figures(draw: st.DrawFn) -> dict[str, Any]:
    latency = draw(st.floats(0, 1e-4))
    rate = draw(st.floats(1e8, 1e12))
    sums = st.builds(
        lambda share, wait: Reduction(bytes_per_second=rate * share, latency_s=wait),
        st.floats(0.2, 1.0),
        st.floats(0, 1e-3),
    )
    return {
        "bytes_per_second": rate,
        "latency_s": latency,
        "bulk_latency_s": latency * draw(st.floats(1, 20)),
        "short_share": draw(st.floats(0.05, 1.0)),
        "reduction": draw(st.none() | sums),
    }


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Up to four tiers of 2 or 4 units, with any figures."""
    devices, tiers = 1, []
    for i in range(draw(st.integers(1, 4))):
        devices *= draw(st.sampled_from([2, 4]))
        tiers.append(
            Tier(
                name=f"tier{i}",
                link="link",
                devices=devices,
                devices_per_card=draw(st.sampled_from([1, 2])),
                wires=draw(st.sampled_from(WIRES)),
                **draw(figures()),
            )
        )
    return replace(
        BASE,
        name="drawn",
        devices=devices,
        devices_per_node=tiers[0].devices or devices,
        tiers=tuple(tiers),
        algorithms=tuple(draw(st.sampled_from([ALGORITHMS, ("ring",), ("ring", "tree")]))),
        collective_s=draw(st.floats(0, 1e-4)),
    )


@st.composite
def placed(draw: st.DrawFn) -> tuple[Cluster, tuple[int, ...], tuple[int, ...]]:
    """A cluster, a mesh on it, and axes."""
    cluster = draw(clusters())
    mesh, left = [], cluster.devices
    while left > 1:
        size = draw(st.sampled_from([n for n in (2, 4, 8, 16) if left % n == 0]))
        mesh.append(size)
        left //= size
    chosen = draw(st.sets(st.sampled_from(range(len(mesh))), min_size=1))
    return cluster, tuple(mesh), tuple(sorted(chosen))


SIZES = st.integers(0, 1 << 36)
SLACK = 1 + 1e-9


@settings(max_examples=60, deadline=None)
@given(where=placed(), op=st.sampled_from(OPS), sizes=st.tuples(SIZES, SIZES))
def test_more_bytes_never_cost_less(where: Any, op: str, sizes: tuple[int, int]) -> None:
    cluster, mesh, axes = where
    small, large = sorted(sizes)
    assert seconds(cluster, mesh, op, axes, small) <= seconds(cluster, mesh, op, axes, large)


SLOWER = {
    "latency_s": lambda tier, factor: replace(tier, latency_s=tier.latency_s * factor),
    "bulk_latency_s": lambda tier, factor: replace(
        tier, bulk_latency_s=tier.bulk_latency_s * factor
    ),
    "bytes_per_second": lambda tier, factor: replace(
        tier, bytes_per_second=tier.bytes_per_second / factor
    ),
    "short_share": lambda tier, factor: replace(tier, short_share=tier.short_share / factor),
    "reduction": lambda tier, factor: replace(
        tier,
        reduction=tier.reduction
        and Reduction(
            bytes_per_second=tier.reduction.bytes_per_second / factor,
            latency_s=tier.reduction.latency_s * factor,
        ),
    ),
}


@settings(max_examples=120, deadline=None)
@given(
    where=placed(),
    op=st.sampled_from(OPS),
    size=SIZES,
    field=st.sampled_from(sorted(SLOWER)),
    factor=st.floats(1, 100),
    index=st.integers(0, 3),
)
def test_slower_links_never_cost_less(
    where: Any, op: str, size: int, field: str, factor: float, index: int
) -> None:
    cluster, mesh, axes = where
    index %= len(cluster.tiers)
    slow = cluster.with_tier(index, SLOWER[field](cluster.tiers[index], factor))
    before = seconds(cluster, mesh, op, axes, size)
    assert before <= seconds(slow, mesh, op, axes, size) * SLACK
    late = replace(cluster, collective_s=cluster.collective_s * factor)
    assert before <= seconds(late, mesh, op, axes, size) * SLACK


@settings(max_examples=60, deadline=None)
@given(where=placed(), op=st.sampled_from(OPS), size=SIZES, same=figures())
def test_equal_tiers_cost_what_one_flat_tier_does(
    where: Any, op: str, size: int, same: dict[str, Any]
) -> None:
    cluster, mesh, axes = where
    alike = {**same, "wires": "switch", "devices_per_card": 1}
    many = replace(cluster, tiers=tuple(replace(t, **alike) for t in cluster.tiers))
    flat = replace(cluster, tiers=(replace(cluster.across, **alike),))
    assert seconds(many, mesh, op, axes, size) == pytest.approx(
        seconds(flat, mesh, op, axes, size), rel=1e-9
    )


@settings(max_examples=30, deadline=None)
@given(where=placed(), op=st.sampled_from(OPS), size=SIZES)
def test_a_group_of_one_costs_nothing(where: Any, op: str, size: int) -> None:
    cluster, mesh, _ = where
    assert seconds(cluster, (*mesh, 1), op, (len(mesh),), size) == 0.0


@settings(max_examples=30, deadline=None)
@given(where=placed(), op=st.sampled_from(OPS), sizes=st.lists(SIZES, min_size=1, max_size=9))
def test_arrays_of_sizes_cost_what_single_ones_do(where: Any, op: str, sizes: list[int]) -> None:
    cluster, mesh, axes = where
    prices = cluster.collective_seconds(mesh)
    found = prices.many(op, axes, np.array(sizes))
    assert found.tolist() == [prices(op, axes, n) for n in sizes]


@settings(max_examples=30, deadline=None)
@given(where=placed(), op=st.sampled_from(OPS), size=SIZES)
def test_only_lines_that_are_the_least_somewhere_are_kept(where: Any, op: str, size: int) -> None:
    cluster, mesh, axes = where
    lines = cluster.collective_seconds(mesh).lines(op, axes)
    assert list(lines) == sorted(lines)
    slopes = [slope for _, slope in lines]
    assert slopes == sorted(slopes, reverse=True)
    assert len(set(slopes)) == len(slopes)
    crossings = [(b[0] - a[0]) / (a[1] - b[1]) for a, b in pairwise(lines)]
    assert crossings == sorted(crossings)


# ---- what a group crosses ---------------------------------------------------------------------

GROUPS = [
    # mesh, axes, (members, members in a node, nodes)
    ((8, 2), (0,), (8, 4, 2)),
    ((8, 2), (1,), (2, 2, 1)),
    ((16,), (0,), (16, 8, 2)),
    ((4, 2, 2), (0, 2), (8, 4, 2)),
    ((4, 2, 2), (1, 2), (4, 4, 1)),
]


@pytest.mark.parametrize(("mesh", "axes", "expected"), GROUPS)
def test_which_links_a_group_crosses(
    mesh: tuple[int, ...], axes: tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    assert Cluster.preset("h100", 16).collective_seconds(mesh).group(axes) == expected


def rings(devices_per_card: int = 1) -> Cluster:
    """Nodes of 8 devices at 100 GB/s, cards of 10 GB/s, rings only, no latency."""
    tier = Tier(
        name="node",
        link="link",
        devices=8,
        bytes_per_second=100e9,
        latency_s=0.0,
        bulk_latency_s=0.0,
        short_share=1.0,
    )
    far = replace(
        tier, name="fabric", devices=None, bytes_per_second=10e9, devices_per_card=devices_per_card
    )
    return replace(BASE, tiers=(tier, far), algorithms=("ring",), collective_s=0.0)


RATES = [
    # mesh on 2 nodes of 8, axes, devices to a card, bytes per second of an all_gather's ring
    ((2, 8), (1,), 1, 100e9),  # stays in a node
    ((2, 8), (0,), 1, 10e9),  # 8 groups on 8 cards
    ((2, 8), (0,), 2, 5e9),  # 8 groups on 4 cards
    ((4, 4), (0,), 1, 20e9),  # 2 members in a node leave it over 2 cards
    ((4, 4), (0,), 4, 5e9),  # 4 groups of 2 members on 2 cards
    ((16,), (0,), 1, 80e9),  # one group has all cards
    ((16,), (0,), 8, 10e9),
    ((2, 2, 4), (0, 2), 1, 40e9),  # 2 groups of 4 members in each node
]


@pytest.mark.parametrize(("mesh", "axes", "cards", "rate"), RATES)
def test_groups_that_leave_a_node_share_its_cards(
    mesh: tuple[int, ...], axes: tuple[int, ...], cards: int, rate: float
) -> None:
    cluster = rings(cards).with_devices(16)
    members = prod(mesh[a] for a in axes)
    size = 1 << 30
    moved = (members - 1) / members * size
    assert moved / seconds(cluster, mesh, "all_gather", axes, size) == pytest.approx(rate)


def test_a_group_that_lies_partly_in_a_node_is_priced_by_the_worst() -> None:
    # Groups of 3 on nodes of 8: most stay inside, {6, 7, 8} does not and leaves over one card of
    # its node of device 8.
    cluster = rings().with_devices(24)
    moved = 2 / 3 * (1 << 30)
    assert moved / seconds(cluster, (8, 3), "all_gather", (1,), 1 << 30) == pytest.approx(10e9)
    # The two devices of a card that do not both leave do not share it.
    cluster = rings(2).with_devices(24)
    assert moved / seconds(cluster, (8, 3), "all_gather", (1,), 1 << 30) == pytest.approx(10e9)


def test_a_message_to_the_next_member_crosses_what_lies_between_them() -> None:
    cluster, size = rings(4).with_devices(16), 1 << 30
    assert size / seconds(cluster, (2, 8), "send_recv", (1,), size) == pytest.approx(100e9)
    assert size / seconds(cluster, (2, 8), "send_recv", (0,), size) == pytest.approx(2.5e9)
    # Stages of a pipeline over both nodes: one device of each card's four crosses.
    assert size / seconds(cluster, (16,), "send_recv", (0,), size) == pytest.approx(10e9)


def test_a_third_tier_is_crossed_only_by_those_who_leave_the_second() -> None:
    base = rings()
    pod = replace(base.across, name="pod", devices=16)
    far = replace(base.across, bytes_per_second=1e9)
    cluster = replace(base, tiers=(base.inside, pod, far), devices=32)
    size = 1 << 30
    rate = {
        axes: (members - 1) / members * size / seconds(cluster, (2, 2, 8), "all_gather", axes, size)
        for axes, members in (((2,), 8), ((1,), 2), ((0,), 2), ((0, 1, 2), 32))
    }
    assert rate == pytest.approx({(2,): 100e9, (1,): 10e9, (0,): 1e9, (0, 1, 2): 16e9})


def test_a_full_mesh_gives_each_pair_a_link_of_its_own() -> None:
    cluster = Cluster.preset("mi300x")
    size = 1 << 34
    two = size / seconds(cluster, (4, 2), "all_reduce", (1,), size)
    eight = 2 * 7 / 8 * size / seconds(cluster, (8,), "all_reduce", (0,), size)
    assert eight / two == pytest.approx(7, rel=0.01)


def test_dimensions_of_a_torus_add_their_links() -> None:
    cluster, size = Cluster.preset("tpu-v5p", 64), 1 << 34

    def rate(axes: tuple[int, ...]) -> float:
        members: int = 4 ** len(axes)
        moved: float = (members - 1) / members * size
        return moved / seconds(cluster, (4, 4, 4), "all_gather", axes, size)

    assert rate((1, 2)) / rate((2,)) == pytest.approx(2, rel=0.01)
    # Half a dimension is a line, not a ring.
    half = size / 2 / seconds(cluster, (8, 4, 2), "all_gather", (2,), size)
    assert half == pytest.approx(rate((2,)) / 2, rel=0.01)


# ---- figures --------------------------------------------------------------------------------


def test_the_row_that_the_documentation_works_by_hand() -> None:
    # 4 nodes of 8 H100, all_gather over the nodes: docs/cost-model.md.
    cluster = Cluster.preset("h100", 32)
    found = seconds(cluster, (4, 8), "all_gather", (0,), 64 << 20)
    assert found == pytest.approx(8.4e-6 + 3 * 28.8e-6 + 3 / 4 * (64 << 20) / 47.5e9, rel=1e-12)


def test_large_messages_run_at_the_measured_bandwidth() -> None:
    size = 1 << 34
    cluster = Cluster.preset("h100", 32)
    inside = 2 * 7 / 8 * size / seconds(cluster, (4, 8), "all_reduce", (1,), size)
    assert inside == pytest.approx(480e9, rel=0.02)  # sums by the switch
    rings = 7 / 8 * size / seconds(cluster, (4, 8), "all_gather", (1,), size)
    assert rings == pytest.approx(367e9, rel=0.01)
    both = 2 * 31 / 32 * size / seconds(cluster, (4, 8), "all_reduce", (0, 1), size)
    assert both == pytest.approx(366e9, rel=0.02)
    alone = 2 * 3 / 4 * size / seconds(cluster, (4, 8), "all_reduce", (0,), size)
    assert alone == pytest.approx(47.5e9, rel=0.01)  # eight groups share eight cards


def test_a_small_message_costs_what_was_measured() -> None:
    found = seconds(BASE, (8,), "all_reduce", (0,), 1024)
    assert found == pytest.approx(17e-6, rel=0.1)


def test_processes_of_one_machine_are_priced_as_they_were_measured() -> None:
    # The one protocol and the ring of gloo, and what gloo makes of it: the preset's figures alone.
    cluster = Cluster.preset("local", 2)
    link, start = cluster.inside, cluster.collective_s
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    for op, times in passes.items():
        made = cluster.library.get(op, Library())  # type: ignore[call-overload]
        moved = made.bytes * times * 1e6 / 2 / link.bytes_per_second
        expected = made.latency * (start + times * link.latency_s) + moved
        assert seconds(cluster, (2,), op, (0,), 10**6) == pytest.approx(expected)


@pytest.mark.parametrize("name", presets())
def test_every_preset_prices_every_message(name: str) -> None:
    per_node = 4 if name == "local" else Cluster.preset(name).devices_per_node
    cluster = Cluster.preset(name, 4 * per_node)
    for op, axes in product(OPS, ((0,), (1,), (0, 1))):
        found = seconds(cluster, (4, per_node), op, axes, 1 << 30)
        assert 1e-4 < found < 1e3
