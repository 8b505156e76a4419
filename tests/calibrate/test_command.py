"""A real calibration, small, and what the command says where it cannot be done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.calibrate import calibrate
from autoshard.calibrate.catalogue import QUICK
from autoshard.cli.app import run
from autoshard.cluster import Cluster
from autoshard.errors import RequestError

ROOT = Path(__file__).parents[2]


@pytest.mark.multirank
def test_two_processes_write_a_cluster_that_a_plan_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    found = calibrate(
        2, sizes=QUICK, window_s=0.002, progress=lambda text, done, total: said.append(text)
    )
    assert found is not None
    path = tmp_path / "here.toml"
    found.save(path)
    cluster = Cluster.load(path)
    assert (cluster.devices, cluster.devices_per_node) == (2, 2)
    assert set(cluster.figures()) - set(cluster.sources) == set()
    assert cluster.device.measured is not None
    assert cluster.sources["device.kernels.depth"].startswith("measured: ")
    assert cluster.sources["device.kernels.scores"].startswith("not used: ")
    assert all(row.measured_s > 0 and row.fitted_s >= 0 for row in found.rows)
    assert {"operators", "messages", "fitting"} <= set(said)
    arguments = ["estimate", "gpt2", "--mesh", "data=2", "--global-batch", "2", "--seq-len", "16"]
    assert run([*arguments, "--cluster", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["step_time"]["total_s"] > 0


TORCHRUN = """
from autoshard.calibrate import calibrate
from autoshard.calibrate.catalogue import QUICK
found = calibrate(sizes=QUICK, window_s=0.002)
if found is not None:
    found.save("found.toml")
"""


@pytest.mark.multirank
def test_under_torchrun_the_first_rank_writes(tmp_path: Path) -> None:
    (tmp_path / "body.py").write_text(TORCHRUN)
    subprocess.run(
        [
            sys.executable,
            *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "body.py"],
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=240,
        capture_output=True,
    )
    assert Cluster.load(tmp_path / "found.toml").devices == 2


def test_processes_are_counted_from_one() -> None:
    with pytest.raises(RequestError, match="--processes must be a whole number from 1, found 0"):
        calibrate(0)


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", "--out", str(tmp_path / "none" / "cluster.toml")]) == 2
    assert "there is no folder" in capsys.readouterr().err
