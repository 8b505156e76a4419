"""Target ``megatron``: command-line flags of Megatron-LM.

Flags are named after the fields of its dataclasses: ``ModelParallelConfig``,
``DistributedDataParallelConfig``, ``OptimizerConfig`` (megatron-core 0.16.1) and ``TrainingConfig``
(megatron/training/config/training_config.py). Fully sharded parameters take the five flags that its
page on Megatron-FSDP requires together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autoshard.errors import ExportUnsupported
from autoshard.exports.conventions import refuse_strangers, unlike
from autoshard.exports.export import Source, Written
from autoshard.exports.lacks import not_written
from autoshard.exports.launch import nodes_of
from autoshard.exports.reading import Reading

NAME = "megatron"
FILE = "megatron_args.sh"
DTYPES = {"bfloat16": "--bf16", "float16": "--fp16", "float32": None}
OPTIMIZERS = {"adamw": "adam", "adam": "adam", "sgd": "sgd", "sgd-momentum": "sgd"}
FULLY_SHARDED = (
    ("--use-megatron-fsdp",),
    ("--data-parallel-sharding-strategy", "optim_grads_params"),
    ("--no-gradient-accumulation-fusion",),
    ("--use-distributed-optimizer",),
    ("--ckpt-format", "fsdp_dtensor"),
)


class Megatron:
    """See the module's docstring."""

    name = NAME
    version = "megatron-core 0.16.1"
    summary = "shell: the flags of pretrain_gpt.py that fix sizes, batch and precision"
    lacks: Mapping[str, str] = not_written()

    def write(self, source: Source) -> Written:
        """A shell file that sets an array of flags.

        Raises:
            ExportUnsupported: a dtype that Megatron-LM has no flag for, or layers it does not know.
        """
        reading = source.expressible(NAME)
        plan = reading.plan
        if plan.dtype not in DTYPES:
            lost = f"dtype {plan.dtype}: Megatron-LM trains in {', '.join(DTYPES)}"
            raise ExportUnsupported(NAME, [lost], "plan with --dtype bf16")
        losses = list(reading.notes)
        if reading.tensor > 1:
            refuse_strangers(reading, NAME, "Megatron-LM")
            losses += unlike(reading, "Megatron-LM")
        losses.append(
            f"the model: Megatron-LM trains its own, so give --num-layers, --hidden-size and so on "
            f"as of {plan.model.name}"
        )
        if plan.optimizer == "adam":
            losses.append("optimizer adam: Megatron-LM's decays weights as AdamW by default")
        if reading.shard > 1 and not reading.reshards:
            losses.append(
                "the plan keeps gathered parameters until backward; Megatron-FSDP drops them"
            )
        return Written({FILE: _text(reading)}, tuple(losses))


def flags(reading: Reading) -> Iterator[tuple[str, ...]]:
    """Every flag with its value."""
    plan = reading.plan
    yield "--tensor-model-parallel-size", str(reading.tensor)
    yield "--pipeline-model-parallel-size", "1"
    yield "--context-parallel-size", "1"
    if reading.sequence_parallel:
        yield ("--sequence-parallel",)
    if reading.shard > 1:
        yield from FULLY_SHARDED
        if reading.replicate > 1:
            yield "--num-distributed-optimizer-instances", str(reading.replicate)
            yield "--outer-dp-sharding-strategy", "no_shard"
    yield "--micro-batch-size", str(reading.local_batch)
    yield "--global-batch-size", str(plan.global_batch)
    if plan.seq_len is not None:
        yield "--seq-length", str(plan.seq_len)
    dtype = DTYPES[plan.dtype]
    if dtype is not None:
        yield (dtype,)
    yield "--optimizer", OPTIMIZERS[plan.optimizer]
    if plan.optimizer == "sgd":
        yield "--sgd-momentum", "0.0"


def _text(reading: Reading) -> str:
    plan = reading.plan
    nodes, each = nodes_of(plan.cluster, reading.devices, NAME)
    body = "\n".join(f"    {' '.join(flag)}" for flag in flags(reading))
    return (
        "#!/bin/bash\n"
        f"# {plan.model.name}: {plan.label}; data parallel size {reading.data} is derived.\n"
        "# For megatron-core 0.16.1. Source this file, then\n"
        f"#   torchrun --nnodes {nodes} --nproc-per-node {each} pretrain_gpt.py "
        '"${AUTOSHARD_ARGS[@]}" ...\n'
        f"AUTOSHARD_ARGS=(\n{body}\n)\n"
    )
