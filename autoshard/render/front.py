"""Step time against memory, as a table."""

from __future__ import annotations

from rich.console import RenderableType

from autoshard.answers import FrontDocument
from autoshard.render.sections import Section, table
from autoshard.render.units import bytes_text, seconds_text


def front_table(answer: FrontDocument) -> RenderableType:
    """The answer for a terminal."""
    return table(front_sections(answer))


def front_sections(answer: FrontDocument) -> list[Section]:
    """The answer as a titled table."""
    first = answer.points[0]
    rows = tuple(
        (
            str(p.mesh),
            p.label,
            seconds_text(p.step_time_s),
            f"{p.step_time_s / first.step_time_s:.3f}x",
            bytes_text(p.memory_bytes),
        )
        for p in answer.points
    )
    note = (
        "found by a sampler; there may be better ones"
        if answer.spacing is None
        else "nothing that was priced is faster within a row's memory; between rows is what saves "
        f"less than {answer.spacing:.1%}"
    )
    return [
        Section(
            title=f"Step time against memory: {answer.model} on {answer.cluster}",
            columns=("mesh", "plan", ">step", ">", ">memory"),
            rows=rows,
            notes=(note,),
        )
    ]
