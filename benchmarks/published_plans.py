"""Plans of the whole space beside what publishers ran: the same model, cluster and batch.

    python -m benchmarks.published_plans [FILE.csv] [--json] [--only mpt,meg21] [--limit N]

Rows of one model, cluster, global batch, length and precision are one case; the publisher's
configuration is the one that ``autoshard.estimate`` predicts the fastest. How the two are compared:
:mod:`benchmarks.published.searched`. A gain is (theirs / ours - 1) of seconds. Cases are written as
they come; with ``--json`` each is a document on a line of its own, as is the summary at the end.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.published.cases import Case, cases_of
from benchmarks.published.pricing import Known
from benchmarks.published.rows import complete, source
from benchmarks.published.searched import Compared, Configured, compare
from benchmarks.published_runs import DATA

PROCESSES = 2

LARGE = 0.2
"""A gain that wants a reason."""

_KNOWN = Known()
"""What is known in this process: cases have models in common."""


def compared(cases: Sequence[Case]) -> Iterator[Compared]:
    """Each case, over two processes, in order."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn, initializer=_begin) as pool:
        yield from pool.map(_compare, cases)


def _begin() -> None:
    torch.set_num_threads(1)


def _compare(case: Case) -> Compared:
    return compare(case, _KNOWN)


def spread_out(cases: Sequence[Case], limit: int) -> list[Case]:
    """At most ``limit`` cases of each source, evenly from its first to its last."""
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_source[source(case.rows[0])].append(case)
    kept = [
        case
        for own in by_source.values()
        for case in (
            own if len(own) <= limit else [own[i * len(own) // limit] for i in range(limit)]
        )
    ]
    return [case for case in cases if case in kept]


def summary(found: Sequence[Compared]) -> dict[str, Any]:
    """What the cases say together."""
    good = [f for f in found if not f.reason]
    gains = [f.gain for f in good]
    return {
        "cases": len(found),
        "compared": len(good),
        "rows": sum(len(f.ids) for f in good),
        "no_slower": sum(not f.is_slower for f in good),
        "no_slower_plain": sum(f.plain_gain >= -1e-9 for f in good),
        "raised": sum(f.raised for f in good),
        "median_gain": median(gains) if gains else None,
        "large": [f.best for f in good if f.gain > LARGE],
        "slower": {f.best: f.gain for f in good if f.is_slower},
        "lacking": dict(Counter(what for f in good if f.is_slower for what in f.lacks)),
        "by_source": {
            name: {
                "cases": len(own),
                "no_slower": sum(not f.is_slower for f in own),
                "median_gain": median(f.gain for f in own),
                "least_gain": min(f.gain for f in own),
                "most_gain": max(f.gain for f in own),
            }
            for name, own in sorted(_by_source(good).items())
        },
        "not_compared": dict(Counter(f.reason for f in found if f.reason)),
    }


def _by_source(found: Sequence[Compared]) -> Mapping[str, list[Compared]]:
    out: dict[str, list[Compared]] = defaultdict(list)
    for f in found:
        out[f.case.split(":")[0]].append(f)
    return out


def show(f: Compared) -> None:
    """One case, for people."""
    print(f"{f.best or f.ids[0]}  {f.case}" + (f"  ({len(f.ids)} rows)" if f.ids[1:] else ""))
    if f.theirs is None or f.ours is None:
        print(f"    not compared: {f.reason}", flush=True)
        return
    print(f"    gain {f.gain:+.1%}; measured {f.measured_s:.3f} s" + _memory(f))
    for who, c in (("theirs", f.theirs), ("ours", f.ours)):
        print(f"    {who:7}{c.seconds:10.4f} s  {c.label}")
        print(f"           {_parts(c)}; {c.memory_bytes / 1e9:.1f} GB")
    if f.is_slower:
        at = "no such arrangement" if f.at_theirs_s is None else f"{f.at_theirs_s:.4f} s"
        print(f"    their arrangement, our strategies: {at}; lacking: {', '.join(f.lacks) or '-'}")
        if f.overlapped:
            print(f"    without messages beside computing: gain {f.plain_gain:+.1%}")
    print(end="", flush=True)


def _memory(f: Compared) -> str:
    if not f.raised:
        return ""
    within = "nothing fits" if f.within_s is None else f"{f.within_s:.4f} s"
    return (
        f"; theirs needs {f.limit_bytes / 1e9:.1f} GB, more than there is (within that: {within})"
    )


def _parts(c: Configured) -> str:
    return ", ".join(f"{name} {seconds:.4f}" for name, seconds in c.parts.items())


def show_summary(document: Mapping[str, Any], left: Mapping[str, str]) -> None:
    """All cases, for people."""
    print(
        f"\n{document['compared']} of {document['cases']} cases compared, {document['rows']} rows: "
        f"{document['no_slower']} no slower, median gain {document['median_gain'] or 0:.1%}; "
        f"{document['no_slower_plain']} no slower with no messages beside computing; "
        f"{document['raised']} with more memory than there is"
    )
    print(f"{'':10}{'cases':>6}{'no slower':>11}{'least':>9}{'median':>9}{'most':>9}")
    for name, s in document["by_source"].items():
        gains = "".join(f"{s[k]:+9.1%}" for k in ("least_gain", "median_gain", "most_gain"))
        print(f"{name:10}{s['cases']:6d}{s['no_slower']:11d}{gains}")
    print(f"gain above {LARGE:.0%}: {', '.join(document['large']) or 'none'}")
    for name, gain in document["slower"].items():
        print(f"  slower: {name} {gain:+.2%}")
    for what, count in document["lacking"].items():
        print(f"  of them with {what}: {count}")
    for reason, count in Counter(left.values()).most_common():
        named = ", ".join(name for name, why in left.items() if why == reason)
        print(f"  rows not priced: {count:4d}  {reason}: {named}")
    for reason, count in document["not_compared"].items():
        print(f"  cases not compared: {count}  {reason}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare a file."""
    parser = argparse.ArgumentParser(description="plans of the whole space beside published runs")
    parser.add_argument("file", nargs="?", default=str(DATA), help="default: the project's own")
    parser.add_argument("--json", action="store_true", help="a JSON document a line")
    parser.add_argument("--only", help="only these sources, by the prefix of the id")
    parser.add_argument("--limit", type=int, help="at most so many cases of each source")
    options = parser.parse_args(arguments)
    with Path(options.file).open(encoding="utf-8") as file:
        rows = [complete(r) for r in csv.DictReader(file)]
    if options.only:
        wanted = set(options.only.split(","))
        rows = [r for r in rows if source(r) in wanted]
    cases, left = cases_of(rows)
    if options.limit:
        cases = spread_out(cases, options.limit)
    found = []
    for one in compared(cases):
        found.append(one)
        if options.json:
            print(json.dumps(one.document()), flush=True)
        else:
            show(one)
    if options.json:
        print(json.dumps({"summary": summary(found), "not_priced": left}))
    else:
        show_summary(summary(found), left)


if __name__ == "__main__":
    main()
