"""``autoshard report``: a plan or a sweep as a page, and as pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.options import writable, write
from autoshard.cli.output import Output
from autoshard.errors import RequestError

if TYPE_CHECKING:
    from autoshard.report import Figure

_SQLITE = b"SQLite format 3\x00"


class Format(StrEnum):
    """What a picture is written as."""

    png = "png"
    svg = "svg"


def report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|SWEEP",
            help="A plan.json; a sweep's store (sweep.db or URL) or its rows (rows.json).",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path(
        "report.html"
    ),
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", metavar="DIR", help="Write the page's pictures there too, as files."
        ),
    ] = None,
    kind: Annotated[
        Format, typer.Option("--format", help="What the pictures are written as.")
    ] = Format.png,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", metavar="NAME", help="Which sweep, where a store has several."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Write a plan or a sweep as one self-contained HTML page.

    The page needs nothing from anywhere, prints, and is light or dark as its reader's system is.
    """
    writable(out)
    output = Output(as_json=as_json, no_color=False)
    with output.progress(f"reading {source}"):
        page, drawn = _report(source, sweep, output)
        write(out, page)
        paths: list[Path] = []
        if figures is not None:
            from autoshard.report import write_figures

            paths = write_figures(drawn, figures, kind.value)
    if as_json:
        output.document(json.dumps({"output": str(out), "figures": [str(p) for p in paths]}))
    else:
        pictures = f" and {len(paths)} pictures in {figures}" if figures is not None else ""
        print(f"wrote {out}{pictures}")


def _report(source: str, sweep: str | None, output: Output) -> tuple[str, Sequence[Figure]]:
    from autoshard.report import plan_figures, plan_page, sweep_figures, sweep_page

    content = b"" if "://" in source else _read(Path(source))
    if not content or content.startswith(_SQLITE):
        from autoshard.sweeps import read_rows

        found = read_rows(source, sweep=sweep, plans=True)
        rows: list[Mapping[str, Any]] = [row.to_json(plan=True) for row in found]
        return sweep_page(rows, {"name": sweep or Path(source).stem}), sweep_figures(rows)
    try:
        document = json.loads(content)
    except ValueError as error:
        raise RequestError(f"{source} is neither a plan, nor rows, nor a store: {error}") from error
    if isinstance(document, dict) and "rows" not in document:
        from autoshard.planner.plan import Plan

        plan = Plan.from_json(content)
        try:
            trace = plan.trace()
        except RequestError as error:
            output.say(f"without a timeline: {error}")
            trace = None
        return plan_page(plan, trace), plan_figures(plan, trace)
    rows = document["rows"] if isinstance(document, dict) else document
    if not isinstance(rows, list) or not all(isinstance(r, dict) and "model" in r for r in rows):
        raise RequestError(f"{source}: rows of a sweep are a list of objects with a 'model'")
    name = document.get("name") if isinstance(document, dict) else None
    return sweep_page(rows, {"name": name or Path(source).stem}), sweep_figures(rows)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
