"""Published runs: a few rows within a loose band, models at any batch, rows that are broken."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard.analyzer import Captured
from autoshard.errors import RequestError
from autoshard.planner.capture import capture
from autoshard.search import Solved
from benchmarks.published.batches import BATCHES, ByBatch
from benchmarks.published.constants import FREE, with_constants
from benchmarks.published.pricing import Known, captured, price, spread
from benchmarks.published.rows import Inexpressible, complete, request
from benchmarks.published.scores import figures
from benchmarks.published.sizes import BySizes

FILE = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"

with FILE.open(encoding="utf-8") as file:
    ROWS = {row["id"]: complete(row) for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    "name", ["mpt-0050", "meg21-0003", "dle-0060", "dgxc-0035", "dgxc-0072", "launcher-0001"]
)
def test_a_row_is_priced_within_a_loose_band(name: str) -> None:
    found = price(ROWS[name], Known())
    assert not found.reason
    assert abs(found.error) < 0.25


@pytest.mark.parametrize("name", ["mpt-0050", "dle-0060", "dgxc-0035"])
def test_a_graph_at_another_batch_is_the_one_captured_there(name: str) -> None:
    asked = request(ROWS[name])
    by_batch = ByBatch(lambda batch: capture(asked.model, asked.inputs(batch)))
    for batch in (BATCHES[0], 6):
        anew = capture(asked.model, asked.inputs(batch)).graph
        assert by_batch.at(batch).graph.fingerprint == anew.fingerprint


@pytest.mark.parametrize("name", ["mpt-0050", "dle-0060", "meg21-0003", "dgxc-0035", "dgxc-0072"])
def test_a_graph_at_other_sizes_is_the_one_captured_there(name: str) -> None:
    asked = request(ROWS[name])
    by_sizes = BySizes(lambda sizes: capture(*asked.resized(sizes)), asked.sizes)
    anew = capture(asked.model, asked.inputs(asked.batch)).graph
    assert by_sizes.at(asked.sizes).graph.fingerprint == anew.fingerprint


def test_a_row_is_not_captured_by_itself_where_its_shape_is_known() -> None:
    known = Known()
    asked = request(ROWS["dgxc-0035"])
    captured(asked, known)
    assert list(known.captures) == [asked.shape]


def test_a_number_that_is_another_sum_is_refused() -> None:
    def captured_at(sizes: Sequence[int]) -> Captured:
        model = nn.Sequential(nn.Linear(8, sizes[4] + sizes[5], device="meta"))
        return capture(model, (torch.empty(sizes[0], 8, device="meta"),))

    with pytest.raises(ValueError, match="not one product of sizes"):
        BySizes(captured_at, (6, 5, 4, 3, 2, 7, 9)).at((6, 5, 4, 3, 2, 7, 9))


def test_a_model_that_its_sizes_do_not_tell_is_captured_by_itself() -> None:
    asked = request(ROWS["dgxc-0072"])
    known = Known(captures={asked.shape: None})
    found, _ = captured(asked, known)
    assert set(known.captures) == {asked.shape, asked.key}
    assert found.graph.batch == asked.batch


def test_rows_that_differ_in_how_a_step_is_run_share_a_solution() -> None:
    known = Known()
    row = ROWS["meg21-0003"]
    batch = str(2 * int(row["global_batch"]))
    _, solved = captured(request(row), known)
    assert captured(request(row | {"global_batch": batch}), known)[1] is solved
    other = row | {"micro_batch": str(2 * int(row["micro_batch"])), "global_batch": batch}
    assert captured(request(other), known)[1] is not solved


@pytest.mark.parametrize("name", ["mpt-0050", "meg21-0003", "dgxc-0072"])
def test_what_rows_share_does_not_change_a_price(name: str) -> None:
    row = ROWS[name] | {"activation_recompute": ""}
    known = Known()
    batches = [str(n * int(row["global_batch"])) for n in (1, 2, 1)]
    together = [price(row | {"global_batch": batch}, known) for batch in batches]
    assert together == [price(row | {"global_batch": batch}, Known()) for batch in batches]


def test_solutions_of_another_graph_are_refused() -> None:
    asked = request(ROWS["dgxc-0035"])
    found, _ = captured(asked, Known())
    other = Solved(replace(found.graph, name="another"))
    with pytest.raises(RequestError, match=r"another graph .* Solved\(captured.graph\)"):
        autoshard.estimate(
            asked.model, cluster=asked.cluster, captured=found, solved=other, **asked.options
        )


def test_processes_find_what_one_does_in_the_order_of_the_rows() -> None:
    rows = [ROWS[n] for n in ("mpt-0050", "dgxc-0035", "mpt-0051", "dgxc-0036")]
    assert spread(_lengths, rows * 15, 2) == _lengths(rows * 15)


def _lengths(rows: Sequence[Mapping[str, str]]) -> list[str]:
    return [row["id"] for row in rows]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("hidden", "", "nothing in hidden"),
        ("layers", "many", "is no number"),
        ("tp", "1.5", "is no whole number"),
        ("num_gpus", "7", "tp x pp x dp x cp"),
        ("global_batch", "3", "no multiple"),
        ("precision", "fp2", "not known"),
        ("hardware", "abacus", "no cluster preset"),
        ("training", "lora", "another training step"),
        ("step_time_s", "0", "malformed"),
        ("step_time_s", "nan", "is no number"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why(column: str, value: str, reason: str) -> None:
    row = ROWS["dgxc-0035"] | {column: value}
    with pytest.raises(Inexpressible, match=reason):
        request(row)
    found = price(row, Known())
    assert reason in found.reason
    assert figures([found])["skipped"] == [{"id": "dgxc-0035", "reason": found.reason}]


def test_the_figures_keep_the_classes_apart() -> None:
    known = Known()
    document = figures([price(ROWS[n], known) for n in ("dgxc-0035", "dgxc-0043")])
    assert document["sources"]["dgxc"]["rows"] == 1
    assert document["low_precision"]["sources"]["dgxc"]["rows"] == 1
    assert document["mean_mape"] == document["sources"]["dgxc"]["mape"]


def test_constants_are_few_and_the_presets_have_them() -> None:
    assert len(FREE) <= 25
    for row in ("mpt-0050", "meg20-0001", "dgxc-0035", "dgxc-0072"):
        device = request(ROWS[row]).cluster.device
        values = [_of(device, f.field) for f in FREE]
        assert with_constants(device, values) == device


def _of(device: object, field: str) -> float:
    section, _, name = field.partition(".")
    if section == "efficiencies":
        found: float = device.efficiencies.get(name, 0.5)  # type: ignore[attr-defined]
        return found
    value: float = getattr(getattr(device, section), name) if name else getattr(device, section)
    return value
