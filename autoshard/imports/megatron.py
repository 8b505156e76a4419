"""Command-line flags of Megatron-LM as sizes, batch and precision.

Flags are those of megatron-core 0.16.1 (see ``autoshard.exports.megatron``). Its layers are cut as
``autoshard.exports.conventions`` says; the data-parallel size is what is left of the devices.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from autoshard.errors import ExportUnsupported, RequestError, UnknownNameError
from autoshard.exports.conventions import FUSED, STYLES
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
LAUNCHER = ("--nnodes", "--nproc-per-node", "--nproc_per_node", "--standalone")
MEND = "set them to 1, or let autoshard plan --space full choose them"


def parse(text: str, devices: int) -> Foreign:
    """The sizes, batch and precision that the flags set.

    Args:
        text: a command line, or a shell file that holds the flags; ``#`` begins a comment.
        devices: the world size, which no flag tells.

    Raises:
        RequestError: a flag without its value, or sizes that do not divide ``devices``.
        ExportUnsupported: pipelines, contexts, experts, which such a plan does not have.
    """
    values, ignored = _flags(text)
    size = {name: _number(values, name, 1) for name in NUMBERS[:6]}
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
        seq_len=_number(values, "--seq-length", 0) or None,
        dtype="bfloat16" if "--bf16" in values else "float16" if "--fp16" in values else "float32",
        optimizer=_optimizer(values),
        notes=tuple(notes),
    )


def _flags(text: str) -> tuple[dict[str, str], list[str]]:
    """Flags that are read, with their values, and the names of the others."""
    try:
        tokens = shlex.split(text, comments=True)
    except ValueError as error:
        raise RequestError(f"cannot read the flags: {error}") from error
    values: dict[str, str] = {}
    ignored: list[str] = []
    for position, token in enumerate(tokens):
        if not token.startswith("--"):
            continue
        name, equals, value = token.partition("=")
        if name in SWITCHES:
            values[name] = ""
        elif name in NUMBERS or name in WORDS:
            after = tokens[position + 1] if position + 1 < len(tokens) else ""
            if not equals and (not after or after.startswith("--")):
                raise RequestError(f"{name} has no value; write {name} 2")
            values[name] = value if equals else after
        elif name not in LAUNCHER:
            ignored.append(name)
    return values, ignored


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name)
    if text is None:
        return default
    if not text.isdigit() or int(text) < 1:
        raise RequestError(f"{name} must be a positive whole number, found {text!r}")
    return int(text)


def _sharding(
    values: Mapping[str, str], data: int, instances: int, notes: list[str]
) -> tuple[int, int]:
    """(shard, replicate) of the data-parallel ranks."""
    strategy = values.get("--data-parallel-sharding-strategy", "no_shard")
    if strategy not in SHARDINGS:
        raise UnknownNameError("--data-parallel-sharding-strategy", strategy, SHARDINGS)
    fully = "--use-torch-fsdp2" in values or (
        "--use-megatron-fsdp" in values and strategy == "optim_grads_params"
    )
    if fully:
        if data % instances:
            raise RequestError(
                f"--num-distributed-optimizer-instances {instances} does not divide {data} "
                "data-parallel ranks"
            )
        return data // instances, instances
    if "--use-distributed-optimizer" in values or strategy != "no_shard":
        notes.append(
            "megatron: the distributed optimizer cuts optimizer state (and gradients) alone, which "
            "a plan cannot say: memory counts them whole on every device"
        )
    return 1, data


def _batch(values: Mapping[str, str], data: int, notes: list[str]) -> int | None:
    micro = _number(values, "--micro-batch-size", 0)
    batch = _number(values, "--global-batch-size", 0) or micro * data
    if micro and batch > micro * data:
        notes.append(
            f"megatron: {batch // (micro * data)} microbatches of {micro} samples; priced is one "
            f"pass over all {batch}, whose activations take more memory"
        )
    return batch or None


def _optimizer(values: Mapping[str, str]) -> str:
    name = values.get("--optimizer", "adam")
    if name not in OPTIMIZERS:
        raise UnknownNameError("--optimizer", name, OPTIMIZERS)
    if name == "sgd" and float(values.get("--sgd-momentum", "0.9")) == 0:
        return "sgd"
    return OPTIMIZERS[name]
