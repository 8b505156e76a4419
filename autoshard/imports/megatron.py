"""Command-line flags of Megatron-LM as sizes, batch and precision.

Flags are those of megatron-core 0.16.1 (see ``autoshard.exports.megatron``). Its layers are cut as
``autoshard.exports.conventions`` says; the data-parallel size is what is left of the devices.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.errors import ExportUnsupported, RequestError, UnknownNameError
from autoshard.exports.conventions import FUSED, STYLES
from autoshard.imports.flags import number, read_flags
from autoshard.imports.foreign import Cutting, Foreign

NUMBERS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--num-distributed-optimizer-instances",
    "--micro-batch-size",
    "--global-batch-size",
    "--seq-length",
)
WORDS = (
    "--data-parallel-sharding-strategy",
    "--outer-dp-sharding-strategy",
    "--optimizer",
    "--sgd-momentum",
)
SWITCHES = (
    "--sequence-parallel",
    "--use-distributed-optimizer",
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
    "--bf16",
    "--fp16",
)
SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd-momentum"}
MEND = "set them to 1, or keep to the flags with autoshard plan --space full --keep FILE"


def parse(text: str, devices: int) -> Foreign:
    """The sizes, batch and precision that the flags set.

    Args:
        text: a command line, or a shell file that holds the flags; ``#`` begins a comment.
        devices: the world size, which no flag tells.

    Raises:
        RequestError: a flag without its value, or sizes that do not divide ``devices``.
        ExportUnsupported: pipelines, contexts, experts, which such a plan does not have.
    """
    values, ignored = read_flags(text, (*NUMBERS, *WORDS), SWITCHES)
    size = {name: number(values, name, 1) for name in NUMBERS[:6]}
    lost = [
        f"{name} {size[name]}: such a configuration is read as data and tensor parallelism"
        for name in NUMBERS[1:5]
        if size[name] > 1
    ]
    if lost:
        raise ExportUnsupported("megatron", lost, MEND)
    tensor = size["--tensor-model-parallel-size"]
    if devices % tensor:
        raise RequestError(
            f"--tensor-model-parallel-size {tensor} does not divide {devices} devices; "
            "change --devices"
        )
    data = devices // tensor
    notes: list[str] = []
    shard, replicate = _sharding(values, data, size["--num-distributed-optimizer-instances"], notes)
    batch = _batch(values, data, notes)
    if ignored:
        notes.append(f"megatron: flags that were not read: {', '.join(ignored)}")
    if "--sequence-parallel" in values:
        notes.append(
            "megatron: --sequence-parallel: where values between blocks are cut is chosen by price"
        )
    return Foreign(
        format="megatron",
        replicate=replicate,
        shard=shard,
        tensor=tensor,
        rules={leaf: Cutting(style, FUSED.get(leaf, 1)) for leaf, style in STYLES.items()}
        if tensor > 1
        else {},
        by_leaf=True,
        global_batch=batch,
        seq_len=number(values, "--seq-length", 0) or None,
        dtype="bfloat16" if "--bf16" in values else "float16" if "--fp16" in values else "float32",
        optimizer=optimizer_of(values),
        notes=tuple(notes),
    )


def fully_sharded(values: Mapping[str, str]) -> bool:
    """Whether parameters are cut over the data-parallel ranks.

    Raises:
        UnknownNameError: a sharding strategy that nobody knows.
    """
    strategy = values.get("--data-parallel-sharding-strategy", "no_shard")
    if strategy not in SHARDINGS:
        raise UnknownNameError("--data-parallel-sharding-strategy", strategy, SHARDINGS)
    return "--use-torch-fsdp2" in values or (
        "--use-megatron-fsdp" in values and strategy == "optim_grads_params"
    )


def _sharding(
    values: dict[str, str], data: int, instances: int, notes: list[str]
) -> tuple[int, int]:
    """(shard, replicate) of the data-parallel ranks."""
    if fully_sharded(values):
        if data % instances:
            raise RequestError(
                f"--num-distributed-optimizer-instances {instances} does not divide {data} "
                "data-parallel ranks"
            )
        return data // instances, instances
    strategy = values.get("--data-parallel-sharding-strategy", "no_shard")
    if "--use-distributed-optimizer" in values or strategy != "no_shard":
        notes.append(
            "megatron: the distributed optimizer cuts optimizer state (and gradients) alone, which "
            "a plan cannot say: memory counts them whole on every device"
        )
    return 1, data


def _batch(values: dict[str, str], data: int, notes: list[str]) -> int | None:
    micro = number(values, "--micro-batch-size", 0)
    batch = number(values, "--global-batch-size", 0) or micro * data
    if micro and batch > micro * data:
        notes.append(
            f"megatron: {batch // (micro * data)} microbatches of {micro} samples; priced is one "
            f"pass over all {batch}, whose activations take more memory"
        )
    return batch or None


def optimizer_of(values: Mapping[str, str]) -> str:
    """The optimizer's name here.

    Raises:
        UnknownNameError: one whose state is not known.
    """
    name = values.get("--optimizer", "adam")
    if name not in OPTIMIZERS:
        raise UnknownNameError("--optimizer", name, OPTIMIZERS)
    if name == "sgd" and float(values.get("--sgd-momentum", "0.9")) == 0:
        return "sgd"
    return OPTIMIZERS[name]
