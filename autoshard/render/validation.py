"""What a validation found, for people: predicted beside measured."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from autoshard.render.memory import beside_each_other
from autoshard.render.sections import Section, bullets, table
from autoshard.render.units import bytes_text, difference_text, seconds_text

MOST_NUMBERS = 12
"""Most tensors that are listed; the worst come first."""


def validation_table(report: object) -> RenderableType:
    """The report for a terminal; see :func:`validation_sections`."""
    return table(validation_sections(report))


def validation_sections(report: Any) -> list[Section]:
    """A validation's report as titled tables.

    Args:
        report: an ``autoshard.validation.ValidationReport`` or ``DryRunReport``.
    """
    ok = bool(report.passed)
    said = "passed" if ok else "failed"
    tone = "good" if ok else "bad"
    if not hasattr(report, "checks"):
        at = ", ".join(map(str, report.coordinate))
        title = f"Dry run of device ({at}) of {report.devices:,}: {said}"
        traced = f"{report.nodes:,} operators and leaves traced in {seconds_text(report.seconds)}"
        return [
            Section(title=title, lines=(traced,), tone=tone),
            _collectives(report.collectives),
        ]
    head = f"Validation on {report.devices} processes, mesh {report.mesh}: {said}"
    return [
        Section(title=head, lines=(f"in {seconds_text(report.seconds)}",), tone=tone),
        *_numbers(report),
        _collectives(report.collectives),
        *_capture(report.capture),
        *_costs(
            (report.predicted_step_seconds, report.step_seconds),
            (report.predicted_peak_bytes, report.peak_bytes),
            beside_each_other(report.predicted_memory, report.memory),
            report.memory_method,
        ),
    ]


def _numbers(report: Any) -> list[Section]:
    rows = sorted(report.checks, key=_badness, reverse=True)
    if not rows:
        return []
    counts: dict[str, int] = {}
    for check in rows:
        counts[check.kind] = counts.get(check.kind, 0) + 1
    summary = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    worst = f"largest difference {rows[0].deviation:.1e}; allowed {report.tolerance:.1e}"
    left = len(rows) - MOST_NUMBERS
    return [
        Section(
            title=f"Numbers in {report.dtype}, compared with one device",
            lines=(f"{summary}: {worst}",),
            columns=("", "", ">difference"),
            rows=tuple((c.name, c.kind, f"{c.deviation:.1e}") for c in rows[:MOST_NUMBERS]),
            notes=(f"and {left} more, none larger",) if left > 0 else (),
        )
    ]


def _badness(check: Any) -> float:
    off = float(check.deviation)
    return off if off == off else float("inf")


def _collectives(found: Any) -> Section:
    lines = [f"predicted {found.predicted:,}, issued {found.issued:,}"]
    if found.differences:
        lines += bullets((f"{found.differences} differences; the first: {found.first}",))
    else:
        lines.append("equal, item by item (operation, axes, bytes), on every device checked")
    return Section(
        title="Collectives of one step",
        lines=tuple(lines),
        tone="bad" if found.differences else "",
    )


def _capture(found: Any) -> list[Section]:
    if found.skipped:
        text = f"not compared: {found.skipped}"
    elif found.worst is None:
        return []
    else:
        agrees = "agree" if found.agrees else "DIFFER"
        text = (
            f"in {found.dtype} they {agrees}: at most {found.worst.deviation:.1e} "
            f"({found.worst.kind} {found.worst.name}; rounding allows {found.tolerance:.0e})"
        )
    tone = "warn" if not found.skipped and not found.agrees else ""
    return [Section(title="The module itself beside its graph", lines=(text,), tone=tone)]


def _costs(
    step_time: Any, memory: Any, categories: list[tuple[str, int, int]], method: str
) -> list[Section]:
    rows = []
    for name, pair, text in (
        ("step time, forward and backward", step_time, seconds_text),
        ("peak memory", memory, bytes_text),
        *((f"  {name}", (said, found), bytes_text) for name, said, found in categories),
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
            notes=(f"memory measured: {method}",),
        )
    ]
