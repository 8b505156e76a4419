"""What would change, as a table."""

from __future__ import annotations

from rich.console import RenderableType

from autoshard.answers import Outcome, WhatIfDocument
from autoshard.render.sections import Section, table
from autoshard.render.units import bytes_text, seconds_text


def what_if_table(answer: WhatIfDocument) -> RenderableType:
    """The answer for a terminal."""
    return table(what_if_sections(answer))


def what_if_sections(answer: WhatIfDocument) -> list[Section]:
    """The answer as a titled table."""
    base = answer.outcomes[0]
    notes = ["gain: samples a second over those without the change, with other lengths tokens"]
    notes += [
        f"{o.change or 'as it is'} does not fit: {o.binding}" for o in answer.outcomes if not o.fits
    ]
    return [
        Section(
            title=f"What if: {answer.model} on {base.devices} devices of {answer.cluster}",
            columns=("change", ">devices", "mesh", "plan", ">step", ">memory", ">gain"),
            rows=tuple(_row(outcome) for outcome in answer.outcomes),
            notes=tuple(notes),
        )
    ]


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.change or "as it is",
        str(outcome.devices),
        "-" if outcome.mesh is None else str(outcome.mesh),
        outcome.label or "does not fit",
        "-" if outcome.step_time_s is None else seconds_text(outcome.step_time_s),
        "-" if outcome.memory_bytes is None else bytes_text(outcome.memory_bytes),
        "-" if outcome.gain is None else f"{outcome.gain:.2f}x",
    )
