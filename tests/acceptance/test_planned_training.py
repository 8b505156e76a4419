"""A plan lowered under torchrun trains like the model on one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "train_planned.py"


@pytest.mark.multirank
def test_training_under_torchrun_equals_one_device() -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = subprocess.run(
        [*run, str(PROGRAM)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("equal") == 2


def test_without_processes_the_error_says_how_to_get_them() -> None:
    import torch
    from torch import nn

    import autoshard

    plan = autoshard.optimize(
        nn.Linear(8, 8), torch.zeros(4, 8), cluster="local", devices=2, progress=None
    )
    with pytest.raises(autoshard.RequestError, match="torchrun --nproc-per-node 2"):
        plan.lower()
