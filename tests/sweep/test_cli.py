"""``autoshard sweep`` and ``autoshard results``."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import select
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from autoshard.cli import sweep as sweep_module
from autoshard.cli.app import run
from autoshard.cli.output import Output
from autoshard.sweeps import COLUMNS, Row, Store, read_rows, read_sweep, write_rows
from autoshard.sweeps import export as export_module
from autoshard.sweeps.store import Counts
from tests.sweep.samples import grid

ROOT = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    document = grid(exclude=[{"devices": [2, 4]}])
    (tmp_path / "s.json").write_text(json.dumps(document))
    return tmp_path


@pytest.fixture
def finished(folder: Path) -> list[Row]:
    """A store with one done, one failed and two pending rows."""
    store = Store(folder / "grid.db")
    sweep_id = store.register(read_sweep(folder / "s.json")).sweep_id
    for changes in (
        {"status": "done", "step_time_s": 0.25, "memory_bytes": 3 << 30, "fits": True},
        {"status": "failed", "error": "InputError: [so] it is\nand more"},
    ):
        claim = store.claim(sweep_id)
        assert claim is not None
        store.finish(claim, replace(claim.point.row(), **changes))
    store.close()
    return read_rows(folder / "grid.db")


def cli(capfd: pytest.CaptureFixture[str], *arguments: str) -> Result:
    status = run(arguments)
    return Result(status, *capfd.readouterr())


def test_dry_run_lists_the_points_and_makes_nothing(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    found = cli(capfd, "sweep", "s.json", "--dry-run")
    assert found.status == 0
    assert "tiny-gpt2 on 1 x a100-80, batch 4" in found.out
    assert "4 points" in found.err
    assert [p.name for p in folder.iterdir()] == ["s.json"]
    found = cli(capfd, "sweep", "s.json", "--dry-run", "--json")
    document = json.loads(found.out)
    assert [p["mode"] for p in document["points"]] == ["plan"] * 4


def test_a_sweep_shows_its_rows_and_writes_them(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    found = cli(capfd, "sweep", "s.json", "--out", "rows.csv")
    assert found.status == 0, found.err
    assert "4 of 4: tiny-gpt2 on 1 x h100, batch 8:" in found.err
    assert "4 points, 0 failed; kept in grid.db" in found.err
    assert found.out.count("one device") == 1  # what is the same in all rows stands above
    with (folder / "rows.csv").open() as file:
        assert [r["cluster"] for r in csv.DictReader(file)] == ["a100-80", "h100"] * 2
    found = cli(capfd, "sweep", "s.json", "--json")
    assert json.loads(found.out)["rows"] == [r.to_json() for r in read_rows("grid.db")]


def test_results_are_shown_whatever_their_state(
    capfd: pytest.CaptureFixture[str], finished: list[Row]
) -> None:
    found = cli(capfd, "results", "grid.db")
    assert found.status == 0
    assert "250 ms" in found.out
    assert "3.00 GiB" in found.out
    assert "InputError: [so] it is" in found.out
    assert found.out.count("pending") == 2
    found = cli(capfd, "results", "grid.db", "--json")
    assert [Row.from_json(r) for r in json.loads(found.out)["rows"]] == finished


def test_csv_parquet_and_json_have_the_same_columns_and_values(
    capfd: pytest.CaptureFixture[str], folder: Path, finished: list[Row]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for ending in ("csv", "parquet", "json"):
        assert cli(capfd, "results", "grid.db", "--out", f"rows.{ending}").status == 0
    assert json.loads((folder / "rows.json").read_text()) == [r.to_json() for r in finished]
    table = parquet.read_table(folder / "rows.parquet")
    assert table.column_names == list(COLUMNS)
    assert table.to_pylist() == [r.to_json() for r in finished]
    types = {f.name: str(f.type) for f in table.schema}
    assert (types["devices"], types["step_time_s"]) == ("int64", "double")
    assert (types["fits"], types["error"]) == ("bool", "string")
    with (folder / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [{k: None if v == "" else v for k, v in r.items()} for r in rows] == [
        {k: None if v is None else str(v) for k, v in r.to_json().items()} for r in finished
    ]


def test_parquet_without_pyarrow_says_what_to_install(
    capfd: pytest.CaptureFixture[str], finished: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    found = cli(capfd, "results", "grid.db", "--out", "rows.parquet")
    assert found.status == 2
    assert "pip install 'autoshard[parquet]'" in found.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "no.toml"], "cannot read the sweep no.toml"),
        (["sweep", "s.json", "--out", "rows.xls"], "rows are written as .csv, .parquet, .json"),
        (["sweep", "s.json", "--out", "no/rows.csv"], "there is no folder no"),
        (["sweep", "s.json", "--storage", "mysql://a/b"], "a store in mysql is not supported"),
        (["sweep", "s.json", "--studies", "nowhere"], "cannot open the Optuna storage"),
        (["results", "no.db"], "there is no file no.db; run a sweep first"),
        (["results", "grid.db", "--sweep", "gird"], "unknown sweep 'gird'; nearest: grid"),
    ],
)
def test_a_mistake_ends_with_status_2_before_anything_runs(
    capfd: pytest.CaptureFixture[str], finished: list[Row], arguments: list[str], message: str
) -> None:
    found = cli(capfd, *arguments)
    assert found.status == 2
    assert message in found.err
    assert read_rows("grid.db") == finished


def test_a_terminal_gets_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    row = Row(model="[m]", cluster="h100", devices=2, status="done", step_time_s=0.25)
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        with sweep_module._progress(Output(as_json=False, no_color=False)) as progress:
            progress(Counts(pending=8, running=0, done=1, failed=0), None)
            progress(Counts(pending=5, running=1, done=2, failed=1), row)
        terminal.flush()
        shown = ""
        while "left)" not in shown and select.select([ours], [], [], 10)[0]:
            shown += os.read(ours, 65536).decode()
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert re.search(r"3/9 \[1 failed\] \[m\] on 2 x h100: 250 ms \(\d+ s left\)", text), text


def test_writing_checks_the_ending(folder: Path) -> None:
    assert export_module.FORMATS == (".csv", ".parquet", ".json")
    write_rows([], folder / "rows.CSV")
    assert (folder / "rows.CSV").read_text() == ",".join(COLUMNS) + "\n"


def test_examples_and_the_blocks_of_the_page_are_sweeps(folder: Path) -> None:
    for path in (ROOT / "examples").glob("*.toml"):
        assert read_sweep(path).notes == ()
    blocks = re.findall(
        r"^```toml\n(.*?)^```$", (ROOT / "docs" / "sweeps.md").read_text(), re.M | re.S
    )
    assert len(blocks) >= 2
    for block in blocks:
        assert read_sweep(tomllib.loads(block)).points


def test_the_page_names_every_parameter_and_column() -> None:
    from autoshard.sweeps.config import PARAMETERS, SECTIONS

    page = (ROOT / "docs" / "sweeps.md").read_text()
    assert [n for n in (*PARAMETERS, *SECTIONS, *COLUMNS) if f"`{n}`" not in page] == []
