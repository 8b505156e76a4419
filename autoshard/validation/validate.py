"""``validate_program`` and ``measure_program``: a plan on real processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor

from autoshard.analyzer import Captured, evaluate_constants
from autoshard.assemble import program_of
from autoshard.errors import RequestError, ValidationError
from autoshard.graph import ModelGraph
from autoshard.plan import PlanDocument
from autoshard.program import Program
from autoshard.runtime.custom_ops import custom_operators
from autoshard.runtime.processes import Pool, Progress, get_pool
from autoshard.search.cost import weight_values
from autoshard.sharding.layout import Layout, R, coordinates, forward_half
from autoshard.validation.capture_check import check_capture
from autoshard.validation.compare import (
    Coordinate,
    count_differences,
    deviation,
    first_difference,
    magnitude,
)
from autoshard.validation.locate import first_wrong_operator
from autoshard.validation.ranks import Job, RankResult, run_rank
from autoshard.validation.reference import Step, run_unsharded
from autoshard.validation.report import (
    CaptureCheck,
    CollectiveCheck,
    Kind,
    Measured,
    TensorCheck,
    ValidationReport,
)
from autoshard.validation.tracker import METHOD
from autoshard.validation.values import (
    WholeValues,
    default_dtype,
    draw_buffers,
    draw_parameters,
)

TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest deviation that the order of sums explains, by dtype."""

Say = Callable[[str, float | None], None]


def validate_program(
    plan: Program | PlanDocument,
    captured: Captured,
    *,
    dtype: str = "float64",
    seed: int = 0,
    steps: int = 3,
    timeout_s: float = 120.0,
    tolerance: float | None = None,
    compare_module: bool = True,
    pool: Pool | None = None,
    progress: Say | None = None,
    before_step: Callable[[int], None] | None = None,
) -> ValidationReport:
    """Run a plan on as many processes as it has devices, and compare with one device.

    Whole inputs and parameters are drawn by ``seed``. The unsharded graph runs here, the lowered
    program in processes; loss, outputs, all gradients and changed buffers must agree, and every
    process must issue the predicted collectives, in order.

    Args:
        plan: what to validate.
        captured: the model.
        dtype: floating dtype of the check; float64 tells a wrong rule from rounding.
        seed: of everything that is drawn.
        steps: how many steps are timed; 0 for none.
        timeout_s: limit of the silence of a process, and of a collective.
        tolerance: largest allowed deviation; None for what ``dtype`` allows.
        compare_module: whether to run the module itself, too, beside its graph.
        pool: processes to use; None for those of this interpreter.
        progress: called with what is done next, and how far it is (0 to 1).
        before_step: called with the rank before its step, in its process.

    Raises:
        ValidationError: numbers or collectives differ; the message names the operator, the
            ``report`` has all figures.
        RankError: a process raised, died or hung; with its own error.
        RequestError: ``plan`` is not for the graph of ``captured``.
    """
    started = time.monotonic()
    say = progress or (lambda text, fraction: None)
    allowed = TOLERANCES.get(dtype, 1e-3) if tolerance is None else tolerance
    name = captured.graph.name
    program = in_dtype(_program(plan, captured), dtype)
    say("drawing weights and inputs", 0.02)
    values = draw_values(captured, program.graph, dtype, seed)
    say("one device", 0.1)
    with default_dtype(dtype):
        right = run_unsharded(program.graph, values, seed=seed)
    given = not is_finite(right)
    if given:
        values = draw_values(captured, program.graph, dtype, seed, given=True)
        with default_dtype(dtype):
            right = run_unsharded(program.graph, values, seed=seed)
        if not is_finite(right):
            raise ValidationError(
                f"on one device {first_infinite(right)} of {name} is not finite, "
                "so nothing can be compared: random weights and inputs do not suit this model. "
                "Give example_inputs of real values (masks, probabilities, positive numbers)"
            )
    capture = CaptureCheck(dtype=dtype, skipped="it was not asked for")
    if compare_module:
        say("the module itself", 0.2)
        capture = check_capture(captured, seed, given=given)
    ranks = pool or get_pool(prod(program.sizes))
    optimizer = plan.optimizer if isinstance(plan, PlanDocument) else ""
    job = replace(
        _job(program, values, seed, steps),
        dtype=dtype,
        optimizer=optimizer,
        before_step=before_step,
    )
    found = _run(ranks, job, timeout_s, say, 0.3)
    checks = compare(program, _steps(found), right, allowed)
    report = ValidationReport(
        devices=prod(program.sizes),
        mesh=", ".join(f"{n}={s}" for n, s in zip(program.axis_names, program.sizes, strict=True)),
        dtype=dtype,
        tolerance=allowed,
        checks=tuple(checks),
        collectives=check_collectives(program, found),
        capture=capture,
        step_seconds=_slowest(found),
        predicted_step_seconds=_predicted_seconds(plan),
        **_memory(found, plan if dtype == getattr(plan, "dtype", None) else None),
        memory_method=METHOD,
        seconds=time.monotonic() - started,
    )
    if not report.numbers_agree:
        say("looking for the operator", 0.8)
        raise ValidationError(_locate(ranks, job, report, timeout_s), report=report)
    if report.collectives.differences:
        raise ValidationError(
            f"numbers agree, but {report.collectives.differences} collectives differ between "
            f"what was predicted and what was issued; {report.collectives.first}",
            report=report,
        )
    if not capture.agrees:
        assert capture.worst is not None
        raise ValidationError(
            f"the plan does what its graph says, but the graph of {name} is not "
            f"what the module computes: {capture.worst.kind} {capture.worst.name!r} differs by "
            f"{capture.worst.deviation:.1e} of its largest magnitude on one device in "
            f"{capture.dtype} (rounding allows {capture.tolerance:.0e}). Does the module hold "
            "state, hooks or Python conditions that a trace does not see? If not, please report it",
            report=report,
        )
    say("done", 1.0)
    return report


