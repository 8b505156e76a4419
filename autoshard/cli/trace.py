"""``autoshard trace``: the predicted timeline of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli.options import writable
from autoshard.cli.output import Output


def trace(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="The plan's model, where the plan does not name one that it can build.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", help="Trace; compressed if it ends in .gz."),
    ] = Path("trace.json"),
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Write the predicted timeline of one step, for Perfetto or chrome://tracing.

    The form is that of a trace which a program run with AUTOSHARD_TRACE_COMM=1 writes.
    """
    from autoshard.planner.plan import Plan

    writable(out)
    found = Plan.load(plan)
    output = Output(as_json=as_json, no_color=False)
    with output.progress(f"reading the model of {plan}"):
        from autoshard.planner.timeline import save_trace

        document = found.trace(model)
        save_trace(document, out)
    bars = sum(e["ph"] == "X" for e in document["traceEvents"])
    if as_json:
        output.document(json.dumps({"output": str(out), "events": bars}))
    else:
        print(f"wrote {out}: {bars} events; merged: {document['autoshard']['merged']}")
