"""Target ``hf``: the ``DistributedConfig`` of transformers, with its tp_plan and fsdp_plan.

Fields of ``transformers.distributed.DistributedConfig`` and the styles registered in
``transformers/distributed/tensor_parallel.py`` of 5.23. Rules name modules with ``*`` for the
number of a block, so blocks that differ cannot be told apart. A rule overrides the model's own and
every other of the model's own rules stays, so weights that the plan leaves whole are named too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autoshard.errors import ExportUnsupported
from autoshard.exports.dtensor import logits
from autoshard.exports.export import PLAN_AGAIN, WITHOUT_TENSOR, Source, Written
from autoshard.exports.lacks import not_written
from autoshard.exports.reading import Reading, Weight, by_pattern, listed, wildcard

NAME = "hf"
FILE = "hf_distributed_config.json"
NO_STAGES = "this exporter writes no pp_size: transformers cannot combine it with FSDP"


class HuggingFace:
    """See the module's docstring."""

    name = NAME
    version = "transformers 5.23"
    summary = "JSON: DistributedConfig with tp_plan and fsdp_plan"
    lacks: Mapping[str, str] = not_written(pipeline=NO_STAGES)

    def write(self, source: Source) -> Written:
        """The file.

        Raises:
            ExportUnsupported: a weight that no registered style cuts so, or blocks that differ.
        """
        reading = source.expressible(NAME)
        _refuse(reading)
        document: dict[str, Any] = {
            "tp_size": reading.tensor,
            "fsdp_size": reading.shard,
            "dp_replicate_size": reading.replicate,
            "pp_size": 1,
        }
        losses = list(reading.notes)
        if reading.tensor > 1:
            plan = by_pattern({w.module: style_of(w) for w in reading.weights})
            if plan is None:
                raise ExportUnsupported(NAME, _unlike(reading), PLAN_AGAIN)
            document["tp_plan"] = plan
            if reading.sequence_parallel:
                losses.append(
                    "values between blocks are cut in the plan; transformers keeps them whole "
                    "(enable_sequence_parallel is not wired up yet)"
                )
            if (gathered := logits(reading)) is not None:
                losses.append(gathered)
        if reading.data > 1:
            style = "free_full_weight" if reading.reshards else "keep_full_weight"
            document["fsdp_plan"] = dict.fromkeys((wildcard(u) for u in reading.units), style)
            if not reading.units:
                losses.append("no repeated blocks were found: the model's own fsdp_plan is kept")
            if reading.plan.dtype == "bfloat16":
                document["fsdp_mixed_precision"] = True
        losses.append(
            f"global batch {reading.plan.global_batch} and optimizer {reading.plan.optimizer} are "
            f"in your script: give each of {reading.data} groups {reading.local_batch} samples"
        )
        return Written({FILE: json.dumps(document, indent=2) + "\n"}, tuple(losses))


def style_of(weight: Weight) -> str:
    """Name of the registered style that cuts ``weight`` as planned."""
    if weight.kind == "embedding":
        return {
            "column": "embedding_colwise",
            "row": "embedding_rowwise",
            "whole": "replicate",
        }[weight.style]
    if weight.style == "column":
        return "colwise_gather_output" if weight.gathers_output else "colwise"
    if weight.style == "row":
        return "rowwise_split_input" if weight.splits_input else "rowwise"
    return "replicate"


def _refuse(reading: Reading) -> None:
    lost = []
    if odd := [w.name for w in reading.cut_weights if w.kind == "product" and w.pieces == 1]:
        lost.append(f"weights of other modules than nn.Linear and nn.Embedding: {listed(odd)}")
    if odd := [w.name for w in reading.cut_weights if w.pieces > 1]:
        lost.append(
            f"fused weights of more than their two blocks or of other modules: {listed(odd)}"
        )
    if odd := [w.name for w in reading.cut_weights if w.tied]:
        lost.append(f"tied weights, which each module would cut for itself: {listed(odd)}")
    if lost:
        raise ExportUnsupported(NAME, lost, WITHOUT_TENSOR)


def _unlike(reading: Reading) -> list[str]:
    found: dict[str, set[str]] = {}
    for weight in reading.weights:
        found.setdefault(wildcard(weight.module), set()).add(style_of(weight))
    return [
        f"{pattern} differs from block to block ({', '.join(sorted(styles))}); a rule holds for all"
        for pattern, styles in found.items()
        if len(styles) > 1
    ]
