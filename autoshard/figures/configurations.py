"""Step time and memory of each point of a sweep, as bars."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.drawing.scene import Scene
from autoshard.figures.bars import Bar, Part, stacked_bars
from autoshard.figures.palette import BLUE, TIME, VERMILION
from autoshard.figures.rows import Row, called, fits, varying
from autoshard.figures.scale import byte_unit, time_unit
from autoshard.render.units import bytes_text, seconds_text

MOST_BARS = 40
"""Bars of one picture; the others are in the table."""


def step_times(title: str, rows: Sequence[Row], *, width: float) -> Scene:
    """Step time of each row, split; rows that failed have their error instead of a bar."""
    shown = rows[:MOST_BARS]
    columns = varying(rows) or ["strategy"]
    bars = [
        Bar(label=called(r, columns), parts=_split(r), note=_step_note(r), bad=not fits(r))
        for r in shown
    ]
    return stacked_bars(
        title,
        bars,
        width=width,
        unit=time_unit(max((b.total for b in bars), default=0.0)),
        value_text=seconds_text,
        compact=True,
    )


def _split(row: Row) -> tuple[Part, ...]:
    step = float(row.get("step_time_s") or 0.0)
    compute = min(step, float(row.get("compute_s") or 0.0))
    exposed = min(step - compute, float(row.get("exposed_communication_s") or 0.0))
    seconds = {
        "compute": compute,
        "communication not hidden": exposed,
        "optimizer": max(0.0, step - compute - exposed),
    }
    return tuple(Part(name=n, value=s, color=TIME[n]) for n, s in seconds.items() if s > 0)


def _step_note(row: Row) -> str:
    if row.get("status") == "failed" or not row.get("step_time_s"):
        return _missing(row)
    return seconds_text(float(row["step_time_s"])) + ("" if fits(row) else ", does not fit")


def _missing(row: Row) -> str:
    error = str(row.get("error") or "").partition(":")[0]
    if row.get("status") == "failed":
        return f"failed: {error}" if error else "failed"
    return str(row.get("status") or "not known")


def memories(title: str, rows: Sequence[Row], *, width: float) -> Scene:
    """Memory of each row against the limit, where all have the same."""
    shown = rows[:MOST_BARS]
    columns = varying(rows) or ["strategy"]
    limits = {float(r["memory_limit_bytes"]) for r in shown if r.get("memory_limit_bytes")}
    limit = limits.pop() if len(limits) == 1 else None
    bars = []
    for row in shown:
        held = float(row.get("memory_bytes") or 0.0)
        name, color = ("fits", BLUE) if fits(row) else ("does not fit", VERMILION)
        bars.append(
            Bar(
                label=called(row, columns),
                parts=(Part(name=name, value=held, color=color),) if held else (),
                note=bytes_text(held) if held else _missing(row),
                bad=not fits(row),
            )
        )
    most = max((b.total for b in bars), default=0.0)
    if limit is not None and limit > 4 * most:
        limit = None  # far beyond all bars it would only make them small
    return stacked_bars(
        title,
        bars,
        width=width,
        unit=byte_unit(most),
        value_text=bytes_text,
        mark=None if limit is None else (limit, f"limit {bytes_text(limit)}"),
        compact=True,
        in_legend=False,
    )
