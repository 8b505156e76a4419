"""Sweeps that really run: rows equal what the planner says, and survive every interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

import autoshard
from autoshard.errors import RequestError
from autoshard.sweeps import Point, Row, Store, read_rows, read_sweep
from autoshard.sweeps import run as run_module
from autoshard.sweeps.points import file_digest
from autoshard.sweeps.work import Bench
from tests.sweep.samples import GPT2, RESNET, grid

LEASE_S = 2.0
WAIT_S = 120.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Row, ...]:
    """The rows of ``grid()``."""
    folder = tmp_path_factory.mktemp("undisturbed")
    os.environ["AUTOSHARD_LOCKS"] = str(folder)
    result = autoshard.sweep(grid(), storage=folder / "sweep.db", progress=False)
    assert [r.status for r in result.rows] == ["done"] * 12
    return result.rows


def test_a_row_has_what_the_plan_says(undisturbed: tuple[Row, ...]) -> None:
    row = undisturbed[4]
    plan = autoshard.optimize(
        GPT2["config"], cluster="h100", devices=2, global_batch=4, progress=False
    )
    assert (row.model, row.cluster, row.devices, row.mode) == ("tiny-gpt2", "h100", 2, "plan")
    assert (row.global_batch, row.seq_len, row.dtype) == (4, 16, plan.dtype)
    assert (row.label, row.mesh) == (plan.label, str(plan.mesh))
    assert row.step_time_s == plan.step_time.total_s
    assert row.samples_per_s == 4 / plan.step_time.total_s
    assert row.tokens_per_s == 64 / plan.step_time.total_s
    assert (row.memory_bytes, row.fits) == (plan.memory.total_bytes, True)
    assert row.exposed_communication_s == plan.step_time.exposed_communication_s


def test_points_that_fail_keep_their_error_and_the_sweep_goes_on(tmp_path: Path) -> None:
    document = {
        "name": "failing",
        "points": [
            {"model": GPT2, "cluster": "h100", "devices": 2, "seq_len": 99, "global_batch": 4},
            {"model": "no.such.module:factory", "cluster": "h100", "devices": 2},
            {"model": GPT2, "cluster": "h100", "devices": 2, "memory_limit_bytes": 10},
            {
                "model": GPT2,
                "cluster": "h100",
                "devices": 2,
                "mesh": "every",
                "global_batch": 4,
                "memory_limit_bytes": 10,
            },
        ],
    }
    rows = autoshard.sweep(document, storage=tmp_path / "s.db", progress=False).rows
    assert [r.error_type for r in rows] == [
        "InputError",
        "RequestError",
        "InfeasibleError",
        None,
        None,
    ]
    assert "seq_len 99 is longer than the 16 positions" in str(rows[0].error)
    assert "what binds" in str(rows[2].error)
    assert [r.fits for r in rows] == [None, None, None, False, False]


def test_measured_rows_stand_beside_the_prediction_on_every_factorization(tmp_path: Path) -> None:
    document = {
        "name": "measured",
        "measure": True,
        "steps": 3,
        "strategy": "hybrid",
        "global_batch": 4,
        "parameters": {"model": [GPT2, RESNET], "devices": [1, 2], "mesh": "every"},
    }
    rows = autoshard.sweep(document, storage=tmp_path / "s.db", progress=False).rows
    assert [(r.model, r.mesh) for r in rows] == [
        (model, mesh)
        for model in ("tiny-gpt2", "tiny-resnet")
        for mesh in ("data=1, model=1", "data=2, model=1", "data=1, model=2")
    ]
    for row in rows:
        assert (row.status, row.error) == ("done", None)
        low, middle, high = (
            row.measured_low_s,
            row.measured_step_time_s,
            row.measured_high_s,
        )
        assert low is not None
        assert middle is not None
        assert high is not None
        assert 0 < low <= middle <= high
        assert row.forward_backward_s is not None
        assert row.step_time_s is not None
        assert 0 < row.forward_backward_s < row.step_time_s
        assert row.measured_memory_bytes is not None
        assert row.comparable_memory_bytes is not None
        assert 0.5 < row.measured_memory_bytes / row.comparable_memory_bytes < 2
    assert [r.tokens_per_s is None for r in rows] == [False] * 3 + [True] * 3


def test_what_is_finished_is_not_done_again(
    tmp_path: Path, undisturbed: tuple[Row, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Point] = []
    real = Bench.do

    def do(bench: Bench, point: Point) -> tuple[Row, str | None]:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(point)
        return real(bench, point)

    monkeypatch.setattr(Bench, "do", do)
    with pytest.raises(KeyboardInterrupt):
        autoshard.sweep(grid(), storage=tmp_path / "s.db", progress=False)
    assert [r.status for r in read_rows(tmp_path / "s.db")] == ["done"] * 5 + ["pending"] * 7
    monkeypatch.setattr(Bench, "do", real)
    again = autoshard.sweep(grid(), storage=tmp_path / "s.db", progress=False)
    assert again.rows == undisturbed
    monkeypatch.setattr(Bench, "do", do)
    done[:] = done[:5]  # the next one would be interrupted
    assert autoshard.sweep(grid(), storage=tmp_path / "s.db", progress=False).rows == undisturbed


def begin(document: dict[str, Any], folder: Path, storage: str, **options: Any) -> Any:
    """A sweep in a process group of its own."""
    (folder / "sweep.json").write_text(json.dumps(document))
    call = f"autoshard.sweep('sweep.json', storage={storage!r}, **{options!r})"
    code = f"import autoshard\nif __name__ == '__main__': {call}"
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, process_group=0)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def finished(storage: str) -> int:
    try:
        return sum(r.status == "done" for r in read_rows(storage))
    except RequestError:
        return 0  # it has not begun


@pytest.mark.multirank
def test_a_killed_sweep_goes_on_and_ends_with_the_same_rows(
    tmp_path: Path, undisturbed: tuple[Row, ...]
) -> None:
    storage = str(tmp_path / "s.db")
    process = begin(grid(), tmp_path, storage, workers=2, lease_s=LEASE_S)
    try:
        wait_for(lambda: finished(storage) >= 3)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert finished(storage) < 12
    result = autoshard.sweep(grid(), storage=storage, lease_s=LEASE_S, progress=False)
    assert result.rows == undisturbed


@pytest.mark.multirank
def test_two_commands_on_one_postgresql_share_the_points(
    tmp_path: Path, postgres_url: str, undisturbed: tuple[Row, ...]
) -> None:
    process = begin(grid(), tmp_path, postgres_url)
    try:
        wait_for(lambda: finished(postgres_url) >= 1)
        result = autoshard.sweep(grid(), storage=postgres_url, progress=False)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    assert result.rows == undisturbed
    engine = create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        found = connection.execute(text("SELECT worker, attempts FROM autoshard_points")).all()
    engine.dispose()
    assert [attempts for _, attempts in found] == [1] * 12
    assert len({worker for worker, _ in found}) == 2


def test_workers_that_keep_dying_end_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "MOST_DEATHS", 2)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(autoshard.AutoshardError, match="2 workers died in a row"):
        autoshard.sweep(grid(), storage=tmp_path / "s.db", workers=2, progress=False)


def test_searches_are_kept_as_optuna_studies(tmp_path: Path) -> None:
    import optuna

    url = f"sqlite:///{tmp_path / 'studies.db'}"
    document = grid(exclude=[{"global_batch": 8}, {"cluster": "h100"}])
    autoshard.sweep(document, storage=tmp_path / "s.db", studies=url, progress=False)
    studies = optuna.get_all_study_summaries(url)
    assert len(studies) == len(read_sweep(document).points) == 3
    assert all(s.n_trials >= 1 for s in studies)


def test_a_graph_that_differs_from_the_entered_one_fails(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(autoshard.analyze(GPT2["config"], global_batch=4).graph.to_json()))
    sweep = read_sweep({"name": "g", "model": str(path), "cluster": "h100", "devices": 2})
    assert sweep.points[0].model_digest == file_digest(str(path))
    first = autoshard.sweep(sweep, storage=tmp_path / "a.db", progress=False).rows[0]
    assert first.status == "done"
    path.write_text(path.read_text() + " ")
    second = autoshard.sweep(sweep, storage=tmp_path / "b.db", progress=False).rows[0]
    assert "is not the file that the sweep was entered with" in str(second.error)


def test_plans_of_the_store_are_plans(tmp_path: Path) -> None:
    document = {"name": "p", "model": "gpt2", "cluster": "h100", "devices": 2, "seq_len": 64}
    autoshard.sweep(document, storage=tmp_path / "s.db", progress=False)
    (row,) = read_rows(tmp_path / "s.db", plans=True)
    plan = autoshard.Plan.from_json(json.dumps(row.plan))
    assert plan.step_time.total_s == row.step_time_s
    assert plan.model.source == "gpt2"


def test_a_number_of_workers_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="workers must be a positive whole number, found 0"):
        autoshard.sweep(grid(), storage=tmp_path / "s.db", workers=0)
    assert not (tmp_path / "s.db").exists()


def test_a_store_is_named_after_the_sweep() -> None:
    assert run_module.default_storage("three models/2") == "three-models-2.db"
    assert run_module.default_storage("..") == "sweep.db"


def test_store_reads_while_a_sweep_runs(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    sweep_id = store.register(read_sweep(grid())).sweep_id
    assert store.claim(sweep_id) is not None
    assert [r.status for r in read_rows(tmp_path / "s.db")] == ["running"] + ["pending"] * 11
    store.close()
