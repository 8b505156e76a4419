"""``autoshard calibrate``: measure this machine or cluster, and write a cluster file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.options import writable, write
from autoshard.cli.output import Output

if TYPE_CHECKING:
    from autoshard.calibrate import Calibration


def calibrate(
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            metavar="N",
            help="Processes of this machine that measure at the same time; one for each core, at "
            "least 2, if left out. Not under torchrun.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=1, metavar="SECONDS", help="Longest silence of a process."),
    ] = 120.0,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Write the cluster there, as TOML.")
    ] = Path("cluster.toml"),
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")
    ] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colours; setting NO_COLOR does the same.")
    ] = False,
) -> None:
    """Measure this machine or cluster and write a cluster file for --cluster.

    Measured are operators, memory, an optimizer's update and every collective, while all processes
    work at the same time: on this machine with --processes, or on many hosts where torchrun starts
    the command on each: torchrun --nproc-per-node N --nnodes M ... -m autoshard.cli calibrate.
    """
    output = Output(as_json=as_json, no_color=no_color)
    writable(out)
    with output.progress("calibrating") as progress:
        from autoshard.calibrate import calibrate as run

        found = run(processes, timeout_s=timeout, name=out.stem, progress=progress)
    if found is None:  # a rank of torchrun that is not the first
        return
    write(out, found.to_toml())
    if as_json:
        output.document(json.dumps(_document(found, out)))
    else:
        output.table(_table(found))
    output.say(f"written to {out}: plan with --cluster {out}")


def _document(found: Calibration, out: Path) -> dict[str, Any]:
    return {
        "kind": "autoshard.calibration",
        "output": str(out),
        "processes": found.processes,
        "hosts": found.hosts,
        "seconds": found.seconds,
        "median_error": found.median_error(),
        "cluster": found.cluster.to_json(),
        "rows": [
            {
                "kind": r.kind,
                "name": r.name,
                "measured_s": r.measured_s,
                "fitted_s": r.fitted_s,
                "error": r.error,
            }
            for r in found.rows
        ],
    }


def _table(found: Calibration) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table

    table = Table(
        "measured",
        "count",
        "median error",
        "farthest off",
        "measured",
        "fitted",
        "error",
        title=f"{found.processes} processes on {found.hosts} host(s), {found.seconds:.0f} s",
        box=box.SIMPLE,
    )
    for kind, rows in found.kinds().items():
        worst = max(rows, key=lambda r: abs(r.error))
        table.add_row(
            kind,
            str(len(rows)),
            f"{found.median_error(kind):.1%}",
            worst.name,
            _seconds(worst.measured_s),
            _seconds(worst.fitted_s),
            f"{worst.error:+.0%}",
        )
    return Group(table, f"median error of all {len(found.rows)}: {found.median_error():.1%}")


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"
