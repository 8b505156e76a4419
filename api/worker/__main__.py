"""``python -m autoshard.api.worker``: workers without a server, for more machines or processes.

Settings come from the environment, as the server's; ``--supervised`` is for the server: they come
as one line of JSON on stdin (so that no password is seen in a list of processes), and the end of
stdin is the end of the server.
"""

from __future__ import annotations

import argparse
import os
import sys

from autoshard.api.settings import Settings
from autoshard.api.worker import nursery
from autoshard.errors import AutoshardError


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m autoshard.api.worker", description=__doc__)
    parser.add_argument("--database", help="URL; default: AUTOSHARD_SERVE_DATABASE")
    parser.add_argument("--workers", type=int, help="how many; default: 1")
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.supervised:
        nursery.main(Settings.model_validate_json(_first_line(0)), server=0)
        return
    settings = Settings()
    changed = {"database": given.database, "workers": given.workers}
    settings = settings.model_copy(
        update={name: value for name, value in changed.items() if value is not None}
    )
    nursery.main(settings, server=None)


def _first_line(fd: int) -> bytes:
    """Byte by byte: what follows is not for this process to read."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


if __name__ == "__main__":
    try:
        main()
    except AutoshardError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
