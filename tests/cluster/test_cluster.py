from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import ALIASES, Cluster, presets
from autoshard.errors import MeshError, RequestError, UnknownNameError

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("name", presets())
def test_each_figure_of_a_preset_names_its_source(name: str) -> None:
    cluster = Cluster.preset(name)
    assert set(cluster.figures()) - set(cluster.sources) == set()
    assert set(cluster.sources) - set(cluster.figures()) == set()
    assert all(len(text) > 10 for text in cluster.sources.values())


@pytest.mark.parametrize("name", [*presets(), *ALIASES])
def test_json_round_trip(name: str) -> None:
    cluster = Cluster.preset(name)
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_the_known_presets() -> None:
    assert presets() == ("a100-40", "a100-80", "h100", "local")
    assert Cluster.preset("a100") == Cluster.preset("a100-80")
    assert Cluster.preset("local").devices == 4
    assert Cluster.preset("h100").devices == 8


def test_an_unknown_preset_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown cluster preset 'h10'; nearest: h100"):
        Cluster.preset("h10")


@pytest.mark.parametrize("devices", [0, -1, True, 2.0, "8"])
def test_devices_are_a_positive_whole_number(devices: object) -> None:
    for name in presets():
        with pytest.raises(MeshError, match="whole number from 1"):
            Cluster.preset(name, devices)  # type: ignore[arg-type]


def test_devices_fill_whole_nodes() -> None:
    with pytest.raises(MeshError, match="1 to 8, or a multiple of 8 such as 8 or 16"):
        Cluster.preset("h100", 12)
    assert Cluster.preset("h100", 3).nodes == 1
    assert Cluster.preset("h100", 24).nodes == 3


def test_processes_share_the_machine() -> None:
    one, many = Cluster.preset("local", 1), Cluster.preset("local", 8)
    assert many.devices_per_node == 8
    assert abs(many.device.memory_bytes * 8 - one.device.memory_bytes) < 8
    assert many.flops_per_second("float32") <= one.flops_per_second("float32")
    assert one.with_devices(8).to_json() == many.to_json()


def test_a_mesh_has_as_many_devices_as_the_cluster() -> None:
    with pytest.raises(MeshError, match="mesh 2x2 has 4 devices, cluster h100 has 8"):
        Cluster.preset("h100", 8).collective_seconds((2, 2))


