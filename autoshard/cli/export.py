"""``autoshard export`` and ``autoshard import``: plans in other tools' words, and back."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli.options import given, writable, write
from autoshard.cli.output import Output
from autoshard.errors import InfeasibleError, RequestError
from autoshard.quantities import parse_bytes

if TYPE_CHECKING:
    from autoshard.exports import Export


class Target(StrEnum):
    """What a plan can be written for; the same names as ``autoshard.exports.TARGETS``."""

    dtensor = "dtensor"
    torchtitan = "torchtitan"
    megatron = "megatron"
    deepspeed = "deepspeed"
    accelerate = "accelerate"
    hf = "hf"
    jax = "jax"
    torchrun = "torchrun"
    slurm = "slurm"


class Format(StrEnum):
    """What can be read; the same names as ``autoshard.imports.FORMATS``."""

    hf = "hf"
    megatron = "megatron"


Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")
]
NoColor = Annotated[
    bool, typer.Option("--no-color", help="No colours; setting NO_COLOR does the same.")
]


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.", show_default=False)],
    to: Annotated[Target, typer.Option("--to", help="The tool to write for.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="The plan's model, where the plan does not name one that it can build.",
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out-dir", metavar="DIR", help="Write the files there, under their usual names."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the one file there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a plan as another tool's own files: code, a recipe, flags or a configuration.

    What the tool cannot do as planned is said on stderr. Where that is a size, a use of an axis or
    a cut of a weight, nothing is written, and the command ends with status 2.
    """
    from autoshard.planner.plan import Plan

    if out is not None and out_dir is not None:
        raise RequestError("--out names one file and --out-dir a folder; give one of them")
    writable(out)
    found = Plan.load(plan)
    output = Output(as_json=as_json, no_color=False)
    with output.progress(f"exporting {plan} to {to.value}"):
        written = found.export(to.value, model)
    paths = _write(written, out, out_dir)
    if as_json:
        output.document(json.dumps(written.to_json()))
    elif not paths:
        _print(written)
    output.say(f"for {written.version}")
    for loss in written.losses:
        output.say(f"otherwise than planned: {loss}")
    for path in paths:
        output.say(f"written to {path}")


def _write(written: Export, out: Path | None, out_dir: Path | None) -> list[Path]:
    if out_dir is not None:
        return list(written.write(out_dir))
    if out is None:
        return []
    if len(written.files) > 1:
        raise RequestError(
            f"{written.target} has {len(written.files)} files; give --out-dir instead of --out"
        )
    write(out, next(iter(written.files.values())))
    return [out]


def _print(written: Export) -> None:
    for name, text in written.files.items():
        if len(written.files) > 1:
            print(f"# {name}")
        print(text, end="")


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A DistributedConfig or tp_plan (.json), or Megatron-LM's flags.",
            show_default=False,
        ),
    ],
    source: Annotated[
        Format, typer.Option("--from", help="The tool it is from.", show_default=False)
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Preset, config.json, package.module:factory or graph.json.",
            show_default=False,
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            help="Preset (h100, a100-80, local, ...) or cluster file; this machine if left out.",
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, metavar="N", help="Number of devices.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch", min=1, metavar="B", help="Samples of one step, all devices."
        ),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=1, metavar="S", help="Tokens of one sample.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="TYPE", help="bf16, fp16, fp32 or fp64."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            metavar="NAME",
            help="Optimizer whose state is kept; the file's, or adamw.",
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit",
            metavar="BYTES",
            help="Memory of a device that may be used, as 72GiB, 80GB or 17179869184.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the plan there, as JSON.")
    ] = None,
    as_json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Price another tool's parallelism: the fastest plan that stores parameters as it does.

    The plan can be validated and exported like any other. Ends with status 3 where it does not
    fit; the figures are shown all the same.
    """
    from autoshard.planner.plan import Plan

    output = Output(as_json=as_json, no_color=no_color)
    writable(out)
    limit = parse_bytes("--memory-limit", memory_limit)
    with output.progress(f"reading {file}") as progress:
        from autoshard.planner import from_export

        found: Plan = from_export(
            file,
            source.value,
            model,
            **given(
                cluster=cluster,
                devices=devices,
                global_batch=global_batch,
                seq_len=seq_len,
                dtype=dtype,
                optimizer=optimizer,
                memory_limit_bytes=limit,
            ),
            progress=progress,
        )
    if out is not None:
        write(out, found.to_json())
        output.say(f"written to {out}")
    if as_json:
        output.document(found.to_json())
    else:
        output.table(found)
    if not found.memory.fits:
        output.say("does not fit: see the memory's limit above")
        raise typer.Exit(InfeasibleError.exit_status)
