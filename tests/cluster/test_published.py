"""Published collectives, priced by the planner's function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published_collectives import (
    DATA,
    Unpriced,
    fit,
    main,
    read,
    read_row,
    report,
)

ROW = {
    "hardware": "H100-80GB-SXM (8x400Gb)",
    "nodes": "4",
    "gpus": "32",
    "op": "all_reduce",
    "bytes": "17179869184",
    "busbw_GBps": "365.84",
    "source": "NVIDIA/nccl-tests issue #309",
}


def test_prices_hold_to_published_collectives() -> None:
    found = report(DATA)
    assert found["all"]["rows"] == 143
    assert found["skipped"] == []
    assert found["all"]["from_1_MiB"]["mape"] < 0.06
    assert abs(found["all"]["from_1_MiB"]["bias"]) < 0.03
    small = found["all"]["below_1_MiB"]
    # Two rows of one sweep take 6 and 3 ms where its next larger messages take 0.4 ms.
    assert small["rows"] - small["within_2x"] == 2
    for name, source in found["sources"].items():
        limit = 0.25 if name.startswith("bigscience") else 0.1  # a network known to be slow
        assert source["from_1_MiB"]["mape"] < limit, name


def test_every_row_of_the_file_is_priced_or_listed(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = [ROW, {**ROW, "hardware": "Cray T3E"}, {**ROW, "bytes": ""}, {**ROW, "op": "gather"}]
    lines = [",".join(ROW)] + [",".join(f'"{v}"' for v in row.values()) for row in rows]
    path.write_text("\n".join(lines))
    priced, skipped = read(path)
    assert [row.number for row in priced] == [1, 3]
    assert [row["row"] for row in skipped] == [2, 4]
    assert "no preset describes 'Cray T3E'" in skipped[0]["reason"]


def test_a_rows_hardware_says_nodes_cards_and_links() -> None:
    cluster = read_row(1, {**ROW, "hardware": "A100-40GB-SXM (p4d, 4x100Gb EFA)"}).cluster
    assert (cluster.devices, cluster.devices_per_node) == (32, 8)
    assert cluster.across.link == "EFA, 100 Gb/s"
    assert cluster.across.devices_per_card == 2
    four = read_row(1, {**ROW, "hardware": "V100 (4x100Gb Omni-Path)", "gpus": "16"}).cluster
    assert (four.devices_per_node, four.across.devices_per_card) == (4, 1)


def test_a_measured_time_follows_from_the_bus_bandwidth() -> None:
    assert read_row(1, ROW).measured_s == pytest.approx(2 * 31 / 32 * 17179869184 / 365.84e9)
    gathered = read_row(1, {**ROW, "op": "all_gather"})
    assert gathered.measured_s == pytest.approx(31 / 32 * 17179869184 / 365.84e9)


BROKEN = [
    ({"op": "gather"}, "op 'gather' is not one of all_reduce"),
    ({"busbw_GBps": ""}, "busbw_GBps is '', not a positive number"),
    ({"busbw_GBps": "0"}, "busbw_GBps is '0', not a positive number"),
    ({"bytes": "many"}, "bytes is 'many', not a positive number"),
    ({"nodes": ""}, "nodes is '', not a positive number"),
    ({"nodes": "3"}, "32 devices do not fill 3 nodes"),
    ({"nodes": "1"}, "32 devices a node; h100 has at most 8"),
    ({"nodes": "1", "gpus": "1"}, "one device sends nothing"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_a_row_that_cannot_be_expressed_says_why(change: dict[str, str], message: str) -> None:
    with pytest.raises(Unpriced, match=message):
        read_row(1, {**ROW, **change})


def test_the_document_has_what_the_tables_show(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(DATA), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {"all", "hardware", "sources", "assumed", "skipped", "constants"} <= set(found)
    main([str(DATA)])
    text = capsys.readouterr().out
    assert "MI300X (xGMI): all_reduce, 2 devices" in text
    assert "not priced: 0" in text


def test_a_fit_finds_what_rows_tell_and_leaves_the_rest_at_its_prior() -> None:
    rings = {**ROW, "hardware": "H100 NVLink4", "nodes": "1", "gpus": "8", "op": "all_gather"}
    rows = [read_row(i, {**rings, "busbw_GBps": "300", "bytes": str(1 << 34)}) for i in range(3)]
    found = {constant.name: (constant.prior, value) for constant, value in fit(rows).items()}
    assert found["nvlink4: bytes_per_second"][1] == pytest.approx(300e9, rel=0.02)
    prior, value = found["ib-ndr: bytes_per_second"]
    assert value == prior
