"""What is shown, as plain texts: one form for the terminal and for HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table with a title, lines above and below it.

    Attributes:
        title: what it is about.
        columns: names; one that begins with ``>`` is aligned right, with ``*`` it is a bar, with
            ``.`` its texts are dotted names.
        rows: texts, one a column.
        total: whether the last row sums up the others.
        lines: what stands before the table.
        drawing: lines that keep their spaces.
        notes: what stands after the table.
        tone: ``""``, ``good``, ``bad`` or ``warn``.
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    total: bool = False
    lines: tuple[str, ...] = ()
    drawing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tone: str = ""


KINDS = ">*."
"""What a column's name may begin with."""

STYLES = {"": "bold", "good": "bold green", "bad": "bold red", "warn": "bold yellow"}


def table(sections: Iterable[Section]) -> RenderableType:
    """The sections for a terminal."""
    parts: list[RenderableType] = []
    for index, section in enumerate(sections):
        if index:
            parts.append(Text(""))
        parts.append(Text(section.title, style=STYLES[section.tone]))
        parts += [Padding(Text(line), (0, 0, 0, 2)) for line in section.lines]
        parts += [Padding(Text(line, no_wrap=True), (0, 0, 0, 2)) for line in section.drawing]
        if section.rows:
            parts.append(_grid(section))
        parts += [Padding(Text(note, style="dim"), (0, 0, 0, 2)) for note in section.notes]
    return Group(*parts)


def _grid(section: Section) -> RenderableType:
    named = any(c.lstrip(KINDS) for c in section.columns)
    grid = Table(
        box=box.SIMPLE_HEAD if named else None,
        show_header=named,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        show_edge=False,
    )
    for column in section.columns:
        kind = column[:1]
        grid.add_column(
            column.lstrip(KINDS),
            justify="right" if kind == ">" else "left",
            no_wrap=kind in (">", "*"),
            overflow="fold",
            style="cyan" if kind == "*" else None,
        )
    for index, row in enumerate(section.rows):
        last = section.total and index == len(section.rows) - 1
        cells = [
            DottedName(text) if column.startswith(".") else Text(text)
            for column, text in zip(section.columns, row, strict=True)
        ]
        grid.add_row(*cells, style="bold" if last else None)
    return Padding(grid, (0, 0, 0, 2))


class DottedName:
    """A name that is broken after its dots where it is too long for a line."""

    def __init__(self, name: str) -> None:
        self.parts = re.findall(r"[^.]*(?:\.{2}[^.]*)*\.?", name)[:-1] or [name]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """The longest part, and the whole name."""
        return Measurement(max(map(len, self.parts)), sum(map(len, self.parts)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As many parts a line as fit."""
        lines = [""]
        for part in self.parts:
            if lines[-1] and len(lines[-1]) + len(part) > options.max_width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(lines), overflow="fold")


def render_text(renderable: RenderableType, width: int = 100) -> str:
    """What a terminal of ``width`` columns would show, without colours."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def bullets(texts: Sequence[str]) -> tuple[str, ...]:
    """Each text as a line of a list."""
    return tuple(f"- {text}" for text in texts)
