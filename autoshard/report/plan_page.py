"""The report of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from autoshard.errors import RequestError
from autoshard.figures import alternatives, mesh, plan_bars, stages, timeline
from autoshard.plan import PlanDocument, TensorDocument
from autoshard.render.plan import cluster_text, measured_section, tensors_section
from autoshard.render.units import bytes_text, count_text, percent_text, seconds_text
from autoshard.report.cluster import cluster_table
from autoshard.report.figure import Figure
from autoshard.report.page import (
    Cell,
    Column,
    bullets,
    clean,
    folded,
    note,
    page,
    table,
    tiles,
    warnings,
)

METHOD = (
    "An operator takes the longer of its floating-point operations at the sustained rate and its "
    "bytes at the sustained bandwidth, and never less than its launch (roofline).",
    "A collective takes the time of the fastest of the known algorithms (ring, tree, by tiers, "
    "pairwise) on the links that its axis really crosses.",
    "A step is simulated on two streams: operators wait for the messages that bring their "
    "operands; gradients of replicated parameters travel fused, beside the rest of backward, and "
    "the optimizer waits for the last of them.",
    "Memory is what stays all step, what is kept for backward, and the fullest moment beyond "
    "that; gradients count in full.",
    "Everything is of the device with the largest shards; devices of a kind are equally fast.",
)
"""How every figure of a plan comes about, whatever the plan."""


def plan_page(document: PlanDocument, trace: Mapping[str, Any] | None = None) -> str:
    """A plan as one HTML page; see :mod:`autoshard.report`.

    Args:
        document: the plan.
        trace: its predicted timeline (:func:`autoshard.planner.timeline.predicted_trace`), if at
            hand.
    """
    title = f"{document.model.name} on {_devices(document)}"
    body = [
        f"<h1>{clean(title)}</h1>",
        f'<p class="lead">{clean(document.label)}</p>',
        note(_request(document)),
        _headline(document),
    ]
    if document.warnings:
        body.append(warnings(document.warnings))
    parts = {
        "alternatives": _alternatives(document),
        "communication": _collectives(document),
    }
    for figure in plan_figures(document, trace):
        body += [f"<h2>{clean(figure.title)}</h2>", figure.html(), parts.get(figure.name, "")]
    if document.measurements:
        body += ["<h2>Predicted and measured</h2>", _measured(document)]
    body += ["<h2>How each tensor is stored</h2>", *_tensors(document), *_assumed(document)]
    body.append(_footer(document))
    return page(f"{title}: autoshard plan", [part for part in body if part])


def plan_figures(
    document: PlanDocument, trace: Mapping[str, Any] | None = None
) -> tuple[Figure, ...]:
    """The figures of a plan, in the order in which its report shows them."""
    per_node = document.cluster.get("devices_per_node")
    out = [
        Figure(
            name="mesh",
            title="The mesh on the nodes",
            caption="Devices in their nodes, in the order of their ranks.",
            draw=lambda width: mesh.mesh(
                document.mesh.axis_names,
                document.mesh.sizes,
                devices_per_node=per_node if isinstance(per_node, int) and per_node > 0 else 8,
                width=width,
            ),
        ),
        Figure(
            name="step-time",
            title="Where the step's time goes",
            caption="Predicted, of the slowest device. " + _hidden(document),
            draw=lambda width: plan_bars.step_time(
                document.step_time, lower_bound_s=document.lower_bound_s, width=width
            ),
        ),
        Figure(
            name="memory",
            title="Memory against its limit",
            caption="Predicted, at the fullest moment of the fullest device. " + _spare(document),
            draw=lambda width: plan_bars.memory(document.memory, width=width),
        ),
    ]
    if document.alternatives:
        out.append(
            Figure(
                name="alternatives",
                title="What else was tried",
                caption="Each dot is the best of one strategy on one mesh; lower is faster, "
                "further left needs less memory.",
                draw=lambda width: alternatives.alternatives(document, width=width),
            )
        )
    if document.collectives:
        out.append(
            Figure(
                name="communication",
                title="Communication by axis",
                caption="Predicted, of one device in one step, whether compute hides it or not.",
                draw=lambda width: plan_bars.communication(document.collectives, width=width),
            )
        )
    if trace is not None and not document.schedule.is_plain:
        out.append(
            Figure(
                name="timeline",
                title="The predicted timeline",
                caption="Microbatches, by number, as the stages take them. The command autoshard "
                "trace writes all of it for Perfetto.",
                draw=lambda width: stages.stages(trace, width=width),
            )
        )
    elif trace is not None:
        out.append(
            Figure(
                name="timeline",
                title="The predicted timeline",
                caption="The whole step: the higher a track stands, the more of that moment it is "
                "busy. Below it, one block of the middle, event by event. The command autoshard "
                "trace writes all of it for Perfetto.",
                draw=lambda width: timeline.timeline(trace, width=width),
            )
        )
    return tuple(out)


# ---- head ---------------------------------------------------------------------------------------


def _devices(plan: PlanDocument) -> str:
    count = prod(plan.mesh.sizes)
    device = plan.cluster.get("device")
    kind = device.get("name") if isinstance(device, Mapping) else None
    return f"{count:,} x {kind}" if kind else f"{count:,} devices"


def _request(plan: PlanDocument) -> str:
    batch = f"global batch {plan.global_batch:,}"
    if plan.seq_len is not None:
        batch += f" of {plan.seq_len:,} tokens"
    optimizer = f"optimizer {plan.optimizer}" if plan.mode == "train" else f"mode {plan.mode}"
    if plan.context is not None:
        optimizer += f" with {plan.context:,} tokens"
    return (
        f"{count_text(plan.model.parameter_count)} parameters, {batch}, {plan.dtype}, {optimizer}; "
        f"cluster {cluster_text(plan)}"
    )


def _headline(plan: PlanDocument) -> str:
    time, memory = plan.step_time, plan.memory
    total = time.total_s
    figures = [("Step time", seconds_text(total), _bound(plan))]
    if total > 0:
        samples, tokens = plan.global_batch / total, _tokens(plan)
        figures.append(
            ("Throughput", f"{tokens / total:,.0f} tokens/s", f"{samples:,.4g} samples/s")
            if tokens
            else ("Throughput", f"{samples:,.4g} samples/s", "")
        )
    limit = memory.limit_bytes
    fits = "no limit is known" if limit is None else f"of {bytes_text(limit)}"
    if limit is not None and not memory.fits:
        fits += ": does not fit"
    figures.append(("Memory of a device", bytes_text(memory.total_bytes), fits))
    share = time.exposed_communication_s / total if total > 0 else 0.0
    figures.append(
        (
            "Communication not hidden",
            percent_text(share),
            f"{seconds_text(time.exposed_communication_s)} of a step",
        )
    )
    names, sizes = plan.mesh.active
    text = " x ".join(f"{n}={s:,}" for n, s in zip(names, sizes, strict=True))
    figures.append(("Mesh", text or "one device", "outermost axis first" if text else ""))
    return tiles(figures)


def _tokens(plan: PlanDocument) -> int:
    """Tokens of a step, where its input is tokens; else 0."""
    ids = plan.inputs.get("input_ids")
    if plan.tokens is not None:
        return plan.tokens
    return prod(ids.shape) if ids is not None else 0


def _bound(plan: PlanDocument) -> str:
    if not plan.lower_bound_s:
        return "predicted"
    gap = max(0.0, plan.step_time.total_s / plan.lower_bound_s - 1)
    return f"predicted; within {percent_text(gap)} of the bound" if gap else "predicted; optimal"


def _hidden(plan: PlanDocument) -> str:
    if plan.lower_bound_s is None:
        return ""
    return "The dashed line is the bound that no plan can be faster than, by this prediction."


def _spare(plan: PlanDocument) -> str:
    memory = plan.memory
    if memory.limit_bytes is None:
        return "No limit is known."
    spare = memory.limit_bytes - memory.total_bytes
    return f"{bytes_text(abs(spare))} {'to spare' if spare >= 0 else 'too much'}."


# ---- tables -------------------------------------------------------------------------------------


def _alternatives(plan: PlanDocument) -> str:
    if not plan.alternatives:
        return ""
    rows: list[list[str | Cell]] = [
        [
            f"this plan: {plan.mesh}",
            Cell(seconds_text(plan.step_time.total_s), plan.step_time.total_s),
            Cell(bytes_text(plan.memory.total_bytes), plan.memory.total_bytes),
            "",
        ]
    ]
    for other in plan.alternatives:
        step, held = other.step_time_s, other.memory_bytes
        rows.append(
            [
                other.label,
                Cell("-") if step is None else Cell(seconds_text(step), step),
                Cell("-") if held is None else Cell(bytes_text(held), held),
                other.why,
            ]
        )
    columns = [
        Column("configuration", "name"),
        Column("step", "r"),
        Column("memory", "r"),
        Column("why it lost", "long"),
    ]
    return table(columns, rows, marks={0: "chosen"}, sortable=True)


def _collectives(plan: PlanDocument) -> str:
    groups = plan.collectives
    if not groups:
        return note("This plan sends nothing.")
    rows: list[list[str | Cell]] = [
        [
            g.op,
            " x ".join(g.axes),
            g.phase,
            Cell(f"{g.count:,}", g.count),
            Cell(bytes_text(g.total_bytes), g.total_bytes),
            Cell(seconds_text(g.seconds), g.seconds),
        ]
        for g in groups
    ]
    columns = [
        Column("collective"),
        Column("over"),
        Column("in"),
        Column("count", "r"),
        Column("bytes", "r"),
        Column("time", "r"),
    ]
    total = (
        f"All together: {sum(g.count for g in groups):,} messages, "
        f"{bytes_text(sum(g.total_bytes for g in groups))}, "
        f"{seconds_text(sum(g.seconds for g in groups))}"
    )
    return folded(
        "Every collective of a step, of one device",
        table(columns, rows, sortable=True) + note(total),
    )


def _measured(plan: PlanDocument) -> str:
    section = measured_section(plan.measurements)
    columns = [Column("on"), Column(""), *(Column(c[1:], "r") for c in section.columns[2:])]
    return table(columns, section.rows)


def _tensors(plan: PlanDocument) -> list[str]:
    groups: tuple[tuple[str, str, Mapping[str, TensorDocument]], ...] = (
        ("Parameters", "parameters", plan.parameters),
        ("Inputs", "inputs", plan.inputs),
        ("Outputs", "outputs", plan.outputs),
        ("Values between blocks", "activations", plan.activations),
    )
    columns = [
        Column("name", "name"),
        Column("shape"),
        Column("stored as", "long"),
        Column("per device", "r"),
    ]
    out = [note("Tensors of repeated blocks are one line; bytes are those of all of them.")]
    for title, name, tensors in groups:
        if tensors:
            section = tensors_section(title, tensors, plan.mesh)
            out.append(folded(section.title, table(columns, section.rows, search=name)))
    return out


def _assumed(plan: PlanDocument) -> list[str]:
    out = ["<h2>What this rests on</h2>"]
    if plan.assumptions:
        out += ["<h3>Assumed about the request</h3>", bullets(plan.assumptions)]
    out += ["<h3>How the figures come about</h3>", bullets((*METHOD, _buckets(plan)))]
    out += [
        "<h3>The cluster's numbers and where they come from</h3>",
        _cluster(plan),
    ]
    return out


def _cluster(plan: PlanDocument) -> str:
    try:
        return cluster_table(plan.cluster)
    except RequestError as error:
        return note(f"the plan's cluster document tells none: {error}")


def _buckets(plan: PlanDocument) -> str:
    again = len(plan.regather)
    return f"Fused gradients are sent from {bytes_text(plan.bucket_bytes)} on." + (
        f" {again:,} gathered {'value is' if again == 1 else 'values are'} dropped after use and "
        "gathered again in backward."
        if again
        else ""
    )


def _footer(plan: PlanDocument) -> str:
    source = f", from {plan.model.source}" if plan.model.source else ""
    text = (
        f"autoshard plan, version {plan.schema_version}; model {plan.model.name}{source}, "
        f"fingerprint {plan.model.fingerprint}; strategy {plan.strategy}, seed {plan.seed}"
    )
    return f"<footer>{clean(text)}</footer>"
