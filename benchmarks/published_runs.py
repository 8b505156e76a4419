"""Every published run of a file beside what ``autoshard.estimate`` says of it.

    python -m benchmarks.published_runs FILE.csv [--json] [--sources mpt,meg21] [--every N]

The columns are those of ``benchmarks/data/published_runs.csv``. Errors are (predicted - measured) /
measured; the overall figure is the mean over sources of each one's mean absolute error. Rows that
an estimate cannot express are listed with the reason. Two processes share the rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError
from autoshard.planner.capture import capture
from benchmarks.published.rows import ASSUMED, Inexpressible, is_full_precision, request, source

WORST = 5
"""Rows of each source that are shown with their parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A row with its figures, or why there are none."""

    row: Mapping[str, str]
    predicted_s: float = 0.0
    parts: str = ""
    reason: str = ""

    @property
    def measured_s(self) -> float:
        """Published seconds of a step."""
        return float(self.row["step_time_s"])

    @property
    def error(self) -> float:
        """Relative error."""
        return self.predicted_s / self.measured_s - 1


def cluster_of(preset: str, precision: str, devices: int) -> Cluster:
    """The preset; products of float32 run as the row's precision says."""
    found = Cluster.preset(preset)
    peaks = dict(found.device.peak_flops_per_second)
    if precision:
        peaks["float32"] = (
            peaks.get("tf32", peaks["float32"]) if precision == "tf32" else (peaks["float32"])
        )
        found = replace(found, device=replace(found.device, peak_flops_per_second=peaks))
    return found if devices < found.devices_per_node else found.with_devices(devices)


def price(row: Mapping[str, str], captured: dict[object, Any]) -> Priced:
    """One row by the planner's own estimate."""
    try:
        asked = request(row)
        options = dict(asked.options)
        preset, precision = options.pop("cluster")
        devices = options.pop("devices")
        cluster = cluster_of(preset, precision, devices)
        if devices < cluster.devices:
            cluster = replace(cluster, devices=devices)
        if asked.key not in captured:
            captured.clear()  # rows of one model stand together
            captured[asked.key] = capture(asked.model, asked.inputs)
        plan = autoshard.estimate(
            asked.model, cluster=cluster, captured=captured[asked.key], progress=False, **options
        )
    except (Inexpressible, AutoshardError) as error:
        return Priced(row=row, reason=str(error).splitlines()[0])
    t = plan.step_time
    parts = (
        f"compute {t.compute_s:.3f}, optimizer {t.optimizer_s:.3f}, communication "
        f"{t.communication_s:.3f} ({t.exposed_communication_s:.3f} exposed)"
    )
    return Priced(row=row, predicted_s=t.total_s, parts=parts)


def price_all(rows: Sequence[Mapping[str, str]]) -> list[Priced]:
    """All rows of one process, those of one model and batch one after another."""
    torch.set_num_threads(1)
    captured: dict[object, Any] = {}
    return [price(row, captured) for row in rows]


def _key(row: Mapping[str, str]) -> tuple[str, ...]:
    names = ("model_name", "layers", "hidden", "seq_len", "mean_seq_len", "precision")
    samples = str(float(row["micro_batch"]) * float(row["dp"] or 1))
    return (*(row[n] for n in names), samples)


def shared(rows: list[Mapping[str, str]], processes: int) -> list[Priced]:
    """All rows, over ``processes``."""
    rows = sorted(rows, key=_key)
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        groups[_key(row)].append(row)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return [p for found in pool.map(price_all, groups.values()) for p in found]


def figures(found: Sequence[Priced]) -> dict[str, Any]:
    """Errors by source and over all."""
    by_source: dict[str, list[Priced]] = defaultdict(list)
    for p in found:
        if not p.reason:
            by_source[source(p.row)].append(p)
    sources = {
        name: {
            "rows": len(ps),
            "mape": sum(abs(p.error) for p in ps) / len(ps),
            "bias": sum(p.error for p in ps) / len(ps),
        }
        for name, ps in sorted(by_source.items())
    }
    mean = sum(s["mape"] for s in sources.values()) / len(sources) if sources else None
    return {
        "mean_mape": mean,
        "sources": sources,
        "skipped": [{"id": p.row["id"], "reason": p.reason} for p in found if p.reason],
    }


def show(found: Sequence[Priced]) -> None:
    """The figures for people."""
    document = figures(found)
    print(f"{'source':12}{'rows':>6}{'error':>9}{'bias':>9}")
    for name, s in document["sources"].items():
        print(f"{name:12}{s['rows']:6d}{s['mape']:9.1%}{s['bias']:+9.1%}")
    if document["mean_mape"] is not None:
        print(f"mean over sources: {document['mean_mape']:.1%}")
    for name in document["sources"]:
        own = [p for p in found if not p.reason and source(p.row) == name]
        print(f"\nworst of {name}:")
        for p in sorted(own, key=lambda p: -abs(p.error))[:WORST]:
            print(
                f"  {p.row['id']} {p.row['model_name']} on {p.row['num_gpus']} "
                f"{p.row['hardware']}: measured {p.measured_s:.3f} s, predicted "
                f"{p.predicted_s:.3f} ({p.error:+.1%}): {p.parts}"
            )
    if document["skipped"]:
        print(f"\n{len(document['skipped'])} rows were not priced:")
        for reason, count in Counter(s["reason"] for s in document["skipped"]).most_common():
            print(f"  {count:4d}  {reason}")
    print("\nassumed:")
    for line in ASSUMED:
        print(f"  - {line}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Price a file."""
    parser = argparse.ArgumentParser(description="published runs against the cost model")
    parser.add_argument("file")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--sources", help="only these, by the prefix of the id")
    parser.add_argument("--every", type=int, default=1, help="only every N-th row")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    with open(options.file, encoding="utf-8") as file:
        rows: list[Mapping[str, str]] = list(csv.DictReader(file))
    if options.sources:
        wanted = set(options.sources.split(","))
        rows = [r for r in rows if source(r) in wanted]
    found = shared(rows[:: options.every], options.processes)
    full = [p for p in found if is_full_precision(p.row)]
    if options.json:
        json.dump(figures(found), sys.stdout)
    else:
        print(f"{len(found)} rows, {len(full)} of them in 16 bits or more")
        show(found)


if __name__ == "__main__":
    main()
