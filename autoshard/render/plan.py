"""A plan for people: what was planned, what it costs, and what else was tried."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod

from rich.console import RenderableType

from autoshard.errors import SpecError
from autoshard.plan import Measurement, Memory, MeshDocument, PlanDocument, TensorDocument
from autoshard.render.fold import fold
from autoshard.render.memory import NAMES, beside_each_other
from autoshard.render.schedule import schedule_text
from autoshard.render.sections import Section, bullets, table
from autoshard.render.units import (
    bar,
    bytes_text,
    count_text,
    difference_text,
    percent_text,
    seconds_text,
)
from autoshard.sharding.layout import Cut, P, R, State, canonical
from autoshard.sharding.mesh import DeviceMesh
from autoshard.sharding.spec import PartitionSpec, ShardingSpec, tensor_text

DRAWN = 8
"""Most rows and columns of a mesh that are drawn."""


def plan_table(plan: PlanDocument) -> RenderableType:
    """The plan for a terminal."""
    return table(plan_sections(plan))


def plan_sections(plan: PlanDocument) -> list[Section]:
    """The plan as titled tables."""
    out = [_head(plan), mesh_section(plan.mesh), _step_time(plan), _memory(plan)]
    out += _stages(plan.memory)
    if plan.measurements:
        out.append(measured_section(plan.measurements))
    if plan.real_runs:
        out.append(real_runs_section(plan))
    out.append(_collectives(plan))
    for title, tensors in (
        ("Parameters", plan.parameters),
        ("Inputs", plan.inputs),
        ("Outputs", plan.outputs),
        ("Values between blocks", plan.activations),
    ):
        if tensors:
            out.append(tensors_section(title, tensors, plan.mesh))
    if plan.alternatives:
        out.append(_alternatives(plan))
    if plan.warnings:
        out.append(Section(title="Warnings", lines=bullets(plan.warnings), tone="warn"))
    if plan.assumptions:
        out.append(Section(title="Assumed", lines=bullets(plan.assumptions)))
    return out


def _head(plan: PlanDocument) -> Section:
    model = plan.model
    batch = f"batch {plan.global_batch}"
    if plan.seq_len is not None:
        batch += f" x {plan.seq_len} tokens"
    if plan.mode == "decode":
        batch += f" x 1 token, {plan.context} with those before it"
    what = f"mode {plan.mode}, for {plan.objective}, " if plan.mode != "train" else ""
    rows = [
        ("model", f"{model.name}, {count_text(model.parameter_count)} parameters"),
        ("cluster", cluster_text(plan)),
        ("one step", f"{batch}, {plan.dtype}, {_optimizer_text(plan)}"),
        ("asked for", f"{what}strategy {plan.strategy}, seed {plan.seed}"),
    ]
    if schedule := schedule_text(plan.schedule, plan.global_batch):
        rows.insert(3, ("schedule", schedule))
    if model.source and model.source != model.name:
        rows.insert(1, ("from", model.source))
    return Section(title=f"Plan: {plan.label}", columns=("", ""), rows=tuple(rows))


def _optimizer_text(plan: PlanDocument) -> str:
    if plan.mode != "train":
        return f"{plan.schedule.style} kernels"
    return f"optimizer {plan.optimizer}"


def cluster_text(plan: PlanDocument) -> str:
    """``h100: 16 x NVIDIA H100 80GB, 8 in a node``."""
    document = plan.cluster
    count = document.get("devices", prod(plan.mesh.sizes))
    device = document.get("device")
    kind = device.get("name") if isinstance(device, Mapping) else None
    text = f"{count} x {kind}" if kind else f"{count} {'device' if count == 1 else 'devices'}"
    per_node = document.get("devices_per_node")
    if isinstance(per_node, int) and isinstance(count, int) and per_node < count:
        text += f", {per_node} in a node"
    name = document.get("name")
    return f"{name}: {text}" if name else text


# ---- mesh -------------------------------------------------------------------------------------


def mesh_section(mesh: MeshDocument) -> Section:
    """The mesh, drawn: which device stands at each place."""
    return Section(title=f"Mesh: {mesh}", drawing=_drawing(mesh))


def _drawing(mesh: MeshDocument) -> tuple[str, ...]:
    names, sizes = mesh.active
    if not sizes:
        return ("device 0",)
    columns, rows = sizes[-1], prod(sizes[:-1])
    shown_columns, shown_rows = _shown(columns), _shown(rows)
    head = [""] + [_place(f"{names[-1]} ", c) for c in shown_columns]
    lines = [head]
    for row in shown_rows:
        label = "device" if len(sizes) == 1 else _row_label(names[:-1], sizes[:-1], row)
        cells = [
            "..." if row is None or column is None else str(row * columns + column)
            for column in shown_columns
        ]
        lines.append([label, *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return tuple(
        "  ".join(
            cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i])
            for i, cell in enumerate(line)
        )
        for line in lines
    )


def _shown(count: int) -> list[int | None]:
    """Indices that are drawn; None stands for those left out."""
    if count <= DRAWN:
        return list(range(count))
    return [*range(DRAWN - 5), None, count - 1]


def _place(name: str, index: int | None) -> str:
    return "..." if index is None else f"{name}{index}"


def _row_label(names: tuple[str, ...], sizes: tuple[int, ...], row: int | None) -> str:
    if row is None:
        return "..."
    texts = []
    for name, size in zip(reversed(names), reversed(sizes), strict=True):
        texts.append(f"{name} {row % size}")
        row //= size
    return ", ".join(reversed(texts))


# ---- costs ------------------------------------------------------------------------------------


def _step_time(plan: PlanDocument) -> Section:
    time = plan.step_time
    parts = [
        ("compute", time.compute_s),
        *([("optimizer", time.optimizer_s)] if plan.mode == "train" else []),
        ("communication not hidden", time.exposed_communication_s),
    ]
    if time.waiting_s > 0.005 * time.total_s:
        parts.append(("waiting", time.waiting_s))
    rows = [
        (name, seconds_text(s), percent_text(_share(s, time.total_s)), bar(_share(s, time.total_s)))
        for name, s in parts
    ]
    rows.append(("step", seconds_text(time.total_s), "", ""))
    hidden = max(0.0, time.communication_s - time.exposed_communication_s)
    notes = [
        f"forward {seconds_text(time.forward_s)}, backward {seconds_text(time.backward_s)}; "
        f"all communication {seconds_text(time.communication_s)}, {seconds_text(hidden)} of it "
        "hidden behind compute"
    ]
    if plan.mode != "train":
        notes = [f"all communication {seconds_text(time.communication_s)}, none of it hidden"]
    if time.total_s > 0:
        rate = f"{plan.global_batch / time.total_s:,.1f} samples/s"
        if plan.tokens is not None:
            rate = f"{plan.tokens / time.total_s:,.0f} tokens/s"
        notes.append(f"{rate} on all devices together")
    if plan.lower_bound_s is not None:
        gap = time.total_s / plan.lower_bound_s - 1 if plan.lower_bound_s > 0 else 0.0
        notes.append(
            f"no plan is faster than {seconds_text(plan.lower_bound_s)}; this one is within "
            f"{percent_text(max(0.0, gap))} of it"
        )
    return Section(
        title="Step time, predicted, of the slowest device",
        columns=("", ">", ">", "*"),
        rows=tuple(rows),
        total=True,
        notes=tuple(notes),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _memory(plan: PlanDocument) -> Section:
    memory = plan.memory
    whole = memory.limit_bytes or memory.total_bytes
    kinds = [
        *((name, getattr(memory, field)) for field, name in NAMES),
        ("reserve", memory.reserve_bytes),
    ]
    rows = [
        (name, bytes_text(n), percent_text(_share(n, whole)), bar(_share(n, whole)))
        for name, n in kinds
        if n
    ]
    total = memory.total_bytes
    rows.append(("peak", bytes_text(total), percent_text(_share(total, whole)), ""))
    if memory.limit_bytes is None:
        notes = ["no limit is known"]
    elif memory.fits:
        notes = [
            f"limit {bytes_text(memory.limit_bytes)}: fits, "
            f"{bytes_text(memory.limit_bytes - total)} to spare"
        ]
    else:
        notes = [
            f"limit {bytes_text(memory.limit_bytes)}: does not fit, "
            f"{bytes_text(total - memory.limit_bytes)} too much"
        ]
    if memory.reserve is not None:
        parts = [
            f"{name} {bytes_text(n)}"
            for name, n in (
                ("context", memory.reserve.context_bytes),
                ("communication buffers", memory.reserve.communication_bytes),
                ("fragmentation", memory.reserve.fragmentation_bytes),
            )
            if n
        ]
        notes += [f"reserve: {', '.join(parts)}"] if parts else []
    return Section(
        title="Memory, predicted, of the fullest device",
        columns=("", ">", ">", "*"),
        rows=tuple(rows),
        total=True,
        notes=tuple(notes),
        tone="" if memory.fits else "bad",
    )


def _stages(memory: Memory) -> list[Section]:
    """Memory of each stage of a pipeline; nothing where there is one."""
    if not memory.stages:
        return []
    rows = [
        (name, *(bytes_text(getattr(stage, field)) for stage in memory.stages))
        for field, name in NAMES
        if any(getattr(stage, field) for stage in memory.stages)
    ]
    sums = (bytes_text(stage.allocated_bytes) for stage in memory.stages)
    return [
        Section(
            title="Memory, predicted, of each stage",
            columns=("", *(f">stage {i}" for i in range(len(memory.stages)))),
            rows=(*rows, ("all but the reserve", *sums)),
            total=True,
        )
    ]


def measured_section(measurements: Iterable[Measurement]) -> Section:
    """What was measured, beside what was predicted for the same devices."""
    rows = []
    for m in measurements:
        rows.append(
            (
                m.devices,
                "step time",
                seconds_text(m.predicted_step_time_s),
                seconds_text(m.step_time_s),
                difference_text(m.predicted_step_time_s, m.step_time_s),
            )
        )
        if m.peak_memory_bytes is not None:
            predicted = m.predicted_memory_bytes
            rows.append(
                (
                    m.devices,
                    "peak memory",
                    "-" if predicted is None else bytes_text(predicted),
                    bytes_text(m.peak_memory_bytes),
                    "" if predicted is None else difference_text(predicted, m.peak_memory_bytes),
                )
            )
        for name, said, found in beside_each_other(m.predicted_memory, m.memory):
            row = (bytes_text(said), bytes_text(found), difference_text(said, found))
            rows.append(("", f"  {name}", *row))
    return Section(
        title="Predicted and measured",
        columns=("on", "", ">predicted", ">measured", ">difference"),
        rows=tuple(rows),
    )


def real_runs_section(plan: PlanDocument) -> Section:
    """What was run to pick the plan, predicted beside measured."""
    rows = []
    for run in plan.real_runs:
        measured = run.measured_step_s
        rows.append(
            (
                run.label,
                seconds_text(run.predicted_step_s),
                "failed" if measured is None else seconds_text(measured),
                "" if measured is None else difference_text(run.predicted_step_s, measured),
                run.error,
            )
        )
    return Section(
        title="Really run, to pick by measurement",
        columns=("plan", ">predicted", ">measured", ">difference", ""),
        rows=tuple(rows),
    )


def _collectives(plan: PlanDocument) -> Section:
    groups = plan.collectives
    if not groups:
        return Section(title="Collectives of one step", lines=("none",))
    rows: list[tuple[str, ...]] = [
        (
            g.op,
            " x ".join(g.axes),
            g.phase,
            str(g.count),
            bytes_text(g.total_bytes),
            seconds_text(g.seconds),
        )
        for g in groups
    ]
    rows.append(
        (
            "all",
            "",
            "",
            str(sum(g.count for g in groups)),
            bytes_text(sum(g.total_bytes for g in groups)),
            seconds_text(sum(g.seconds for g in groups)),
        )
    )
    return Section(
        title="Collectives of one step, predicted, of one device",
        columns=("", "over", "in", ">count", ">bytes", ">time"),
        rows=tuple(rows),
        total=True,
    )


# ---- tensors ----------------------------------------------------------------------------------


def tensors_section(
    title: str, tensors: Mapping[str, TensorDocument], mesh: MeshDocument
) -> Section:
    """How tensors are stored; those of repeated blocks in one line."""
    found = fold(
        (
            name,
            (
                tensor_text(t.shape, t.dtype),
                placement_text(t, mesh),
                t.local_bytes,
            ),
        )
        for name, t in tensors.items()
    )
    rows = [
        (name, shape, spec, bytes_text(num_bytes * count))
        for name, count, (shape, spec, num_bytes) in found
    ]
    return Section(
        title=f"{title}: {len(tensors)}",
        columns=(".", "shape", "stored as", ">per device"),
        rows=tuple(rows),
        notes=("bytes of all tensors of a line",) if any(c > 1 for _, c, _ in found) else (),
    )


def placement_text(tensor: TensorDocument, mesh: MeshDocument) -> str:
    """``P("data", None)``, ``whole``, and what a partition spec alone cannot tell."""
    entries = PartitionSpec(*tensor.partition_spec)
    texts = [str(entries)] if entries.names else []
    partial = [axis for axis, state in tensor.layout.items() if state == "P"]
    if partial:
        texts.append(f"partial over {', '.join(partial)}")
    exact = _exact(tensor, mesh)
    if exact:
        texts.append(", ".join(exact))
    return "; ".join(texts) or "whole"


_STATE = re.compile(r"S\((\d+)(?:, (\d+), (\d+))?\)")


def _exact(tensor: TensorDocument, mesh: MeshDocument) -> list[str]:
    """Cuts that are in strides or in whole units, in words."""
    names, sizes = mesh.active
    if not names or set(tensor.layout) - set(names):
        return []
    layout: list[State] = []
    for name, size in zip(names, sizes, strict=True):
        text = tensor.layout.get(name, "R")
        found = _STATE.fullmatch(text)
        if found is None:
            layout.append(P if text == "P" else R)
            continue
        dim = int(found[1])
        if dim >= len(tensor.shape):
            return []
        if found[2] is None:
            layout.append(canonical(Cut(dim, 1, tensor.shape[dim]), size))
        else:
            layout.append(Cut(dim, int(found[2]), int(found[3])))
    try:
        spec = ShardingSpec.from_layout(_mesh(names, sizes), tuple(layout), tensor.shape)
    except SpecError:
        return []
    return [
        f"{axis} cuts each of {cut.outer} pieces" if cut.outer > 1 else f"{axis} cuts {cut.n} units"
        for axis, cut in spec.cuts
    ]


@lru_cache(maxsize=8)
def _mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """Made once for all tensors: it lists every device."""
    return DeviceMesh.of(**dict(zip(names, sizes, strict=True)))


def _alternatives(plan: PlanDocument) -> Section:
    rows = [
        (
            a.label,
            str(a.mesh),
            "-" if a.step_time_s is None else seconds_text(a.step_time_s),
            "-" if a.memory_bytes is None else bytes_text(a.memory_bytes),
            "yes" if a.fits else "no",
            a.why,
        )
        for a in plan.alternatives
    ]
    return Section(
        title="Also tried",
        columns=("", "mesh", ">step", ">memory", "fits", "why it lost"),
        rows=tuple(rows),
    )
