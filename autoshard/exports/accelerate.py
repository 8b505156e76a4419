"""Target ``accelerate``: the YAML file of ``accelerate launch --config_file``.

Keys of accelerate 1.15.0: ``ClusterConfig`` (commands/config/config_args.py), ``fsdp_*`` and
``parallelism_config_*`` (commands/launch.py), and the combinations that ``ParallelismConfig``
(parallelism_config.py) accepts. Which weights are tensor-parallel is not in this file: accelerate
takes the model's own ``tp_plan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from autoshard.errors import ExportUnsupported
from autoshard.exports.conventions import unlike
from autoshard.exports.export import Source, Written
from autoshard.exports.lacks import not_written
from autoshard.exports.launch import nodes_of
from autoshard.exports.reading import Reading

NAME = "accelerate"
FILE = "accelerate.yaml"
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
KINDS = {"cuda": "MULTI_GPU", "npu": "MULTI_NPU", "xpu": "MULTI_XPU", "cpu": "MULTI_CPU"}
NO_STAGES = "accelerate's file has no pipeline parallelism but Megatron-LM's"


class Accelerate:
    """See the module's docstring."""

    name = NAME
    version = "accelerate 1.15.0"
    summary = "YAML: DDP, or FSDP2 with its ParallelismConfig"
    lacks: Mapping[str, str] = not_written(pipeline=NO_STAGES)

    def write(self, source: Source) -> Written:
        """The file.

        Raises:
            ExportUnsupported: a combination that ``ParallelismConfig`` refuses, or a dtype.
        """
        reading = source.expressible(NAME)
        _refuse(reading)
        plan = reading.plan
        nodes, _ = nodes_of(plan.cluster, reading.devices, NAME)
        kind = str(plan.cluster["device"]["kind"])
        document: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP" if reading.shard > 1 else KINDS.get(kind, "MULTI_GPU"),
            "mixed_precision": PRECISIONS[plan.dtype],
            "use_cpu": kind == "cpu",
            "debug": False,
            "num_machines": nodes,
            "num_processes": reading.devices,
            "machine_rank": 0,
        }
        if reading.shard > 1:
            document["fsdp_config"] = {
                "fsdp_version": 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_reshard_after_forward": reading.reshards,
                "fsdp_activation_checkpointing": False,
            }
            document["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": reading.replicate,
                "parallelism_config_dp_shard_size": reading.shard,
                "parallelism_config_tp_size": reading.tensor,
                "parallelism_config_cp_size": 1,
            }
        text = f"# {plan.model.name}: {plan.label}. For accelerate 1.15.0.\n"
        text += yaml.safe_dump(document, sort_keys=False)
        return Written({FILE: text}, tuple(_losses(reading, nodes)))


def _refuse(reading: Reading) -> None:
    lost = []
    if reading.tensor > 1 and reading.shard == 1:
        what = f"beside {reading.replicate} replicas" if reading.replicate > 1 else "alone"
        lost.append(
            f"tensor parallelism ({reading.tensor}) {what}: accelerate has it only beside FSDP"
        )
    if reading.plan.dtype not in PRECISIONS:
        lost.append(f"dtype {reading.plan.dtype}: accelerate has {', '.join(PRECISIONS)}")
    if lost:
        raise ExportUnsupported(
            NAME,
            lost,
            "export to dtensor or hf, or constrain the parameters to be cut over data too",
        )


def _losses(reading: Reading, nodes: int) -> list[str]:
    plan = reading.plan
    out = list(reading.notes)
    if reading.tensor > 1:
        out += unlike(reading, "most models' tp_plan")
        out.append(
            "which weights are tensor-parallel: accelerate takes the model's own tp_plan; "
            "target hf writes the plan's"
        )
    out.append(
        f"global batch {plan.global_batch} and optimizer {plan.optimizer} are in your script, not "
        f"in this file: give each process {reading.local_batch} samples"
    )
    if reading.shard > 1 and not reading.units:
        out.append(
            "no repeated blocks were found: name fsdp_transformer_layer_cls_to_wrap yourself"
        )
    if nodes > 1:
        out.append("main_process_ip and main_process_port are yours to add, machine_rank differs")
    return out
