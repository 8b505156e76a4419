"""What a validation found, for people: predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType

from autoshard.render.sections import Section, bullets, table
from autoshard.render.units import bytes_text, difference_text, seconds_text

MOST_NUMBERS = 12
"""Most tensors that are listed; the worst come first."""


def validation_table(report: object) -> RenderableType:
    """The report for a terminal; see :func:`validation_sections`."""
    return table(validation_sections(report))


def validation_sections(report: object) -> list[Section]:
    """A validation's report as titled tables.

    Args:
        report: an object or a mapping with any of ``ok`` (bool), ``plan``, ``numbers`` ((name,
            kind, error), ...), ``tolerance``, ``collectives`` (``predicted`` and ``issued`` counts,
            ``differences`` texts; object, mapping or triple), ``step_time`` and ``memory``
            ((predicted, measured); either may be None), ``warnings``.
    """
    ok = bool(_get(report, "ok"))
    label = getattr(_get(report, "plan"), "label", None)
    what = f" of {label}" if label else ""
    out = [
        Section(
            title=f"Validation{what}: {'passed' if ok else 'failed'}",
            tone="good" if ok else "bad",
        )
    ]
    out += _numbers(_get(report, "numbers"), _get(report, "tolerance"))
    out += _collectives(_get(report, "collectives"))
    out += _costs(_get(report, "step_time"), _get(report, "memory"))
    warnings = _get(report, "warnings")
    if warnings:
        out.append(Section(title="Warnings", lines=bullets(warnings), tone="warn"))
    return out


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _numbers(numbers: Any, tolerance: Any) -> list[Section]:
    if numbers is None:
        return []
    rows = sorted(((str(n), str(k), float(e)) for n, k, e in numbers), key=_badness, reverse=True)
    if not rows:
        return []
    counts: dict[str, int] = {}
    for _, kind, _ in rows:
        counts[kind] = counts.get(kind, 0) + 1
    summary = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    limit = f"; allowed {tolerance:.1e}" if isinstance(tolerance, float) else ""
    left = len(rows) - MOST_NUMBERS
    return [
        Section(
            title="Numbers, compared with one device",
            lines=(f"{summary}: largest difference {rows[0][2]:.1e}{limit}",),
            columns=("", "", ">difference"),
            rows=tuple((name, kind, f"{error:.1e}") for name, kind, error in rows[:MOST_NUMBERS]),
            notes=(f"and {left} more, none larger",) if left > 0 else (),
        )
    ]


def _badness(row: tuple[str, str, float]) -> float:
    return row[2] if row[2] == row[2] else float("inf")


def _collectives(found: Any) -> list[Section]:
    if found is None:
        return []
    if isinstance(found, tuple | list):
        predicted, issued, differences = found
    else:
        predicted = _get(found, "predicted")
        issued = _get(found, "issued")
        differences = _get(found, "differences")
    differences = [str(d) for d in differences or ()]
    lines = [f"predicted {predicted}, issued {issued}"]
    lines += list(bullets(differences)) or ["equal, item by item"]
    return [Section(title="Collectives", lines=tuple(lines), tone="bad" if differences else "")]


def _costs(step_time: Any, memory: Any) -> list[Section]:
    rows = []
    for name, pair, text in (
        ("step time", step_time, seconds_text),
        ("peak memory", memory, bytes_text),
    ):
        if pair is None:
            continue
        predicted, measured = pair
        if predicted is None and measured is None:
            continue
        both = predicted is not None and measured is not None
        rows.append(
            (
                name,
                "-" if predicted is None else text(predicted),
                "-" if measured is None else text(measured),
                difference_text(predicted, measured) if both else "",
            )
        )
    if not rows:
        return []
    return [
        Section(
            title="Predicted and measured",
            columns=("", ">predicted", ">measured", ">difference"),
            rows=tuple(rows),
        )
    ]
