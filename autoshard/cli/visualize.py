"""``autoshard visualize``: a trace of communication as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli.options import writable
from autoshard.cli.output import Output


def visualize(
    log: Annotated[
        Path,
        typer.Option(
            "--log",
            metavar="FILE",
            help="Trace that a program run with AUTOSHARD_TRACE_COMM=1 wrote.",
        ),
    ] = Path("comm_trace.json"),
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="Picture: .png, .svg or .html.")
    ] = Path("comm_graph.png"),
    step: Annotated[
        int | None,
        typer.Option(
            "--step", min=0, metavar="N", help="Which step; the last that communicated if left out."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Draw who talks to whom over which axis, how much, and a timeline with the overlap."""
    from autoshard.runtime.watch.picture import write_picture

    writable(output)
    view = write_picture(log, output, step)
    shown = Output(as_json=as_json, no_color=False)
    if as_json:
        document = {"output": str(output), "step": view.step, "ranks": len(view.ranks)}
        shown.document(json.dumps(document))
    else:
        print(f"wrote {output}: step {view.step} of {view.name} on {len(view.ranks)} devices")
