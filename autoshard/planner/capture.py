"""The model of a request, captured at the batch it is to be planned for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.graph import Mode

if TYPE_CHECKING:
    from torch import nn

    from autoshard.analyzer import Captured

SEQUENCES_PER_DEVICE = 1
SAMPLES_PER_DEVICE = 8


def capture(
    model: nn.Module | str | Path | Mapping[str, Any],
    example_inputs: object | None = None,
    *,
    batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    progress: Callable[[str], None] | None = None,
    mode: Mode = "train",
) -> Captured:
    """The model as a graph; see :func:`autoshard.analyzer.analyze`.

    Args:
        model: a module, or where to find one.
        example_inputs: inputs of one global batch; None: from what the model says of itself.
        batch: samples of one global batch; None: the inputs' own, else some for each device.
        seq_len: tokens of a sample.
        dtype: floating dtype to train in.
        devices: how many there are, for the batch that is assumed where none is given.
        progress: told what is being done.
        mode: what the step is of; of inference there is one sequence where no batch is given.
    """
    from dataclasses import replace

    from autoshard.analyzer import analyze

    assumed: str | None = None
    if batch is None and mode != "train":
        batch, assumed = 1, "batch: none given, so one sequence"
    elif batch is None and example_inputs is None and devices is not None:
        each = SEQUENCES_PER_DEVICE if _speaks(model) else SAMPLES_PER_DEVICE
        batch = each * devices
        assumed = f"global batch: none given, so {batch} samples, {each} for each device"
    found = analyze(
        model,
        example_inputs,
        batch=batch,
        seq_len=seq_len,
        dtype=dtype,
        progress=progress,
        mode=mode,
    )
    if assumed is None or found.graph.batch != batch:
        return found
    graph = replace(found.graph, assumptions=(assumed, *found.graph.assumptions))
    return replace(found, graph=graph)


def _speaks(model: object) -> bool:
    """Whether a model takes sequences of tokens: its config has a vocabulary."""
    if isinstance(model, Mapping):
        return "vocab_size" in model
    if isinstance(model, str | Path):
        from autoshard.analyzer import list_presets, load_preset, read_json

        if str(model) in list_presets():
            return "vocab_size" in load_preset(str(model))
        path = Path(model)
        return path.suffix == ".json" and path.is_file() and "vocab_size" in read_json(path)
    return hasattr(getattr(model, "config", None), "vocab_size")


def source_of(model: object) -> str | None:
    """How a plan that is loaded again can find its model: a name or path, if it was one."""
    return str(model) if isinstance(model, str | Path) else None