def measure_program(
    plan: Program | PlanDocument,
    captured: Captured,
    *,
    seed: int = 0,
    steps: int = 3,
    timeout_s: float = 120.0,
    pool: Pool | None = None,
    progress: Say | None = None,
) -> Measured:
    """Run a plan in its own dtype for what it costs: time, memory and collectives, not numbers.

    Arguments and errors as :func:`validate_program`.
    """
    say = progress or (lambda text, fraction: None)
    program = _program(plan, captured)
    values = draw_values(captured, program.graph, None, seed)
    optimizer = plan.optimizer if isinstance(plan, PlanDocument) else ""
    job = replace(_job(program, values, seed, steps), keep=False, optimizer=optimizer)
    found = _run(pool or get_pool(prod(program.sizes)), job, timeout_s, say, 0.3)
    say("done", 1.0)
    return Measured(
        collectives=check_collectives(program, found),
        step_seconds=_slowest(found),
        step_seconds_each=max((r.step_seconds for r in found.values()), key=_median, default=()),
        predicted_step_seconds=_predicted_seconds(plan),
        **_memory(found, plan),
    )


def _program(plan: Program | PlanDocument, captured: Captured) -> Program:
    """The program of a plan, if it is one for the captured model."""
    graph = captured.graph
    if not isinstance(plan, Program):
        return program_of(graph, plan)
    if plan.graph.fingerprint != graph.fingerprint:
        raise RequestError(f"the program is for another graph than {graph.name}; plan it again")
    return plan


def _job(program: Program, values: WholeValues, seed: int, steps: int) -> Job:
    operators = custom_operators({n.family for n in program.graph.nodes})
    return Job(
        program=program,
        values=values,
        operators=operators,
        seed=seed,
        weights=weight_values(program.graph),
        steps=steps,
    )


def _steps(found: Mapping[Coordinate, RankResult]) -> dict[Coordinate, Step]:
    return {at: r.step for at, r in found.items() if r.step is not None}


def _slowest(found: Mapping[Coordinate, RankResult]) -> float | None:
    return max((median(r.step_seconds) for r in found.values() if r.step_seconds), default=None)


def _median(seconds: tuple[float, ...]) -> float:
    return median(seconds) if seconds else 0.0


def _predicted_seconds(plan: Program | PlanDocument) -> float | None:
    """Forward and backward, which is what is measured."""
    if not isinstance(plan, PlanDocument):
        return None
    return plan.step_time.forward_s + plan.step_time.backward_s


def _memory(
    found: Mapping[Coordinate, RankResult], plan: Program | PlanDocument | None
) -> dict[str, Any]:
    """Of the fullest process, beside what a plan said of the fullest device."""
    known = [r for r in found.values() if r.peak_bytes is not None]
    fullest = max(known, key=lambda r: r.peak_bytes or 0, default=None)
    said = plan.memory.categories if isinstance(plan, PlanDocument) else None
    return {
        "memory": None if fullest is None else fullest.memory,
        "peak_bytes": None if fullest is None else fullest.peak_bytes,
        "predicted_memory": said,
        "predicted_peak_bytes": None if said is None else said.allocated_bytes,
    }


def in_dtype(program: Program, dtype: str) -> Program:
    """The same program on a graph whose floating values are all of ``dtype``."""
    return Program(
        program.graph.with_float_dtype(dtype),
        program.axis_names,
        program.sizes,
        program.strategies,
        program.resharder,
        regather=program.regather,
        bucket_bytes=program.bucket_bytes,
    )


def is_finite(step: Step) -> bool:
    """Whether the loss and all gradients of a step are finite numbers."""
    return not first_infinite(step)


def first_infinite(step: Step) -> str:
    """What of a step is not finite, in words; empty where all is. Outputs may hold infinities."""
    if not bool(torch.isfinite(step.loss).all()):
        return "the loss"
    bad = (n for n, g in step.gradients.items() if not bool(torch.isfinite(g).all()))
    name = next(bad, None)
    return "" if name is None else f"the gradient of {name!r}"


