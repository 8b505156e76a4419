"""200 kills: SIGKILL of the service's processes at random moments, with 50 jobs in flight.

Each job that was accepted with a 202 must end exactly once, with the plan of an undisturbed run,
byte for byte. On SQLite and, where it is installed, on PostgreSQL:

    python -m benchmarks.service_kills [--kills 200] [--in-flight 50] [--workers 2] [--seed 0]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.service import kills, postgres


def main(arguments: list[str] | None = None) -> None:
    """Run it and print what came of it; fails where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--in-flight", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", choices=["sqlite", "postgresql", "both"], default="both")
    given = parser.parse_args([] if arguments is None else arguments)
    requests = kills.small_requests()
    with tempfile.TemporaryDirectory(prefix="autoshard-kills-") as name:
        folder = Path(name)
        expected = kills.undisturbed(folder, requests, workers=given.workers)
        print(f"undisturbed: {len(expected)} plans")

        def run(title: str, database: str) -> None:
            outcome = kills.disturbed(
                database,
                folder / f"{title}.log",
                requests,
                expected,
                kills=given.kills,
                in_flight=given.in_flight,
                workers=given.workers,
                seed=given.seed,
            )
            killed = ", ".join(f"{n} of the {what}" for what, n in sorted(outcome.kills.items()))
            often = ", ".join(f"{n} begun {k} times" for k, n in sorted(outcome.attempts.items()))
            print(
                f"{title}: {outcome.kills.total()} kills ({killed}) in {outcome.seconds:.0f} s; "
                f"{outcome.accepted} jobs accepted ({often}); {len(outcome.wrong)} wrong",
                flush=True,
            )
            if outcome.wrong:
                raise SystemExit("\n".join(outcome.wrong[:20]))

        if given.database != "postgresql":
            run("SQLite", f"sqlite:///{folder / 'service.db'}")
        if given.database != "sqlite":
            if postgres.programs() is None:
                print("PostgreSQL is not installed")
                return
            with postgres.server() as url:
                run("PostgreSQL", postgres.new_database(url, "kills"))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
