"""A file of very many runs like the published ones, to see how long pricing takes.

    python -m benchmarks.published.many FILE.csv [--rows 2000]
    python -m benchmarks.published_runs FILE.csv

The published rows; then each of them on 2, 4, 8 times as many devices along data with a batch as
much larger, every other such round with another vocabulary (another graph, so that it is not all
found in what earlier rows left). What was measured stays as it is and means nothing for them.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "published_runs.csv"

TIMES = 2
"""How many times as many devices each round has as the one before."""

ADDED_TOKENS = 1024
"""By how much the vocabulary of every other round is larger."""


def rounds(rows: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The rows, then larger and larger ones; without end."""
    yield from rows
    number = 1
    while True:
        yield from (grown(row, number) for row in rows)
        number += 1


def grown(row: Mapping[str, str], number: int) -> dict[str, str]:
    """A row of the round of that number, from 1."""
    times = TIMES ** (number % 3 + 1)
    out = dict(row) | {"id": f"{row['id']}-{number}"}
    for column in ("num_gpus", "dp", "global_batch"):
        if row[column]:
            out[column] = str(int(row[column]) * times)
    if number % 2:
        out["vocab"] = str(int(row["vocab"]) + ADDED_TOKENS * number)
    return out


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    asked = parser.parse_args()
    with DATA.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with asked.file.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for _, row in zip(range(asked.rows), rounds(rows), strict=False):
            writer.writerow(row)


if __name__ == "__main__":
    main()
