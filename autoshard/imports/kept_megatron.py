"""Arguments of Megatron-LM that a plan of the whole space can keep to.

Names are those of megatron-core 0.16.1 (``ModelParallelConfig``, ``TransformerConfig``,
``DistributedDataParallelConfig``); YAML may have them as fields (``tensor_model_parallel_size``) or
as flags.
"""

from __future__ import annotations

from autoshard.errors import RequestError, UnknownNameError
from autoshard.imports.flags import number, read_flags, read_yaml
from autoshard.imports.kept import Kept, Storage
from autoshard.imports.megatron import NUMBERS, SWITCHES, WORDS, fully_sharded, optimizer_of

SIZES = {
    "--pipeline-model-parallel-size": "pipeline",
    "--expert-model-parallel-size": "expert",
    "--context-parallel-size": "context",
    "--tensor-model-parallel-size": "model",
    "--micro-batch-size": "micro-batch",
    "--num-virtual-stages-per-pipeline-rank": "virtual-stages",
    "--virtual-pipeline-model-parallel-size": "virtual-stages",
}
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
GRANULARITY = "--recompute-granularity"
KINDS = ("selective", "full")
LAYERS, METHOD = "--recompute-num-layers", "--recompute-method"
SOME = (LAYERS, METHOD, "--recompute-modules")
MODEL = (
    "--num-layers",
    "--hidden-size",
    "--ffn-hidden-size",
    "--num-attention-heads",
    "--num-query-groups",
    "--max-position-embeddings",
    "--num-experts",
)
"""What the model itself tells."""


def kept(text: str, *, is_yaml: bool) -> Kept:
    """What the arguments fix.

    Args:
        text: flags, as a command line or shell file; or YAML.
        is_yaml: which of them.

    Raises:
        RequestError: unreadable, or a number that is none.
        UnknownNameError: an optimizer, sharding or recomputation that nobody knows.
    """
    valued = (*NUMBERS, *WORDS, *SIZES, PER_CHUNK, GRANULARITY, *SOME, *MODEL)
    values, ignored = (read_yaml if is_yaml else read_flags)(text, valued, SWITCHES)
    sizes: dict[str, int] = {}
    said: dict[str, str] = {}
    for flag, name in SIZES.items():
        if flag in values:
            size = number(values, flag, 1)
            if sizes.setdefault(name, size) != size:
                raise RequestError(f"{said[name]} and {flag} {size} differ; leave one out")
            said[name] = f"{flag} {size}"
    if PER_CHUNK in values:
        said["virtual-stages"] = f"{PER_CHUNK} {values[PER_CHUNK]}"
    notes = [f"not read: {', '.join(ignored)}"] if ignored else []
    whole = fully_sharded(values)
    instances = number(values, "--num-distributed-optimizer-instances", 1)
    storage: Storage = "cut" if whole else "whole"
    experts_tensor = number(values, "--expert-tensor-parallel-size", sizes.get("model", 1))
    if sizes.get("expert", 1) > 1 and experts_tensor != sizes.get("model", 1):
        notes.append(
            f"--expert-tensor-parallel-size {experts_tensor}: here experts are cut over the model "
            "axis like all else"
        )
    recompute = values.get(GRANULARITY)
    if recompute is not None and recompute not in KINDS:
        raise UnknownNameError(GRANULARITY, recompute, KINDS)
    if recompute is not None:
        said["recompute"] = f"{GRANULARITY} {recompute}"
    some = [f"{flag} {values[flag]}" for flag in SOME if flag in values]
    uniform = values.get(METHOD, "uniform") == "uniform"
    layers = number(values, LAYERS, 1)
    if recompute == "full" and uniform and layers > 1:
        # Runs of so many layers keep what enters them: less than here, where each block keeps that.
        notes.append(f"{', '.join(some)}: read as the recomputation of every block, by itself")
    precision = "bfloat16" if "--bf16" in values else "float16" if "--fp16" in values else None
    return Kept(
        tool="Megatron-LM",
        sizes=sizes,
        said=said,
        recompute=recompute,
        recompute_per_chunk=None if recompute != "full" or uniform else layers,
        layers_per_chunk=number(values, PER_CHUNK, 0) or None,
        parameters=storage,
        replicas=instances if whole else 1,
        shares_optimizer=not whole and "--use-distributed-optimizer" in values,
        global_batch=number(values, "--global-batch-size", 0) or None,
        rank_batch=sizes.get("micro-batch"),
        seq_len=number(values, "--seq-length", 0) or None,
        dtype=precision,
        optimizer=optimizer_of(values) if "--optimizer" in values else None,
        notes=tuple(notes),
    )
