"""The command line: read input, call the planner, write output."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit status."""
    from autoshard.cli.app import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
