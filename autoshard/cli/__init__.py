"""The command line: read input, call the planner, write output."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

GARBAGE = 50_000
"""Objects more than there were from which on Python looks for cycles: its own 700 would take a
seventh of a command's time, most of which makes what stays."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit status."""
    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])
    from autoshard.cli.app import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
