"""A plan beside another mesh, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from autoshard.answers import ExplanationDocument, Part, WhyNotDocument
from autoshard.render.sections import Section, table
from autoshard.render.units import bytes_text, seconds_text


def why_not_table(answer: WhyNotDocument) -> RenderableType:
    """The answer for a terminal."""
    return table(why_not_sections(answer))


def why_not_sections(answer: WhyNotDocument) -> list[Section]:
    """The answer as titled tables."""
    head = Section(
        title=f"Why not {answer.asked}: {answer.verdict}",
        columns=("", ""),
        rows=(("the plan", answer.plan), (answer.asked, answer.other)),
        tone="" if answer.fits else "bad",
    )
    return [
        head,
        _section("Step time", answer, answer.time, total=True),
        *([_section("Messages", answer, answer.messages)] if answer.messages else []),
        *([_section("Modules", answer, answer.places)] if answer.places else []),
        _section("Memory of the fullest device", answer, answer.memory, total=True),
    ]


def explanation_table(answer: ExplanationDocument) -> RenderableType:
    """The answer for a terminal."""
    return table(explanation_sections(answer))


def explanation_sections(answer: ExplanationDocument) -> list[Section]:
    """All alternatives in one table, then each part by part."""
    rows = [
        (
            a.asked,
            a.other,
            seconds_text(a.time[-1].other),
            bytes_text(a.memory[-1].other),
            a.verdict,
        )
        for a in answer.alternatives
    ]
    plan = ("the plan", answer.plan, seconds_text(answer.step_time_s))
    head = Section(
        title=f"Why {answer.plan}: {answer.model} on {answer.cluster}",
        columns=("", "plan", ">step", ">memory", "what it loses"),
        rows=((*plan, bytes_text(answer.memory_bytes), ""), *rows),
    )
    return [head, *(s for a in answer.alternatives for s in why_not_sections(a))]


def _section(
    title: str, answer: WhyNotDocument, parts: Sequence[Part], *, total: bool = False
) -> Section:
    return Section(
        title=title,
        columns=("", ">plan", f">{answer.asked}", ">more"),
        rows=tuple(_row(part) for part in parts),
        total=total,
    )


def _row(part: Part) -> tuple[str, ...]:
    text = seconds_text if part.unit == "s" else bytes_text
    more = part.other - part.plan
    sign = "-" if more < 0 else "+"
    return part.name, text(part.plan), text(part.other), f"{sign}{text(abs(more))}" if more else ""
