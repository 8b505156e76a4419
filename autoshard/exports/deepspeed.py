"""Target ``deepspeed``: a configuration file.

Keys of DeepSpeed 0.19.8: deepspeed/runtime/config.py, runtime/zero/config.py
(``DeepSpeedZeroConfig``), runtime/tensor_parallel/config.py (``TPTrainingConfig``),
module_inject/autotp_config.py (``TPLayerSpec``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from autoshard.errors import ExportUnsupported
from autoshard.exports.dtensor import logits
from autoshard.exports.export import WITHOUT_TENSOR, Source, Written
from autoshard.exports.lacks import not_written
from autoshard.exports.reading import Reading, Weight, listed, wildcard

NAME = "deepspeed"
FILE = "ds_config.json"
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}
NO_STAGES = "DeepSpeed's pipeline is code (PipelineModule(num_stages=...)), not part of its file"


class DeepSpeed:
    """See the module's docstring."""

    name = NAME
    version = "DeepSpeed 0.19.8"
    summary = "JSON: batch, precision, ZeRO stage, tensor parallel size and layers"
    lacks: Mapping[str, str] = not_written(pipeline=NO_STAGES)

    def write(self, source: Source) -> Written:
        """The file.

        Raises:
            ExportUnsupported: shards and replicas at once, or a weight cut in a way it has not.
        """
        reading = source.expressible(NAME)
        _refuse(reading)
        plan = reading.plan
        losses = list(reading.notes)
        document: dict[str, Any] = {
            "train_batch_size": plan.global_batch,
            "train_micro_batch_size_per_gpu": reading.local_batch,
            "gradient_accumulation_steps": 1,
        }
        if plan.dtype == "bfloat16":
            document["bf16"] = {"enabled": True}
        elif plan.dtype == "float16":
            document["fp16"] = {"enabled": True}
        if plan.optimizer in OPTIMIZERS:
            document["optimizer"] = {"type": OPTIMIZERS[plan.optimizer], "params": {}}
            losses.append("learning rate and other parameters of the optimizer are yours to add")
        else:
            losses.append(f"optimizer {plan.optimizer}: pass your own to deepspeed.initialize")
        document["zero_optimization"] = {"stage": 3 if reading.shard > 1 else 0}
        if reading.shard > 1 and not reading.reshards:
            losses.append(
                "the plan keeps gathered parameters until backward; ZeRO stage 3 drops those that "
                "are not needed soon"
            )
        if reading.tensor > 1:
            document["tensor_parallel"] = {
                "autotp_size": reading.tensor,
                "partition_config": {"use_default_specs": False, "layer_specs": _specs(reading)},
            }
            losses += _tensor_losses(reading)
        return Written({FILE: json.dumps(document, indent=2) + "\n"}, tuple(losses))


def _refuse(reading: Reading) -> None:
    lost = []
    if reading.shard > 1 and reading.replicate > 1:
        lost.append(
            f"replicas of shards ({reading.replicate} x {reading.shard}): ZeRO shards over all "
            "data-parallel ranks since MiCS was removed"
        )
    if reading.plan.dtype not in ("float32", "bfloat16", "float16"):
        lost.append(f"dtype {reading.plan.dtype}: DeepSpeed trains in fp32, bf16 or fp16")
    if odd := [w.name for w in reading.cut_weights if w.kind == "product" and w.pieces == 1]:
        lost.append(f"weights of other modules than nn.Linear: {listed(odd)}")
    if odd := [w.name for w in reading.cut_weights if w.pieces > 1]:
        lost.append(f"fused weights, cut within each of their blocks: {listed(odd)}")
    if odd := [w.name for w in reading.cut_weights if w.kind == "linear" and w.splits_input]:
        lost.append(f"rows whose input arrives whole: {listed(odd)}")
    if lost:
        raise ExportUnsupported(NAME, lost, WITHOUT_TENSOR)


def _linear(reading: Reading) -> list[Weight]:
    return [w for w in reading.cut_weights if w.kind == "linear"]


def _specs(reading: Reading) -> list[dict[str, Any]]:
    """One spec for each way of cutting, with a pattern for each kind of module."""
    found: dict[tuple[str, bool], dict[str, None]] = {}
    for weight in _linear(reading):
        # "*" stands for the number of a block; every other character for itself.
        pattern = re.escape(wildcard(weight.name)).replace(r"\*", r"\d+")
        key = weight.style, weight.style == "column" and weight.gathers_output
        found.setdefault(key, {})[f".*{pattern}$"] = None
    out = []
    for (style, gathers), patterns in found.items():
        spec: dict[str, Any] = {"patterns": list(patterns), "partition_type": style}
        if gathers:
            spec["gather_output"] = True
        out.append(spec)
    return out


def _tensor_losses(reading: Reading) -> list[str]:
    out = []
    whole = [w for w in reading.cut_weights if w.kind == "embedding"]
    if whole:
        out.append(
            f"{listed(w.name for w in whole)} ({sum(w.num_bytes for w in whole):,} bytes) is cut "
            "in the plan; DeepSpeed keeps a whole one on every rank"
        )
    if reading.sequence_parallel:
        out.append("values between blocks are cut in the plan; DeepSpeed keeps them whole")
    if (gathered := logits(reading)) is not None:
        out.append(gathered)
    return out
