"""Programs as people start them: by ``python``, and by ``torchrun``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
ACCEPTANCE = ROOT.parent / "shared" / "acceptance"


def start(
    program: Path,
    *arguments: str,
    ranks: int | None = None,
    folder: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, under torchrun if ``ranks`` are given."""
    command = [sys.executable]
    if ranks is not None:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        # A port of its own: --standalone, as torchrun does without an endpoint.
        command += ["--standalone"]
    return subprocess.run(
        [*command, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder or program.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )
