"""``autoshard sweep`` and ``autoshard results``: many points, and what is known of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autoshard.cli.options import writable
from autoshard.cli.output import Output, stdout_kept

if TYPE_CHECKING:
    from autoshard.sweeps import Row, Sweep
    from autoshard.sweeps.store import Counts

WIDE = 240
"""Columns of a table of rows in a file or a pipe."""

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the rows there: .csv, .parquet or .json."),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")
]
NoColor = Annotated[
    bool, typer.Option("--no-color", help="No colours; setting NO_COLOR does the same.")
]


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A sweep: .toml, .yaml or .json.", show_default=False),
    ],
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="FILE|URL",
            help="Keep the rows there: an SQLite file or postgresql://...; NAME.db if left out.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, metavar="N", help="Points that are planned at once.")
    ] = 1,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run points that failed before again.")
    ] = False,
    studies: Annotated[
        str | None,
        typer.Option(
            "--studies",
            metavar="URL",
            help="Keep every search's trials in that Optuna storage; nowhere if left out.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the points, and run none.")
    ] = False,
    out: Out = None,
    as_json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Plan, price or measure every point of FILE.

    Interrupted, it goes on where it was when it is called again; called on several machines with
    one PostgreSQL, they share the points. A point that fails keeps its error, and the sweep goes
    on.
    """
    from autoshard.sweeps import read_sweep
    from autoshard.sweeps.run import sweep as run

    output = Output(as_json=as_json, no_color=no_color)
    _check(out)
    found = read_sweep(file)
    if dry_run:
        _list(output, found)
        return
    with stdout_kept() if as_json else nullcontext(), _progress(output) as progress:
        result = run(
            found,
            storage=storage,
            workers=workers,
            retry_failed=retry_failed,
            studies=studies,
            progress=progress,
        )
    _show(output, result.to_json(), result.rows, out)
    for note in result.notes:
        output.say(note)
    failed = sum(r.status == "failed" for r in result.rows)
    output.say(f"{len(result.rows)} points, {failed} failed; kept in {result.storage}")


def results(
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE", help="An SQLite file or a URL that a sweep wrote.", show_default=False
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option("--sweep", metavar="NAME", help="Which sweep, where there are several."),
    ] = None,
    out: Out = None,
    as_json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Show the rows of a sweep, or write them to a file, while it runs or afterwards."""
    from autoshard.sweeps import Store

    output = Output(as_json=as_json, no_color=no_color)
    _check(out)
    opened = Store(store, create=False)
    try:
        rows = opened.rows(name)
        called = name or opened.names()[0]
    finally:
        opened.close()
    document = {"kind": "autoshard.sweep", "name": called, "rows": [r.to_json() for r in rows]}
    _show(output, document, rows, out)


def _check(out: Path | None) -> None:
    writable(out)
    if out is not None:
        from autoshard.sweeps.export import check_format

        check_format(out)


def _show(output: Output, document: dict[str, Any], rows: Sequence[Row], out: Path | None) -> None:
    if out is not None:
        from autoshard.sweeps import write_rows

        write_rows(rows, out)
    if output.as_json:
        output.document(json.dumps(document))
    else:
        output.table(_table(rows), piped_width=WIDE)
    if out is not None:
        output.say(f"written to {out}")


def _list(output: Output, found: Sweep) -> None:
    points = [{"key": p.key, "mode": p.mode, "point": p.text} for p in found.points]
    if output.as_json:
        document = {"kind": "autoshard.sweep.points", "name": found.name, "points": points}
        output.document(json.dumps(document))
    else:
        from rich.table import Table

        table = Table("", "mode", "point", box=None, pad_edge=False)
        for index, point in enumerate(points):
            table.add_row(str(index + 1), point["mode"], point["point"])
        output.table(table, piped_width=WIDE)
    for note in found.notes:
        output.say(note)
    output.say(f"{len(points)} points")


def _table(rows: Sequence[Row]) -> Any:
    """The rows for people; what is the same in all of them stands above."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from autoshard.render.units import bytes_text, seconds_text

    def whole(value: int | None) -> str:
        return "" if value is None else str(value)

    def seconds(value: float | None) -> str:
        return "" if value is None else seconds_text(value)

    def measured(row: Row) -> str:
        low, high = row.measured_low_s, row.measured_high_s
        if low is None or high is None:
            return ""
        return f"{seconds(row.measured_step_time_s)} ({seconds(low)} to {seconds(high)})"

    def predicted(row: Row) -> str:
        return "" if row.measured_step_time_s is None else seconds(row.forward_backward_s)

    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda r: r.model,
        "cluster": lambda r: r.cluster,
        "devices": lambda r: str(r.devices),
        "batch": lambda r: whole(r.global_batch),
        "tokens": lambda r: whole(r.seq_len),
        "dtype": lambda r: r.dtype or "",
        "mesh": lambda r: r.mesh or "",
        "step": lambda r: seconds(r.step_time_s),
        "of it fwd+bwd": predicted,
        "measured fwd+bwd": measured,
        "memory": lambda r: "" if r.memory_bytes is None else bytes_text(r.memory_bytes),
        "fits": lambda r: {True: "yes", False: "no", None: ""}[r.fits],
        "plan": lambda r: r.label or _first(r.error) or r.status,
    }
    right = {"devices", "batch", "tokens", "step", "of it fwd+bwd", "measured fwd+bwd", "memory"}
    table = Table(box=None, pad_edge=False)
    same, different = [], []
    for name, of in columns.items():
        cells = [of(r) for r in rows]
        if len(rows) > 1 and len(set(cells)) == 1 and name != "step":
            same += [f"{name} {cells[0]}"] * bool(cells[0])
            continue
        different.append(cells)
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=name != "plan", overflow="fold")
    for line in zip(*different, strict=True):
        table.add_row(*map(Text, line))
    return Group(", ".join(same), table) if same else table


def _first(error: str | None) -> str:
    return "" if error is None else error.splitlines()[0]


class _Progress:
    """Tells how far a sweep is: a bar on a terminal, a line a point elsewhere; on stderr."""

    def __init__(self, show: Callable[[Counts, str], None]) -> None:
        self._show = show
        self._began_s = time.monotonic()
        self._first: int | None = None
        self._last = -1

    def __call__(self, counts: Counts, row: Row | None) -> None:
        """Show it, if a point has been finished since."""
        from autoshard.sweeps.run import row_text

        if self._first is None:
            self._first = counts.finished
        if counts.finished == self._last:
            return
        self._last = counts.finished
        text = "" if row is None else row_text(row)
        self._show(counts, f"{text}{self._left(counts)}")

    def _left(self, counts: Counts) -> str:
        done = counts.finished - (self._first or 0)
        left = counts.total - counts.finished
        if not done or not left:
            return ""
        seconds = (time.monotonic() - self._began_s) / done * left
        return f" ({_duration(seconds)} left)"


def _duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.5 h``: what is left is an estimate."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def _progress(output: Output) -> Iterator[_Progress]:
    if not sys.stderr.isatty():
        yield _Progress(
            lambda counts, text: output.say(
                f"{counts.finished} of {counts.total}" + (f": {text}" if text else " points")
            )
        )
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True, no_color=output.no_color or None, highlight=False)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(counts: Counts, text: str) -> None:
            failed = f"[{counts.failed} failed] " if counts.failed else ""
            description = f"{failed}{text}".replace("[", "\\[")
            bar.update(task, completed=counts.finished, total=counts.total, description=description)

        yield _Progress(show)
