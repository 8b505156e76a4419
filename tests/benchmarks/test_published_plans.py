"""Plans beside published runs: which rows compete, and on what terms."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.published.cases import Case, cases_of
from benchmarks.published.pricing import Known, price
from benchmarks.published.rows import complete
from benchmarks.published.searched import Compared, compare
from benchmarks.published_plans import spread_out, summary

FILE = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"

with FILE.open(encoding="utf-8") as file:
    ROWS = {row["id"]: complete(row) for row in csv.DictReader(file)}

SMALL = "dle-0073"


@pytest.fixture(scope="module")
def known() -> Known:
    return Known()


def test_rows_that_differ_in_their_configuration_alone_are_one_case() -> None:
    row = ROWS["mpt-0050"]
    other = row | {"id": "mpt-b", "micro_batch": "1", "activation_recompute": "none"}
    batch = row | {"id": "mpt-c", "global_batch": str(2 * int(row["global_batch"]))}
    broken = row | {"id": "mpt-d", "hidden": ""}
    cases, left = cases_of([row, other, batch, broken])
    assert [[r["id"] for r in c.rows] for c in cases] == [["mpt-0050", "mpt-b"], ["mpt-c"]]
    assert list(left) == ["mpt-d"]
    assert "nothing in hidden" in left["mpt-d"]


def test_a_limit_takes_cases_of_each_source_from_end_to_end() -> None:
    cases = [Case(name=f"{s}{i}", rows=({"id": f"{s}-{i}"},)) for s in "ab" for i in range(7)]
    assert [c.name for c in spread_out(cases, 3)] == ["a0", "a2", "a4", "b0", "b2", "b4"]
    assert spread_out(cases, 8) == cases


def test_the_publishers_figure_is_that_of_published_runs_and_the_plan_is_no_slower(
    known: Known,
) -> None:
    row = ROWS[SMALL] | {"micro_batch": "16"}
    slow = row | {"id": "dle-slow", "micro_batch": "1"}
    (case,), _ = cases_of([slow, row])
    found = compare(case, known)
    assert not found.reason
    assert found.theirs is not None
    assert found.ours is not None
    assert found.best == SMALL
    assert found.theirs.seconds == pytest.approx(price(row, known).predicted_s)
    assert found.ours.memory_bytes <= found.limit_bytes
    assert found.gain == pytest.approx(found.theirs.seconds / found.ours.seconds - 1)
    assert found.gain >= -1e-9
    assert sum(found.ours.parts.values()) == pytest.approx(found.ours.seconds)
    document = summary([found])
    assert (document["no_slower"], document["rows"]) == (1, 2)
    assert json.loads(json.dumps(found.document()))["gain"] == found.gain


def test_what_is_not_compared_says_why() -> None:
    document = summary([Compared(case="x: y", ids=("x-1",), reason="nothing fits")])
    assert document["not_compared"] == {"nothing fits": 1}
    assert document["compared"] == 0
