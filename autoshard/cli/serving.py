"""Options of inference."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Mode(StrEnum):
    """What a step may be of."""

    train = "train"
    prefill = "prefill"
    decode = "decode"


class Objective(StrEnum):
    """What may be sought."""

    latency = "latency"
    throughput = "throughput"


ModeOption = Annotated[
    Mode,
    typer.Option(
        "--mode",
        help="What a step is of: training, or inference: whole prompts of --seq-len tokens, or one "
        "token more for each sequence.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        metavar="N",
        help="To decode: tokens that the new one attends to, itself included.",
    ),
]
ObjectiveOption = Annotated[
    Objective,
    typer.Option(
        "--objective",
        help="Of inference: the shortest step of --global-batch sequences (1 if left out), or the "
        "batch and the plan with most tokens a second.",
    ),
]
MaxLatency = Annotated[
    str | None,
    typer.Option(
        "--max-latency",
        metavar="TIME",
        help="Longest step, as 50ms or 0.05, where throughput is sought.",
    ),
]
