"""What a report is made of: the frame of a page, tables, lists, tiles."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from autoshard.report.style import SCRIPT, STYLE

MOST_ROWS = 1500
"""Rows of a table; a page stays below a megabyte."""

LONGEST_NAME = 160


def _source(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


STYLE_SHA256 = _source(STYLE)
"""Hash of the stylesheet as a Content-Security-Policy names it, without its quotes."""

SCRIPT_SHA256 = _source(SCRIPT)
"""The same of the script."""

POLICY = (
    f"default-src 'none'; style-src '{STYLE_SHA256}'; script-src '{SCRIPT_SHA256}'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
"""The policy that every page carries."""


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    content = "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{clean(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{content}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def clean(text: object) -> str:
    """Escaped, and without control characters."""
    return escape("".join(c if c >= " " or c in "\t\n" else "\ufffd" for c in str(text)))


def shown_name(name: str) -> str:
    """A name, its middle left out where it is very long."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}\u2026{name[-half:]}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: its head.
        kind: ``""``, ``r`` for figures, ``name`` for long names, ``long`` for sentences.
    """

    title: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text, and the number that it stands for, to sort by."""

    text: str
    value: float | None = None


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str | Cell]],
    *,
    marks: Mapping[int, str] | None = None,
    search: str = "",
    sortable: bool = False,
) -> str:
    """A table that scrolls by itself where it is too wide; with sentences, a phone stacks it.

    Args:
        columns: heads and kinds.
        rows: as many cells a row as there are columns.
        marks: class of a row, by number.
        search: id of the table; not empty: a field that searches it stands above.
        sortable: whether a click on a head sorts it.
    """
    heads = "".join(f'<th scope="col"{_class(c.kind)}>{clean(c.title)}</th>' for c in columns)
    out = []
    if search:
        out.append(
            f'<input type="search" data-for="{clean(search)}" hidden '
            'placeholder="Search" aria-label="Search this table">'
        )
    name = f' id="{clean(search)}"' if search else ""
    stack = _class("stack" if any(c.kind == "long" for c in columns) else "")
    out.append(f'<div class="scroll"><table{name}{stack}{" data-sort" if sortable else ""}>')
    out.append(f"<thead><tr>{heads}</tr></thead>\n<tbody>")
    for number, row in enumerate(rows[:MOST_ROWS]):
        mark = _class((marks or {}).get(number, ""))
        cells = "".join(_cell(c, cell) for c, cell in zip(columns, row, strict=True))
        out.append(f"<tr{mark}>{cells}</tr>")
    out.append("</tbody></table></div>")
    if len(rows) > MOST_ROWS:
        out.append(note(f"{len(rows) - MOST_ROWS:,} rows more are in the file"))
    return "\n".join(out)


def _cell(column: Column, cell: str | Cell) -> str:
    found = cell if isinstance(cell, Cell) else Cell(cell)
    text = clean(shown_name(found.text) if column.kind == "name" else found.text)
    if column.kind == "name":
        text = text.replace(".", ".<wbr>")  # where a long name may be broken
    value = "" if found.value is None else f' data-v="{found.value:.6g}"'
    return f"<td{_class(column.kind)}{value}>{text}</td>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def note(text: str) -> str:
    """A small line."""
    return f'<p class="note">{clean(text)}</p>'


def bullets(texts: Iterable[str]) -> str:
    """A list."""
    return "<ul>" + "".join(f"<li>{clean(t)}</li>" for t in texts) + "</ul>"


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """(what, figure, small print), side by side."""
    cells = "".join(
        f"<div><dt>{clean(what)}</dt><dd>{clean(value)}"
        + (f"<small>{clean(small)}</small>" if small else "")
        + "</dd></div>"
        for what, value, small in figures
    )
    return f'<dl class="tiles">{cells}</dl>'


def warnings(texts: Sequence[str]) -> str:
    """What a reader should know first."""
    return f'<aside class="warn"><h2>Warnings</h2>{bullets(texts)}</aside>'


def folded(title: str, content: str) -> str:
    """A part that is unfolded by a click, and in print."""
    return f"<details><summary>{clean(title)}</summary>\n{content}\n</details>"
