"""Target ``torchtitan``: a recipe, the Python function that torchtitan is started with.

Fields of ``ParallelismConfig`` and ``TrainingConfig`` of torchtitan 0.3.0
(torchtitan/config/configs.py). Which weights are cut by columns and which by rows is torchtitan's
own, model by model.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.errors import ExportUnsupported
from autoshard.exports.conventions import refuse_strangers, unlike
from autoshard.exports.export import Source, Written
from autoshard.exports.lacks import not_written
from autoshard.exports.launch import nodes_of
from autoshard.exports.reading import Reading, title

NAME = "torchtitan"
FILE = "torchtitan_recipe.py"
RECIPES = {
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "llama-3-405b": ("llama3", "llama3_405b"),
}
"""Presets that torchtitan has too: its model folder and the function of its config registry."""
DTYPES = ("bfloat16", "float32")


class TorchTitan:
    """See the module's docstring."""

    name = NAME
    version = "torchtitan 0.3.0"
    summary = "a recipe: the function that returns Trainer.Config"
    lacks: Mapping[str, str] = not_written()

    def write(self, source: Source) -> Written:
        """The recipe.

        Raises:
            ExportUnsupported: a dtype or layers that torchtitan does not have.
        """
        reading = source.expressible(NAME)
        plan = reading.plan
        if plan.dtype not in DTYPES:
            raise ExportUnsupported(
                NAME,
                [f"dtype {plan.dtype}: torchtitan trains in {' or '.join(DTYPES)}"],
                "plan with --dtype bf16 or fp32",
            )
        losses = list(reading.notes)
        if reading.tensor > 1:
            refuse_strangers(reading, NAME, NAME)
            losses += unlike(reading, NAME)
        if plan.optimizer != "adamw":
            losses.append(f"optimizer {plan.optimizer}: the recipe keeps its own, AdamW")
        if plan.model.source not in RECIPES:
            losses.append(
                f"torchtitan has no recipe of {plan.model.source or plan.model.name}: the sizes "
                "are for a recipe of yours, which apply() takes"
            )
        losses.append("activation checkpointing is the recipe's own; the plan has none")
        return Written({FILE: _text(reading)}, tuple(losses))


def _fields(reading: Reading) -> list[str]:
    plan = reading.plan
    reshard = "always" if reading.reshards else "never"
    sequence = reading.sequence_parallel
    out = [
        f"parallelism.data_parallel_replicate_degree = {reading.replicate}",
        f"parallelism.data_parallel_shard_degree = {reading.shard}",
        f'parallelism.fsdp_reshard_after_forward = "{reshard}"',
        f"parallelism.tensor_parallel_degree = {reading.tensor}",
        f"parallelism.enable_sequence_parallel = {sequence}",
        "parallelism.pipeline_parallel_degree = 1",
        "parallelism.context_parallel_degree = 1",
        f"training.local_batch_size = {reading.local_batch}",
        f"training.global_batch_size = {plan.global_batch}",
    ]
    if plan.seq_len is not None:
        out.append(f"training.seq_len = {plan.seq_len}")
    out += ['training.dtype = "float32"', f'training.mixed_precision_param = "{plan.dtype}"']
    return out


def _text(reading: Reading) -> str:
    plan = reading.plan
    nodes, each = nodes_of(plan.cluster, reading.devices, NAME)
    known = RECIPES.get(plan.model.source or "")
    fields = "\n".join(f"    config.{line}" for line in _fields(reading))
    base = ""
    imports = "from torchtitan.trainer import Trainer"
    start = "    config = apply(your_recipe())"
    if known is not None:
        module, function = known
        imports = f"from torchtitan.models.{module}.config_registry import {function}\n{imports}"
        base = f'''

def autoshard_plan() -> Trainer.Config:
    """torchtitan's own recipe with the plan's sizes."""
    return apply({function}())
'''
        start = (
            f"    from torchtitan_recipe import autoshard_plan  # in its config_registry.py\n"
            f"    torchrun --nnodes {nodes} --nproc-per-node {each} -m torchtitan.train "
            f"--module {module} --config autoshard_plan"
        )
    return f'''"""{title(reading)}

For torchtitan 0.3.0.

{start}
"""

{imports}


def apply(config: Trainer.Config) -> Trainer.Config:
    """Set the plan's sizes in a recipe."""
{fields}
    return config
{base}'''