GROUPS = [
    # mesh, axes, (members, members in a node, nodes)
    ((2, 8), (0,), (2, 1, 2)),
    ((2, 8), (1,), (8, 8, 1)),
    ((2, 8), (0, 1), (16, 8, 2)),
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


def test_large_messages_run_at_the_measured_bandwidth() -> None:
    prices = Cluster.preset("h100", 32).collective_seconds((4, 8))
    size = 1 << 34
    inside = 2 * 7 / 8 * size / prices("all_reduce", (1,), size)
    both = 2 * 31 / 32 * size / prices("all_reduce", (0, 1), size)
    assert inside == pytest.approx(370e9, rel=0.01)
    assert both == pytest.approx(370e9, rel=0.01)  # 8 cards of 47.5 GB/s carry more than NVLink
    alone = 2 * 3 / 4 * size / prices("all_reduce", (0,), size)
    assert alone == pytest.approx(47.5e9, rel=0.01)  # eight groups share eight cards


def test_a_small_message_costs_what_was_measured() -> None:
    seconds = Cluster.preset("h100", 8).collective_seconds((8,))("all_reduce", (0,), 1024)
    assert seconds == pytest.approx(16e-6, rel=0.1)


@pytest.mark.parametrize("op", OPS)
def test_a_group_of_one_costs_nothing(op: str) -> None:
    prices = Cluster.preset("h100", 8).collective_seconds((1, 8))
    assert prices(op, (0,), 1 << 20) == 0.0  # type: ignore[arg-type]


MESHES = [(8,), (2, 4), (16,), (2, 8), (8, 2), (4, 2, 4)]


@given(
    op=st.sampled_from(OPS),
    mesh=st.sampled_from(MESHES),
    sizes=st.lists(st.integers(0, 1 << 36), min_size=2, max_size=2),
    data=st.data(),
)
def test_more_bytes_never_cost_less(
    op: str, mesh: tuple[int, ...], sizes: list[int], data: st.DataObject
) -> None:
    devices = 1
    for size in mesh:
        devices *= size
    prices = Cluster.preset("a100", devices).collective_seconds(mesh)
    axes = data.draw(st.sampled_from([(0,), (len(mesh) - 1,), tuple(range(len(mesh)))]))
    small, large = sorted(sizes)
    assert prices(op, axes, small) <= prices(op, axes, large)  # type: ignore[arg-type]


@given(
    op=st.sampled_from(OPS),
    mesh=st.sampled_from(MESHES),
    size=st.integers(0, 1 << 34),
    factor=st.floats(1, 100),
    field=st.sampled_from(["latency_s", "bytes_per_second"]),
    tier=st.sampled_from(["inside", "across"]),
)
def test_slower_links_never_cost_less(
    op: str, mesh: tuple[int, ...], size: int, factor: float, field: str, tier: str
) -> None:
    devices = 1
    for n in mesh:
        devices *= n
    fast = Cluster.preset("a100", devices)
    link = getattr(fast, tier)
    change = factor if field == "latency_s" else 1 / factor
    slow = replace(fast, **{tier: replace(link, **{field: getattr(link, field) * change})})
    for axes in [(0,), tuple(range(len(mesh)))]:
        before = fast.collective_seconds(mesh)(op, axes, size)  # type: ignore[arg-type]
        assert before <= slow.collective_seconds(mesh)(op, axes, size) * (1 + 1e-12)  # type: ignore[arg-type]


def test_arrays_of_sizes_cost_what_single_ones_do() -> None:
    import numpy as np

    prices = Cluster.preset("h100", 16).collective_seconds((2, 8))
    sizes = np.array([0, 1, 10**3, 10**6, 10**9])
    for op in OPS:
        found = prices.many(op, (0, 1), sizes)  # type: ignore[arg-type]
        assert found.tolist() == [prices(op, (0, 1), int(n)) for n in sizes]  # type: ignore[arg-type]


def test_shared_cards_are_divided() -> None:
    cluster = Cluster.preset("a100", 16)
    shared = replace(cluster, across=replace(cluster.across, devices_per_card=2))
    one = cluster.collective_seconds((2, 8))("all_reduce", (0,), 1 << 30)
    two = shared.collective_seconds((2, 8))("all_reduce", (0,), 1 << 30)
    assert two == pytest.approx(2 * one, rel=1e-3)


def test_operators_are_bound_by_work_or_by_bytes() -> None:
    cluster = Cluster.preset("h100")
    launch = cluster.device.launch_s
    assert cluster.operator_seconds(0, 0, "bfloat16") == launch
    assert cluster.operator_seconds(1e15, 0, "bfloat16") == pytest.approx(
        1e15 / (989e12 * 0.73) + launch
    )
    assert cluster.operator_seconds(0, 1e12, "bfloat16") == pytest.approx(
        1e12 / (3350e9 * 0.85) + launch
    )
    assert cluster.flops_per_second("int64") == cluster.flops_per_second("float32")


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_cluster_is_read_from_a_file(tmp_path: Path, suffix: str) -> None:
    cluster = Cluster.preset("h100", 16)
    path = tmp_path / f"mine{suffix}"
    if suffix == ".json":
        cluster.save(path)
    else:
        source = Path(__file__).parents[2] / "autoshard" / "clusters" / "h100.toml"
        path.write_text(source.read_text().replace("devices = 8\n", "devices = 16\n", 1))
    assert Cluster.load(path) == cluster


BROKEN = [
    ("{", "Expecting property name"),
    ("{}", "its 'kind' is not 'autoshard.cluster'"),
    ('{"kind": "autoshard.cluster", "schema_version": 9}', "of version 9"),
    ('{"kind": "autoshard.cluster", "schema_version": 1}', "section 'device' is missing"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_a_broken_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        Cluster.load(path)


def test_a_wrong_figure_names_its_field(tmp_path: Path) -> None:
    document = Cluster.preset("h100").to_json()
    document["inside"]["bytes_per_second"] = -1
    with pytest.raises(RequestError, match=r"inside\.bytes_per_second must be positive, found -1"):
        Cluster.from_json(document)
    with pytest.raises(RequestError, match="cannot read cluster"):
        Cluster.load(tmp_path / "absent.toml")
