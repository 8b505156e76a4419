"""A ``DistributedConfig`` of transformers 5.23, or a bare ``tp_plan``, as sizes and rules.

A rule of the document overrides the model's own of the same module, and the model's other rules
stay, as in transformers; an empty ``tp_plan`` switches all of them off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from autoshard.errors import ExportUnsupported, RequestError, UnknownNameError
from autoshard.imports.foreign import Cutting, Foreign

STYLES: Mapping[str, Cutting] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), Cutting("column")),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), Cutting("row")),
    "embedding_colwise": Cutting("column"),
    "embedding_rowwise": Cutting("row"),
    "packed_colwise": Cutting("column", 2),
    "packed_rowwise": Cutting("row", 2),
    "replicate": Cutting("whole"),
    "replicated_with_grad_allreduce": Cutting("whole"),
}
"""Registered styles that say how a weight is stored."""

REFUSED = (
    "sequence_parallel",
    "mla_kv_a_proj",
    "all_reduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "local_params",
    "grouped_gemm",
    "ep_dispatch_experts",
)
"""Registered styles that say what is computed or placed instead."""

SIZES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")
FIELDS = (
    *SIZES,
    "tp_plan",
    "fsdp_plan",
    "ep_plan",
    "enable_sequence_parallel",
    "enable_expert_parallel",
    "fsdp_cpu_offload",
    "fsdp_mixed_precision",
    "ep_implementation",
)
MEND = "leave those fields out, or price such a plan with autoshard plan"


def cutting(rule: str, style: str) -> Cutting:
    """How ``style`` cuts the weight of the module that ``rule`` names.

    Raises:
        UnknownNameError: transformers has no such style.
        ExportUnsupported: it is one that this version cannot price.
    """
    if style in STYLES:
        return STYLES[style]
    if style in REFUSED:
        raise ExportUnsupported(
            "hf",
            [f"style {style!r} of {rule}: it says more than how a weight is cut"],
            "use " + ", ".join(STYLES),
        )
    raise UnknownNameError(f"tensor-parallel style of {rule}", str(style), (*STYLES, *REFUSED))


def parse(document: str | Mapping[str, Any], devices: int | None) -> Foreign:
    """The document's sizes and rules.

    Args:
        document: JSON text or what it stands for: a ``DistributedConfig``, or a ``tp_plan`` alone.
        devices: how many there are; None: the product of the sizes.

    Raises:
        RequestError: not such a document, or sizes that do not multiply to ``devices``.
        ExportUnsupported: pipelines, experts or styles that this version does not plan.
    """
    values = _read(document)
    if values and not set(values) & set(FIELDS):
        values = {"tp_plan": values}
    if unknown := sorted(set(values) - set(FIELDS)):
        raise RequestError(
            f"a DistributedConfig has no field {unknown[0]!r}; it has {', '.join(FIELDS)}"
        )
    sizes = {name: _size(values, name) for name in SIZES}
    lost = [
        f"{name}={size}: this version plans data and tensor parallelism"
        for name in ("pp_size", "ep_size")
        if (size := sizes[name] or 1) > 1
    ]
    if values.get("enable_expert_parallel"):
        lost.append("enable_expert_parallel: this version places no experts")
    if values.get("fsdp_cpu_offload"):
        lost.append("fsdp_cpu_offload: this version prices no offloading")
    if lost:
        raise ExportUnsupported("hf", lost, MEND)
    shard, replicate = sizes["fsdp_size"] or 1, sizes["dp_replicate_size"] or 1
    plan = values.get("tp_plan")
    tensor = sizes["tp_size"]
    if tensor is None:
        others = shard * replicate
        tensor = 1 if plan is None or devices is None else max(1, devices // others)
    if devices is not None and prod((shard, replicate, tensor)) != devices:
        raise RequestError(
            f"tp_size {tensor} x fsdp_size {shard} x dp_replicate_size {replicate} = "
            f"{shard * replicate * tensor} devices, but there are {devices}; change --devices or "
            "the sizes"
        )
    if plan is not None and plan != "auto" and not isinstance(plan, Mapping):
        raise RequestError(f'tp_plan must be rules or "auto", found {plan!r}')
    rules = plan if isinstance(plan, Mapping) else {}
    notes = []
    if values.get("fsdp_plan") or shard > 1:
        notes.append(
            "hf: which gathered weights are kept until backward (fsdp_plan) is chosen by the limit "
            "of memory, as in any plan"
        )
    if values.get("enable_sequence_parallel"):
        notes.append("hf: enable_sequence_parallel is not wired up in transformers 5.23; not read")
    return Foreign(
        format="hf",
        replicate=replicate,
        shard=shard,
        tensor=tensor,
        rules={rule: cutting(rule, style) for rule, style in rules.items()} if tensor > 1 else {},
        model_rules=not (isinstance(plan, Mapping) and not plan),
        notes=tuple(notes),
    )


def _read(document: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(document, Mapping):
        return document
    try:
        found = json.loads(document)
    except json.JSONDecodeError as error:
        raise RequestError(f"not a JSON document: {error}; give a DistributedConfig") from error
    if not isinstance(found, dict):
        raise RequestError(f"a DistributedConfig is a JSON object, found {type(found).__name__}")
    return found


def _size(values: Mapping[str, Any], name: str) -> int | None:
    size = values.get(name)
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise RequestError(f"{name} must be a positive whole number, found {size!r}")
    return size
