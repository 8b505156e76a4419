"""Whole programs, run as people run them."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from autoshard.runtime.watch import trace
from tests.spmd.launching import ACCEPTANCE, PROGRAMS, start

OWN = ["products", "hybrid"]  # data_parallel: see the traced one
GIVEN = ["gemm", "train_data_parallel", "train_hybrid"]

pytestmark = pytest.mark.multirank


@pytest.mark.parametrize("ranks", [None, 4], ids=["python", "torchrun"])
@pytest.mark.parametrize("name", OWN)
def test_own_program(name: str, ranks: int | None) -> None:
    done = start(PROGRAMS / f"{name}.py", ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == (ranks or 1)


@pytest.mark.parametrize("ranks", [None, 4], ids=["python", "torchrun"])
@pytest.mark.parametrize("name", GIVEN)
def test_given_program(name: str, ranks: int | None) -> None:
    program = ACCEPTANCE / f"{name}.py"
    if not program.exists():
        pytest.skip("the programs to accept are not beside this checkout")
    done = start(program, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout


def test_ranks_that_differ_are_told_so() -> None:
    done = start(PROGRAMS / "disagreement.py", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == 2
    assert done.stdout.count("left: []") == 2


@pytest.mark.parametrize("name", ["interrupted", "pasted"])
def test_program_that_only_a_pool_runs(name: str) -> None:
    done = start(PROGRAMS / f"{name}.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout
    left = [int(word) for word in done.stdout.split()[1:] if word.isdigit()]
    assert not [pid for pid in left if psutil.pid_exists(pid)]


@pytest.mark.parametrize("ranks", [None, 4], ids=["python", "torchrun"])
def test_a_traced_program_leaves_one_trace(tmp_path: Path, ranks: int | None) -> None:
    done = start(
        PROGRAMS / "data_parallel.py", ranks=ranks, folder=tmp_path, AUTOSHARD_TRACE_COMM="1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^step 0: all_reduce .* kB over data", done.stdout, re.MULTILINE)
    assert done.stdout.count("step 2: ") == 1
    document = trace.load(tmp_path / "comm_trace.json")
    assert document["distributedInfo"]["world_size"] == 4
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {0, 1, 2, 3}
    for rank in range(4):
        mine = [e for e in events if e["pid"] == rank and e["args"]["step"] == 2]
        (backward,) = [e for e in mine if e["name"] == "backward"]
        gradients = [e for e in mine if e["args"].get("phase") == "backward"]
        assert min(e["ts"] for e in gradients) < backward["ts"] + backward["dur"]
