"""Published runs: a few rows within a loose band, models at any batch, rows that are broken."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from autoshard.planner.capture import capture
from benchmarks.published.batches import BATCHES, ByBatch
from benchmarks.published.constants import FREE, with_constants
from benchmarks.published.pricing import Captures, captured, price
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
    found = price(ROWS[name], {})
    assert not found.reason
    assert abs(found.error) < 0.25


@pytest.mark.parametrize("name", ["mpt-0050", "dle-0060", "dgxc-0035"])
def test_a_graph_at_another_batch_is_the_one_captured_there(name: str) -> None:
    asked = request(ROWS[name])
    by_batch = ByBatch(lambda batch: capture(asked.model, asked.inputs(batch)))
    for batch in (BATCHES[0], 6):
        anew = capture(asked.model, asked.inputs(batch)).graph
        assert by_batch.at(batch).graph.fingerprint == anew.fingerprint


@pytest.mark.parametrize("name", ["mpt-0050", "dle-0060", "meg21-0003", "dgxc-0035"])
def test_a_graph_at_other_sizes_is_the_one_captured_there(name: str) -> None:
    asked = request(ROWS[name])
    by_sizes = BySizes(lambda sizes: capture(*asked.resized(sizes)), asked.sizes)
    anew = capture(asked.model, asked.inputs(asked.batch)).graph
    assert by_sizes.at(asked.sizes).graph.fingerprint == anew.fingerprint


def test_a_row_is_not_captured_by_itself_where_its_shape_is_known() -> None:
    known: Captures = {}
    asked = request(ROWS["dgxc-0035"])
    captured(asked, known)
    assert list(known) == [asked.shape]


def test_a_model_whose_numbers_are_no_products_is_captured_by_itself() -> None:
    known: Captures = {}
    asked = request(ROWS["dgxc-0072"])
    found = captured(asked, known)
    assert set(known) == {asked.shape, asked.key}
    assert known[asked.shape] is None
    assert found.graph.batch == asked.batch


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
    found = price(row, {})
    assert reason in found.reason
    assert figures([found])["skipped"] == [{"id": "dgxc-0035", "reason": found.reason}]


def test_the_figures_keep_the_classes_apart() -> None:
    known: Captures = {}
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
