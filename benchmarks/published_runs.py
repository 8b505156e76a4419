"""Every published run of a file beside what ``autoshard.estimate`` says of it.

    python -m benchmarks.published_runs FILE.csv [--json] [--sources mpt,meg21] [--every N]

The columns are those of ``benchmarks/data/published_runs.csv``. Errors are (predicted - measured) /
measured; the overall figure is the mean over sources of each one's mean absolute error, of rows in
16 bits or more; those below are apart. Rows that an estimate cannot express are listed with the
reason. Two processes share the rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.pricing import Priced, shared
from benchmarks.published.rows import ASSUMED, complete, is_full_precision, source
from benchmarks.published.scores import figures

DATA = Path(__file__).parent / "data" / "published_runs.csv"

WORST = 5
"""Rows of each source that are shown with their parts."""


def table(title: str, sources: Mapping[str, Mapping[str, Any]], mean: float | None) -> None:
    """Errors of each source, and their mean."""
    print(f"{title:14}{'rows':>6}{'error':>9}{'bias':>9}")
    for name, s in sources.items():
        print(f"{name:14}{s['rows']:6d}{s['mape']:9.1%}{s['bias']:+9.1%}")
    if mean is not None:
        print(f"mean over sources: {mean:.1%}")


def worst(found: Sequence[Priced]) -> None:
    """The rows of each source that are furthest off."""
    for name in sorted({source(p.row) for p in found}):
        own = [p for p in found if not p.reason and source(p.row) == name]
        if not own:
            continue
        print(f"\nworst of {name}:")
        for p in sorted(own, key=lambda p: -abs(p.error))[:WORST]:
            mark = f" r:{p.recompute}" if p.recompute else ""
            print(
                f"  {p.row['id']} {p.row['model_name']} on {p.row['num_gpus']} "
                f"{p.row['hardware']}{mark}: measured {p.measured_s:.3f} s, predicted "
                f"{p.predicted_s:.3f} ({p.error:+.1%}): {p.parts}"
            )


def show(found: Sequence[Priced]) -> None:
    """The figures for people."""
    document = figures(found)
    full = [p for p in found if is_full_precision(p.row)]
    priced = sum(not p.reason for p in full)
    print(f"{len(found)} rows; {len(full)} in 16 bits or more, {priced} of them priced\n")
    table("16 bits, more", document["sources"], document["mean_mape"])
    if document["mean_bias"] is not None:
        print(f"mean bias: {document['mean_bias']:+.1%}")
    low = document["low_precision"]
    print()
    table("below 16 bits", low["sources"], low["mean_mape"])
    ranking = document["ranking"]
    print(f"\nconfigurations of one model on as many devices: {len(ranking['groups'])} groups")
    for g in ranking["groups"]:
        tau = "  none" if g["tau"] is None else f"{g['tau']:6.2f}"
        print(f"  tau {tau}  regret {g['regret']:6.1%}  {g['rows']:3d} of {g['name']}")
    if ranking["mean_tau"] is not None:
        print(f"mean tau {ranking['mean_tau']:.2f}, mean regret {ranking['mean_regret']:.1%}")
    worst(found)
    if document["skipped"]:
        print(f"\n{len(document['skipped'])} rows were not priced:")
        for reason, count in Counter(s["reason"] for s in document["skipped"]).most_common():
            named = ", ".join(s["id"] for s in document["skipped"] if s["reason"] == reason)
            print(f"  {count:4d}  {reason}: {named}")
    print("\nassumed:")
    for line in ASSUMED:
        print(f"  - {line}")
    recomputed = [p.row["id"] for p in found if p.recompute not in ("", "none")]
    if recomputed:
        print(f"  recomputation assumed of {', '.join(recomputed)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Price a file."""
    parser = argparse.ArgumentParser(description="published runs against the cost model")
    parser.add_argument("file", nargs="?", default=str(DATA), help="default: the project's own")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--sources", help="only these, by the prefix of the id")
    parser.add_argument("--every", type=int, default=1, help="only every N-th row")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    with open(options.file, encoding="utf-8") as file:
        rows = [complete(r) for r in csv.DictReader(file)]
    if options.sources:
        wanted = set(options.sources.split(","))
        rows = [r for r in rows if source(r) in wanted]
    found = shared(rows[:: options.every], options.processes)
    if options.json:
        json.dump(figures(found), sys.stdout)
    else:
        show(found)


if __name__ == "__main__":
    main()
