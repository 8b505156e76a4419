"""Configurations of torchtitan that a plan of the whole space can keep to.

TOML as torchtitan 0.2.2 and older read it, or a recipe of 0.3.0: a Python file that assigns the
same fields (``config.parallelism.tensor_parallel_degree = 2``), which is read, not run.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from autoshard.errors import RequestError, UnknownNameError
from autoshard.imports.kept import Kept

SECTIONS = ("parallelism", "training", "activation_checkpoint", "optimizer")
SIZES = {
    "pipeline_parallel_degree": "pipeline",
    "expert_parallel_degree": "expert",
    "context_parallel_degree": "context",
    "tensor_parallel_degree": "model",
}
REPLICATE, SHARD = "data_parallel_replicate_degree", "data_parallel_shard_degree"
SCHEDULE, MICRO = "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"
PER_STAGE = "pipeline_parallel_layers_per_stage"
LOCAL = "local_batch_size"
PARALLELISM = (*SIZES, REPLICATE, SHARD, SCHEDULE, MICRO, PER_STAGE)
INTERLEAVED = 2
"""Stages of a rank that an interleaved schedule has where nothing else is said."""

MODES = ("none", "selective", "full", "memory_budget")
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam"}
DTYPES = ("bfloat16", "float32")

Fields = dict[tuple[str, str], Any]

_ASSIGNED = re.compile(
    rf"^\s*(?:\w+\.)*({'|'.join(SECTIONS)})\.(\w+)\s*=\s*([^#\n]+?)\s*(?:#.*)?$", re.MULTILINE
)


def kept(text: str, *, is_recipe: bool) -> Kept:
    """What the configuration fixes.

    Args:
        text: TOML, or a Python file.
        is_recipe: which of them.

    Raises:
        RequestError: unreadable, or a number that is none.
        UnknownNameError: an optimizer or recomputation that nobody knows.
    """
    fields = _recipe(text) if is_recipe else _toml(text)
    sizes: dict[str, int] = {}
    said: dict[str, str] = {}
    for field, name in SIZES.items():
        if (size := _number(fields, "parallelism", field)) is not None:
            sizes[name], said[name] = size, f"{field} = {size}"
    replicate = _number(fields, "parallelism", REPLICATE) or 1
    shard = _number(fields, "parallelism", SHARD, fill=True)
    local = _number(fields, "training", LOCAL)
    pipeline = sizes.get("pipeline", 1)
    if pipeline > 1:
        micro = _number(fields, "parallelism", MICRO)
        if micro is not None:
            sizes["micro-batch"], said["micro-batch"] = micro, f"{MICRO} = {micro}"
    elif local is not None:
        sizes["micro-batch"], said["micro-batch"] = local, f"{LOCAL} = {local}"
    if replicate > 1 and shard != 1:
        sizes["replica"], said["replica"] = replicate, f"{REPLICATE} = {replicate}"
    notes = []
    per_stage = _number(fields, "parallelism", PER_STAGE) if pipeline > 1 else None
    schedule = fields.get(("parallelism", SCHEDULE)) if pipeline > 1 else None
    if per_stage is not None:
        said["virtual-stages"] = f"{PER_STAGE} = {per_stage}"
    elif schedule is not None:
        chunks = 1 if schedule in ("1F1B", "GPipe") else INTERLEAVED
        sizes["virtual-stages"], said["virtual-stages"] = chunks, f'{SCHEDULE} = "{schedule}"'
    if schedule not in (None, "1F1B", "Interleaved1F1B"):
        notes.append(f'{SCHEDULE} = "{schedule}": taken as 1F1B, or interleaved 1F1B')
    recompute = _recompute(fields, said, notes)
    optimizer = fields.get(("optimizer", "name"))
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise UnknownNameError("optimizer of torchtitan", str(optimizer), OPTIMIZERS)
    notes += _unread(fields)
    batch = _number(fields, "training", "global_batch_size", fill=True)
    return Kept(
        tool="torchtitan",
        sizes=sizes,
        said=said,
        recompute=recompute,
        layers_per_chunk=per_stage,
        parameters="whole" if shard == 1 else "cut",
        replicas=replicate if shard != 1 else 1,
        global_batch=batch,
        rank_batch=local,
        seq_len=_number(fields, "training", "seq_len"),
        dtype=_dtype(fields),
        optimizer=None if optimizer is None else OPTIMIZERS[str(optimizer)],
        notes=tuple(notes),
    )


def _toml(text: str) -> Fields:
    try:
        document: Mapping[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"not a TOML document: {error}") from error
    return {
        (section, field): value
        for section in SECTIONS
        if isinstance(table := document.get(section), dict)
        for field, value in table.items()
    }


def _recipe(text: str) -> Fields:
    fields: Fields = {}
    for section, field, value in _ASSIGNED.findall(text):
        try:
            fields[section, field] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue  # computed: not for us to run
    return fields


def _number(fields: Fields, section: str, field: str, *, fill: bool = False) -> int | None:
    """A positive whole number; None where it is not there, or with ``fill`` where it is -1."""
    value = fields.get((section, field))
    if value is None or (fill and value == -1):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"{section}.{field} must be a positive whole number, found {value!r}")
    return value


def _recompute(fields: Fields, said: dict[str, str], notes: list[str]) -> str | None:
    mode = fields.get(("activation_checkpoint", "mode"))
    if mode is None:
        return None
    if mode not in MODES:
        raise UnknownNameError("activation_checkpoint.mode", str(mode), MODES)
    if mode == "memory_budget":
        notes.append('activation_checkpoint.mode = "memory_budget": left to the search')
        return None
    said["recompute"] = f'activation_checkpoint.mode = "{mode}"'
    if mode == "selective":
        notes.append(f"{said['recompute']}: taken as no recomputation")
        return "none"
    return str(mode)


def _dtype(fields: Fields) -> str | None:
    for field in ("mixed_precision_param", "dtype"):
        value = fields.get(("training", field))
        if value in DTYPES:
            return str(value)
    return None


def _unread(fields: Fields) -> list[str]:
    names = [name for (section, name) in fields if section == "parallelism"]
    other = [name for name in names if name not in PARALLELISM]
    return [f"not read: {', '.join(other)}"] if other else []
