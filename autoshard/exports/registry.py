"""Every target by name, and the one way through an exporter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoshard.errors import ExportUnsupported, UnknownNameError
from autoshard.exports.accelerate import Accelerate
from autoshard.exports.deepspeed import DeepSpeed
from autoshard.exports.dtensor import DTensor
from autoshard.exports.export import Export, Exporter, Source
from autoshard.exports.huggingface import HuggingFace
from autoshard.exports.jax_specs import Jax
from autoshard.exports.launch import Slurm, Torchrun
from autoshard.exports.megatron import Megatron
from autoshard.exports.torchtitan import TorchTitan
from autoshard.plan import PlanDocument
from autoshard.program import Program

EXPORTERS: Mapping[str, Exporter] = {
    e.name: e
    for e in (
        DTensor(),
        TorchTitan(),
        Megatron(),
        DeepSpeed(),
        Accelerate(),
        HuggingFace(),
        Jax(),
        Torchrun(),
        Slurm(),
    )
}
"""Targets by name."""

TARGETS = tuple(EXPORTERS)


def export(plan: PlanDocument, target: str, program: Callable[[], Program]) -> Export:
    """``plan`` as the files of ``target``.

    Args:
        plan: the plan.
        target: one of ``TARGETS``.
        program: gives the program that the plan stands for; called where the target needs it.

    Raises:
        UnknownNameError: no such target.
        ExportUnsupported: it cannot express the plan; nothing was written.
    """
    if target not in EXPORTERS:
        raise UnknownNameError("export target", target, EXPORTERS)
    exporter = EXPORTERS[target]
    lost = [
        f"axis {axis}={size}: {exporter.lacks[axis]}"
        for axis, size in zip(plan.mesh.axis_names, plan.mesh.sizes, strict=True)
        if size > 1 and axis in exporter.lacks
    ]
    if not plan.schedule.is_plain:
        what = plan.schedule
        raise ExportUnsupported(
            target,
            [
                f"a step of {what.microbatches} microbatches on {what.stages} stages with "
                f"recomputation {what.recompute!r}: exports say nothing of these yet"
            ],
            "export an estimate without --micro-batch, --recompute and pipeline",
        )
    if lost:
        able = [n for n, e in EXPORTERS.items() if not set(e.lacks) & set(plan.mesh.active[0])]
        mend = f"targets that can: {', '.join(able)}; or plan without that axis (--mesh)"
        raise ExportUnsupported(target, lost, mend)
    source = Source(plan=plan, program=program)
    written = exporter.write(source)
    return Export(
        target=target,
        version=exporter.version,
        files=written.files,
        losses=written.losses,
    )
