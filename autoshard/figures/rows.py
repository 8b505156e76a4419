"""Rows of a sweep as figures need them: what is done, what varies, and how a point is called.

A row is a plain mapping with the columns of :mod:`autoshard.sweeps.rows`; what is missing or None
is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

ASKED = ("model", "cluster", "devices", "global_batch", "seq_len", "dtype", "optimizer", "strategy")
"""Columns that say what a point is."""

KINDS = ("one device", "data", "fsdp", "tensor", "hybrid")
"""What a plan may amount to, in the order of legends."""


def done(rows: Sequence[Row]) -> list[Row]:
    """Rows with a predicted step time and memory."""
    return [
        r
        for r in rows
        if r.get("status", "done") == "done" and r.get("step_time_s") and r.get("memory_bytes")
    ]


def varying(rows: Sequence[Row], columns: Sequence[str] = ASKED) -> list[str]:
    """Those of the columns that have more than one value."""
    return [c for c in columns if len({_plain(r.get(c)) for r in rows}) > 1]


def called(row: Row, columns: Sequence[str]) -> str:
    """A point by what varies: ``8 devices, batch 64, fsdp``."""
    texts = []
    for column in columns:
        value = row.get(column)
        if value is None:
            continue
        if column == "devices":
            texts.append(f"{value:,} {'device' if value == 1 else 'devices'}")
        elif column == "global_batch":
            texts.append(f"batch {value:,}")
        elif column == "seq_len":
            texts.append(f"{value:,} tokens")
        else:
            texts.append(str(value))
    return ", ".join(texts) or str(row.get("strategy") or row.get("model") or "point")


def groups(rows: Sequence[Row], columns: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of columns, in the order in which they come."""
    out: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        out.setdefault(tuple(_plain(row.get(c)) for c in columns), []).append(row)
    return out


def fits(row: Row) -> bool:
    """Whether the prediction is within the limit; unknown counts as yes."""
    return row.get("fits") is not False


def kind_of(row: Row) -> str:
    """What a row's plan amounts to: the strategy that was asked for, or what ``auto`` came to."""
    strategy = str(row.get("strategy") or "auto")
    if row.get("devices") == 1:
        return "one device"
    if strategy in KINDS:
        return strategy
    label = str(row.get("label") or "").lower()
    used = {
        kind
        for kind, pattern in (
            ("data", r"data parallel"),
            ("fsdp", r"fsdp"),
            ("tensor", r"tensor parallel"),
        )
        if re.search(pattern, label)
    }
    return used.pop() if len(used) == 1 else "hybrid" if used else "auto"


def mesh_text(row: Row) -> str:
    """``4 x 2`` of ``data=4, model=2``; axes of size 1 left out, ``data=4`` where one is left."""
    parts = [part.strip() for part in str(row.get("mesh") or "").split(",")]
    active = [p for p in parts if "=" in p and p.partition("=")[2] != "1"]
    return active[0] if len(active) == 1 else " x ".join(p.partition("=")[2] for p in active)


def rate(row: Row) -> float:
    """Samples a second of all devices; 0 where it is not known."""
    if row.get("samples_per_s"):
        return float(row["samples_per_s"])
    if row.get("step_time_s") and row.get("global_batch"):
        return float(row["global_batch"]) / float(row["step_time_s"])
    return 0.0


def rate_text(samples_per_s: float) -> str:
    """``31.3 samples/s``, ``26,390 samples/s``."""
    shown = f"{samples_per_s:,.0f}" if samples_per_s >= 999.5 else f"{samples_per_s:.3g}"
    return f"{shown} samples/s"


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool) or value is None else str(value)