def draw_values(
    captured: Captured,
    graph: ModelGraph,
    dtype: str | None,
    seed: int,
    *,
    given: bool = False,
) -> WholeValues:
    """Whole values for ``graph``, which is that of ``captured`` but for its dtypes.

    Args:
        captured: the model.
        graph: its graph in the dtypes to run in.
        dtype: of floating inputs.
        seed: of random values.
        given: whether inputs are the caller's own values, where there are any.
    """
    buffers: dict[str, Tensor] = {}
    if any(c.op == "buffer" for c in graph.constants):
        module = captured.materialize(seed)
        buffers = dict(module.named_buffers(remove_duplicate=False))
    return WholeValues(
        inputs=captured.draw_inputs(seed, dtype, given=given),
        parameters=draw_parameters(graph, seed),
        buffers=draw_buffers(graph, seed),
        constants=evaluate_constants(graph, buffers),
    )


def compare(
    program: Program, parts: Mapping[Coordinate, Step], right: Step, tolerance: float
) -> list[TensorCheck]:
    """Every device's parts beside the whole values."""
    graph, mesh = program.graph, program.sizes
    whole: Layout = (R,) * len(mesh)
    caller = program.loss_edge.taken
    out = []

    def check(
        kind: Kind,
        name: str,
        found: Mapping[Coordinate, Tensor | None],
        layout: Layout,
        value: Tensor,
        floor: float = 0.0,
    ) -> None:
        off = deviation(found, forward_half(layout), value, mesh, floor)
        out.append(TensorCheck(kind=kind, name=name, deviation=off))

    check("loss", graph.loss, {at: s.loss for at, s in parts.items()}, caller, right.loss)
    for path, name in graph.outputs:
        is_constant = graph.by_name[name].op == "constant"
        layout = whole if is_constant else program.strategies[name].result
        layout = caller if name == graph.loss else layout
        found = {at: s.outputs.get(path) for at, s in parts.items()}
        check("output", path, found, layout, right.outputs[path])
    largest = max((magnitude(g) for g in right.gradients.values()), default=0.0)
    for node in graph.nodes:
        layout = program.strategies[node.name].result
        fqn = str(node.attrs.get("fqn", ""))
        if node.op == "parameter" and fqn in right.gradients:
            found = {at: s.gradients.get(fqn) for at, s in parts.items()}
            gradient = right.gradients[fqn]
            # Zero but for rounding, as of a bias before a batch norm: there is nothing in the
            # tensor itself to measure rounding by.
            noise = magnitude(gradient) < tolerance * largest
            check("gradient", fqn, found, layout, gradient, largest if noise else 0.0)
        elif node.op == "buffer":
            found = {at: s.buffers.get(fqn) for at, s in parts.items()}
            check("buffer", fqn, found, layout, right.buffers[fqn])
    return out


def check_collectives(program: Program, found: Mapping[Coordinate, RankResult]) -> CollectiveCheck:
    """Issued beside predicted on every device."""
    differences, first = 0, ""
    for at, result in found.items():
        predicted = program.collectives(at)
        count = count_differences(predicted, result.issued)
        if count and not first:
            first = f"device {at}: {first_difference(predicted, result.issued)}"
        differences += count
    origin = next(iter(found))
    return CollectiveCheck(
        predicted=len(program.collectives(origin)),
        issued=len(found[origin].issued),
        differences=differences,
        first=first,
    )


def _run(
    pool: Pool, job: Job, timeout_s: float, say: Say, begin: float
) -> dict[Coordinate, RankResult]:
    def heard(rank: int, message: Progress) -> None:
        if rank == 0:
            done = None if message.fraction is None else begin + 0.5 * message.fraction
            say(message.text, done)

    say(f"{pool.world_size} processes", begin)
    results = pool.call(run_rank, (job,), timeout_s=timeout_s, on_progress=heard)
    return dict(zip(coordinates(job.program.sizes), results, strict=True))


def _locate(pool: Pool, job: Job, report: ValidationReport, timeout_s: float) -> str:
    """The message of a numeric failure."""
    worst = report.worst
    head = (
        f"on {report.mesh} {worst.kind} {worst.name!r} differs from one device's by "
        f"{worst.deviation:.1e} of its largest magnitude (allowed: {report.tolerance:.0e})"
    )
    again = replace(job, watch=True, steps=0)
    parts = _run(pool, again, timeout_s, lambda text, fraction: None, 0.8)
    with default_dtype(job.dtype):
        right = run_unsharded(job.program.graph, job.values, seed=job.seed, watch=True)
    where = first_wrong_operator(job.program, _steps(parts), right, report.tolerance)
    if not where:
        where = "every operator's operands, result and gradients agree: the fault lies in how "
        where += "gradients are summed; please report it."
    return f"{head}\n{where}"
