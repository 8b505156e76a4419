from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from autoshard.cluster import ALIASES, Cluster, figures, links, presets
from autoshard.errors import MeshError, RequestError, UnknownNameError


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
    assert set(presets()) == {
        "a100-40",
        "a100-80",
        "a100-ethernet-100",
        "ascend-910b",
        "ascend-cloudmatrix384",
        "b200",
        "gb200",
        "gb300",
        "h100",
        "h200",
        "local",
        "mi300x",
        "pcie-gen4",
        "pcie-gen5",
        "tpu-v4",
        "tpu-v5e",
        "tpu-v5p",
        "v100-dgx1",
        "v100-dgx2",
        "v100-ethernet-25",
    }
    assert Cluster.preset("a100") == Cluster.preset("a100-80")
    assert set(ALIASES.values()) <= set(presets())
    assert Cluster.preset("local").devices == 4
    assert Cluster.preset("h100").devices == 8


@pytest.mark.parametrize("name", links())
def test_each_figure_of_a_link_names_its_source(name: str) -> None:
    link = links()[name]
    named = set(figures({k: v for k, v in link.items() if k != "title"}))
    assert named == set(link["sources"])
    assert all(len(text) > 10 for text in link["sources"].values())


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


def test_operators_are_bound_by_work_or_by_bytes() -> None:
    cluster = Cluster.preset("h100")
    launch = cluster.device.launch_s
    assert cluster.operator_seconds(0, 0, "bfloat16") == launch
    assert cluster.operator_seconds(1e15, 0, "bfloat16") == pytest.approx(
        1e15 / (989e12 * cluster.device.efficiency) + launch
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
    ('{"kind": "autoshard.cluster", "schema_version": 9}', "of version 9; .* versions 1 and 2"),
    ('{"kind": "autoshard.cluster", "schema_version": 2}', "section 'device' is missing"),
    ('{"kind": "autoshard.cluster", "schema_version": 1}', "section 'inside' is missing"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_a_broken_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        Cluster.load(path)


WRONG = [
    ("node", "bytes_per_second", -1, r"tiers\.node\.bytes_per_second must be positive, found -1"),
    (
        "node",
        "wires",
        "star",
        r"tiers\.node\.wires must be one of switch, mesh, ring, found 'star'",
    ),
    ("node", "short_share", 1.5, "tier node: short_share is a share"),
    ("fabric", "link", 3, r"tiers\.fabric\.link must be a text"),
    (
        "fabric",
        "devices",
        12,
        "tier fabric must hold whole units of tier node: found 12 devices of 8",
    ),
    (
        "node",
        "reduction",
        {"latency_s": 0},
        r"tiers\.node\.reduction\.bytes_per_second must be a num",
    ),
]


@pytest.mark.parametrize(("tier", "field", "value", "message"), WRONG)
def test_a_wrong_figure_names_its_field(tier: str, field: str, value: object, message: str) -> None:
    document = Cluster.preset("h100").to_json()
    document["tiers"][tier][field] = value
    with pytest.raises(RequestError, match=message):
        Cluster.from_json(document)


@pytest.mark.parametrize("value", [None, [], ["tree"], ["ring", "star"], "ring"])
def test_algorithms_are_of_a_list(value: object) -> None:
    document = {**Cluster.preset("h100").to_json(), "algorithms": value}
    with pytest.raises(RequestError, match="of ring, tree, hierarchical, with ring or hier"):
        Cluster.from_json(document)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read cluster"):
        Cluster.load(tmp_path / "absent.toml")


def test_links_hold_only_so_many_devices() -> None:
    document = Cluster.preset("h100").to_json()
    del document["tiers"]["fabric"]
    with pytest.raises(MeshError, match=r"links for at most 8 devices \(tier node\), asked for 16"):
        Cluster.from_json(document).with_devices(16)


def test_a_tier_that_names_a_known_link_gives_only_what_differs() -> None:
    document = tomllib.loads(
        """
        kind = "autoshard.cluster"
        schema_version = 2
        name = "mine"
        devices = 16
        devices_per_node = 8
        collective_s = 1e-5
        reserve_bytes = 0
        algorithms = ["ring"]
        [device]
        name = "X"
        kind = "cuda"
        efficiency = 0.8
        memory_bytes = 1_000_000_000
        memory_bytes_per_second = 1e12
        memory_efficiency = 0.8
        launch_s = 5e-6
        peak_flops_per_second = { float32 = 1e13 }
        [tiers.fabric]
        link = "ib-ndr"
        devices_per_card = 4
        latency_s = 9e-6
        [tiers.node]
        link = "nvlink4"
        devices = 8
        """
    )
    cluster = Cluster.from_json(document)
    assert [tier.name for tier in cluster.tiers] == ["node", "fabric"]  # whatever their order
    assert cluster.across.bytes_per_second == links()["ib-ndr"]["bytes_per_second"]
    assert (cluster.across.latency_s, cluster.across.devices_per_card) == (9e-6, 4)
    assert "tiers.fabric.bytes_per_second" in cluster.sources
    assert "tiers.fabric.latency_s" not in cluster.sources  # the file's own, without a source
    document["tiers"]["fabric"] = {"link": "ib-ndx"}
    with pytest.raises(RequestError, match=r"tiers\.fabric has no bytes_per_second .* ib-ndr"):
        Cluster.from_json(document)


VERSION_1 = {
    "kind": "autoshard.cluster",
    "schema_version": 1,
    "name": "old",
    "devices": 16,
    "devices_per_node": 8,
    "collective_s": 8.4e-6,
    "reserve_bytes": 4_000_000_000,
    "device": {
        "name": "H100",
        "kind": "cuda",
        "efficiency": 0.73,
        "memory_bytes": 80_000_000_000,
        "memory_bytes_per_second": 3350e9,
        "memory_efficiency": 0.85,
        "launch_s": 5e-6,
        "peak_flops_per_second": {"float32": 67e12, "bfloat16": 989e12},
    },
    "inside": {"name": "NVLink", "bytes_per_second": 370e9, "latency_s": 6e-7},
    "across": {
        "name": "InfiniBand",
        "bytes_per_second": 47.5e9,
        "latency_s": 4e-6,
        "devices_per_card": 2,
    },
    "sources": {"inside.latency_s": "a table of latencies", "collective_s": "the same table"},
}
"""A document as the first version wrote it."""


def test_a_document_of_version_1_is_read_as_what_it_said() -> None:
    cluster = Cluster.from_json(VERSION_1)
    node, fabric = cluster.tiers
    assert (node.link, node.devices, node.devices_per_card) == ("NVLink", 8, 1)
    assert (fabric.link, fabric.devices, fabric.devices_per_card) == ("InfiniBand", None, 2)
    assert node.bulk_latency_s == node.latency_s == 6e-7
    assert node.short_share == fabric.short_share == 1.0
    assert cluster.sources["tiers.node.latency_s"] == "a table of latencies"
    prices = cluster.collective_seconds((2, 8))
    size = 1 << 34
    inside = prices("all_gather", (1,), size)
    assert 7 / 8 * size / inside == pytest.approx(370e9, rel=0.001)
    across = prices("all_gather", (0,), size)
    assert 1 / 2 * size / across == pytest.approx(47.5e9 / 2, rel=0.001)
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_processes_of_version_1_still_share_their_machine() -> None:
    link = {"name": "loopback", "bytes_per_second": 0.8e9, "latency_s": 150e-6}
    device = {**VERSION_1["device"], "kind": "cpu"}  # type: ignore[dict-item]
    old = {**VERSION_1, "device": device, "inside": link, "across": link, "devices_per_node": 16}
    cluster = Cluster.from_json(old)
    assert len(cluster.tiers) == 1
    assert cluster.with_devices(64).devices_per_node == 64


def test_the_reserve_is_told_in_its_parts() -> None:
    cluster = Cluster.preset("h100", 8)
    assert cluster.reserve is not None
    assert cluster.reserve.total_bytes == cluster.reserve_bytes
    document = cluster.to_json()
    assert Cluster.from_json(document) == cluster
    for part in ("context_bytes", "communication_bytes", "fragmentation_bytes"):
        assert document["sources"][f"reserve.{part}"]


def test_a_document_with_the_sum_of_the_reserve_alone_still_loads() -> None:
    document = Cluster.preset("h100", 8).to_json()
    del document["reserve"]
    cluster = Cluster.from_json(document)
    assert (cluster.reserve, cluster.reserve_bytes) == (None, 4_000_000_000)
    assert "reserve_bytes" in cluster.figures()


def test_parts_of_the_reserve_that_do_not_add_up_are_refused() -> None:
    document = Cluster.preset("h100", 8).to_json()
    document["reserve_bytes"] = 5
    with pytest.raises(RequestError, match="reserve_bytes is 5, and the parts"):
        Cluster.from_json(document)


@pytest.mark.parametrize("section", [5, [1], "fast"])
def test_kernels_that_are_no_section_are_refused(section: object) -> None:
    document = Cluster.preset("h100").to_json()
    document["device"]["kernels"] = section
    with pytest.raises(RequestError, match=r"device\.kernels must be a section"):
        Cluster.from_json(document)


@pytest.mark.parametrize(("devices", "stages"), [(64, 4), (16, 4), (8, 2)])
def test_parts_that_lie_alike_are_small_clusters(devices: int, stages: int) -> None:
    whole = Cluster.preset("h100", devices)
    assert whole.part(stages) == whole.with_devices(devices // stages)


@pytest.mark.parametrize(
    ("devices", "stages", "sizes"), [(24, 2, (6, 2)), (24, 4, (3, 2)), (40, 4, (5, 2))]
)
def test_a_part_across_nodes_is_priced_as_the_worst_of_all(
    devices: int, stages: int, sizes: tuple[int, ...]
) -> None:
    whole = Cluster.preset("h100", devices)
    part = whole.part(stages)
    assert (part.devices, part.parts) == (devices // stages, stages)
    inside, across = part.collective_seconds(sizes), whole.collective_seconds((stages, *sizes))
    for axes in ((0,), (1,), (0, 1)):
        shifted = tuple(a + 1 for a in axes)
        for op in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
            assert inside(op, axes, 1 << 20) == across(op, shifted, 1 << 20)  # type: ignore[arg-type]
        assert inside.tiers_of(axes) == across.tiers_of(shifted)
    # Pairs never leave a node; those that share a place along the second axis do.
    assert inside.group((1,))[2] == 1
    assert inside.group((0,))[2] > 1
    assert part.with_devices(8).parts == 1
