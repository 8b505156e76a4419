"""Targets ``torchrun`` and ``slurm``: the lines that start as many processes as a plan has devices.

Options of torch 2.13 (``python -m torch.distributed.run --help``) and of Slurm 24.05
(https://slurm.schedmd.com/sbatch.html). The script to start is ``train.py``; change its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any

from autoshard.errors import ExportUnsupported
from autoshard.exports.export import Source, Written
from autoshard.plan import PlanDocument

SCRIPT = "train.py"
PORT = 29500


def nodes_of(cluster: Mapping[str, Any], devices: int, target: str = "torchrun") -> tuple[int, int]:
    """Nodes, and processes on each.

    Raises:
        ExportUnsupported: the devices fill no whole nodes.
    """
    per_node = min(devices, int(cluster["devices_per_node"]))
    if devices % per_node:
        raise ExportUnsupported(
            target,
            [f"{devices} devices on nodes of {per_node}: the last node has fewer processes"],
            f"plan for a multiple of {per_node} devices",
        )
    return devices // per_node, per_node


def torchrun(cluster: Mapping[str, Any], devices: int) -> str:
    """The command that starts the plan's processes."""
    nodes, each = nodes_of(cluster, devices)
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {each} {SCRIPT}"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d "
        f"--rdzv-endpoint $HEAD_NODE:{PORT} {SCRIPT}"
    )


def _devices(plan: PlanDocument) -> int:
    return prod(plan.mesh.sizes)


class Torchrun:
    """See the module's docstring."""

    name = "torchrun"
    version = "torch 2.13"
    summary = "shell: the torchrun line for the plan's devices"
    lacks: Mapping[str, str] = MappingProxyType({})

    def write(self, source: Source) -> Written:
        """A shell script."""
        plan = source.plan
        nodes, _ = nodes_of(plan.cluster, _devices(plan))
        lines = ["#!/bin/sh", f"# {plan.label}: {_devices(plan)} processes, for torch 2.13."]
        if nodes > 1:
            lines += [
                f"# Run on each of the {nodes} nodes; HEAD_NODE is the name of one of them.",
                ': "${HEAD_NODE:?set it to the name of one node}"',
            ]
        lines.append(f'exec {torchrun(plan.cluster, _devices(plan))} "$@"')
        return Written({"run.sh": "\n".join(lines) + "\n"}, (_how_only(),))


class Slurm:
    """See the module's docstring."""

    name = "slurm"
    version = "Slurm 24.05, torch 2.13"
    summary = "an sbatch script that starts torchrun on every node"
    lacks: Mapping[str, str] = MappingProxyType({})

    def write(self, source: Source) -> Written:
        """An sbatch script."""
        plan = source.plan
        nodes, each = nodes_of(plan.cluster, _devices(plan), "slurm")
        accelerator = plan.cluster["device"]["kind"] != "cpu"
        lines = [
            "#!/bin/bash",
            f"#SBATCH --job-name={plan.model.name}",
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=1",
        ]
        if accelerator:
            lines.append(f"#SBATCH --gpus-per-node={each}")
        lines += [
            f"# {plan.label}: {_devices(plan)} processes, for Slurm 24.05 and torch 2.13.",
            "# Add --time, --partition and --account as your cluster asks.",
            "",
            'HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "srun torchrun \\",
            f"    --nnodes {nodes} --nproc-per-node {each} \\",
            '    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \\',
            f'    --rdzv-endpoint "$HEAD_NODE:{PORT}" \\',
            f'    {SCRIPT} "$@"',
        ]
        return Written({"job.sbatch": "\n".join(lines) + "\n"}, (_how_only(),))


def _how_only() -> str:
    return (
        "how parameters are cut: these lines start the processes; what each of them does is in "
        "another export, or in plan.lower()"
    )
