"""Ways to start a program, and ways for it to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from autoshard import DeviceMesh, PartitionSpec, profiler, spmd
from tests.spmd.launching import PROGRAMS, ROOT, start

pytestmark = pytest.mark.multirank

TEXT = """
import numpy as np
from autoshard import DeviceMesh, PartitionSpec, spmd

mesh = DeviceMesh(devices=[0, 1], axis_names=["data"])
offset = 3

def plus(x):
    return x + offset

@spmd(mesh=mesh, in_shardings=[PartitionSpec("data")])
def double(x):
    return 2 * plus(x)

assert (double(np.arange(4)) == [6, 8, 10, 12]).all()
print("ok")
"""


@pytest.mark.parametrize("way", ["-", "-c", "-i", "-m"])
def test_a_program_without_a_file_or_guard(way: str, tmp_path: Path) -> None:
    (tmp_path / "some_module.py").write_text(TEXT)
    rest = {"-c": [TEXT], "-m": ["some_module"]}.get(way, [])
    # To the interactive console a blank line ends a function, and a dedent without one is an error.
    typed = TEXT.replace("offset\n\n@", "offset\n\n\n@")
    done = subprocess.run(
        [sys.executable, way, *rest],
        input=typed if way in ("-", "-i") else "",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n", done.stderr


def test_failures_are_told_and_leave_nothing() -> None:
    done = start(PROGRAMS / "failures.py")
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    assert words[0] == "ok"
    assert len(words) > 10
    assert not [pid for pid in map(int, words[1:]) if psutil.pid_exists(pid)]


@pytest.mark.parametrize("ranks", [None, 4], ids=["python", "torchrun"])
def test_an_operator_of_the_script_and_its_rule(ranks: int | None) -> None:
    done = start(PROGRAMS / "custom_operator.py", ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == (ranks or 1)


def test_nothing_is_recorded_when_nobody_watches() -> None:
    def recorder() -> str:
        from autoshard.runtime.eager.patches import current_engine

        engine = current_engine()
        assert engine is not None
        return type(engine.comm.recorder).__name__

    mesh = DeviceMesh(devices=[0, 1], axis_names=["data"])
    function = spmd(mesh=mesh)(recorder)
    assert function() == "NoneType"
    with profiler():
        assert function() != "NoneType"
    assert function() == "NoneType"


def test_patterns_of_parameters_in_a_dict() -> None:
    """The first pattern that fits counts; those that nothing is said of stay whole."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))

    def local_shapes(model: torch.nn.Module, x: torch.Tensor) -> dict[str, tuple[int, ...]]:
        with torch._C.DisableTorchFunction():
            return {name: tuple(p.size()) for name, p in model.named_parameters()}

    mesh = DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=["data", "model"])
    rules = {
        "0.bias": PartitionSpec(),
        "0.*": PartitionSpec("model"),
        "*.weight": PartitionSpec(None, "model"),
    }
    with pytest.warns(UserWarning, match="saves at most .* costs at least"):
        found = spmd(mesh=mesh, parameter_shardings=rules)(local_shapes)(model, torch.ones(2, 4))
    assert found == {
        "0.weight": (3, 4),
        "0.bias": (6,),
        "1.weight": (4, 3),
        "1.bias": (4,),
    }
