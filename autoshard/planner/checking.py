"""``validate`` and ``analyze``: a plan beside what really happens, a model beside its graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from autoshard.analyzer import Captured
from autoshard.assemble import program_of
from autoshard.cluster import Cluster
from autoshard.errors import MeshError, RequestError, ValidationError
from autoshard.graph import ITEM_BYTES
from autoshard.plan import PlanDocument
from autoshard.planner.capture import capture
from autoshard.planner.plan import Plan
from autoshard.planner.planning import optimize
from autoshard.planner.progress import reporter
from autoshard.planner.request import check_sizes, resolve_dtype
from autoshard.validation import (
    DryRunReport,
    Measured,
    ValidationReport,
    dry_run,
    measure_program,
    validate_program,
)

if TYPE_CHECKING:
    from torch import nn

    from autoshard.runtime.lower import LoweredModule
    from autoshard.runtime.processes import Pool

MOST_PROCESSES = 16
"""More processes than this on one machine only wait for each other."""

MEMORY_SHARE = 0.8
"""Share of the machine's free memory that a validation may take."""

Report = ValidationReport | DryRunReport


def analyze(
    model: nn.Module | str | Path | Mapping[str, Any],
    example_inputs: object | None = None,
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    progress: bool | Callable[[str], None] | None = True,
) -> Captured:
    """The training step of a model as a graph of operators with shapes, FLOPs and bytes.

    The result's ``graph`` is a :class:`~autoshard.graph.ModelGraph`; nothing of the model is
    allocated. Arguments as :func:`autoshard.optimize`.
    """
    check_sizes(global_batch=global_batch, seq_len=seq_len)
    return capture(
        model,
        example_inputs,
        batch=global_batch,
        seq_len=seq_len,
        dtype=resolve_dtype(dtype),
        progress=reporter(progress),
    )


def validate(
    model: Plan | nn.Module | str | Path | Mapping[str, Any],
    example_inputs: object | None = None,
    *,
    cluster: Cluster | str | Mapping[str, Any] | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    mesh: str | Mapping[str, int] | None = None,
    strategy: str | None = None,
    dtype: str = "float64",
    seed: int = 0,
    steps: int = 3,
    dry_run: bool = False,
    timeout_s: float = 120.0,
    progress: bool | Callable[[str], None] | None = True,
) -> Report:
    """Run a plan on processes of this machine and compare it with one device and with itself.

    Args:
        model: a plan, or the path of one; or a model, which is planned first (for ``devices``
            processes of this machine, 4 where none are given).
        example_inputs: of the model, one global batch.
        cluster: what a model is planned for; None: this machine.
        devices: number of processes.
        global_batch: samples of one step.
        seq_len: tokens of a sample.
        mesh: axis sizes to force.
        strategy: strategy to force.
        dtype: floating dtype in which numbers are compared.
        seed: of parameters and inputs.
        steps: steps whose time is measured, in the plan's own dtype; 0 for none.
        dry_run: start no processes; trace one rank of the full-size program.
        timeout_s: longest silence of a process, and longest wait of a collective.
        progress: see :func:`autoshard.optimize`.

    Raises:
        ValidationError: numbers or collectives differ; names the operator.
        RankError: a process failed; with its own error.
    """
    say = reporter(progress)
    plan = _plan_of(model)
    if plan is None:
        assert not isinstance(model, Plan)
        count = devices if devices is not None or cluster is not None else 4
        plan = optimize(
            model,
            example_inputs,
            cluster=cluster,
            devices=count,
            global_batch=global_batch,
            seq_len=seq_len,
            mesh=mesh,
            strategy=strategy or "auto",
            seed=seed,
            progress=say,
        )
    else:
        _refuse_others(
            cluster=cluster,
            mesh=mesh,
            strategy=strategy,
            global_batch=global_batch,
            seq_len=seq_len,
        )
        if devices is not None and devices != prod(plan.mesh.sizes):
            raise MeshError(
                f"the plan is for {prod(plan.mesh.sizes)} devices ({plan.mesh}), not {devices}; "
                "plan again for another number"
            )
    captured = plan.captured(None, example_inputs)
    return validate_plan(
        plan,
        captured,
        dry=dry_run,
        dtype=dtype,
        seed=seed,
        steps=steps,
        timeout_s=timeout_s,
        progress=say,
    )


def _plan_of(model: object) -> Plan | None:
    """The plan that ``model`` is or names; None for a model."""
    if isinstance(model, Plan):
        return model
    if isinstance(model, str | Path) and str(model).endswith(".json") and Path(model).is_file():
        from autoshard.analyzer import read_json

        if read_json(Path(model)).get("kind") == "autoshard.plan":
            return Plan.load(model)
    return None


def _refuse_others(**options: object) -> None:
    if given := [name for name, value in options.items() if value is not None]:
        raise RequestError(
            f"a plan fixes {', '.join(g.replace('_', ' ') for g in given)}; leave them out, or "
            "plan again"
        )


def validate_plan(
    plan: PlanDocument,
    captured: Captured,
    *,
    dry: bool = False,
    dtype: str = "float64",
    seed: int = 0,
    steps: int = 3,
    timeout_s: float = 120.0,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """See :func:`validate`: numbers in ``dtype``, costs and collectives in the plan's own."""
    started = time.monotonic()
    say = progress or (lambda text: None)
    if not plan.schedule.is_plain:
        raise RequestError(
            f"the plan's step has {plan.schedule.microbatches} microbatches, "
            f"{plan.schedule.stages} stages and recomputation {plan.schedule.recompute!r}; the "
            "bundled runtime runs all samples at once, without stages and recomputation: validate "
            "a plan without them"
        )
    checked = resolve_dtype(dtype) or "float64"
    if dry:
        say(f"tracing one of {prod(plan.mesh.sizes)} devices")
        traced = dry_run(program_of(captured.graph, plan))
        if not traced.passed:
            raise ValidationError(
                f"{traced.collectives.differences} collectives differ between what was predicted "
                f"and what was issued; {traced.collectives.first}",
                report=traced,
            )
        return traced
    _check_room(plan, checked)

    def told(text: str, fraction: float | None) -> None:
        say(text if fraction is None else f"{text} ({fraction:.0%})")

    numbers = validate_program(
        plan,
        captured,
        dtype=checked,
        seed=seed,
        steps=0,
        timeout_s=timeout_s,
        progress=told,
    )
    say(f"again in {plan.dtype}, for time, memory and collectives")
    costs = measure_program(
        plan, captured, seed=seed, steps=steps, timeout_s=timeout_s, progress=told
    )
    report = replace(
        numbers,
        collectives=costs.collectives,
        step_seconds=costs.step_seconds,
        predicted_step_seconds=costs.predicted_step_seconds,
        peak_bytes=costs.peak_bytes,
        predicted_peak_bytes=costs.predicted_peak_bytes,
        memory=costs.memory,
        predicted_memory=costs.predicted_memory,
        seconds=time.monotonic() - started,
    )
    if costs.collectives.differences:
        raise ValidationError(
            f"numbers agree, but {costs.collectives.differences} collectives differ between what "
            f"was predicted and what was issued in {plan.dtype}; {costs.collectives.first}",
            report=report,
        )
    return report


def measure_plan(
    plan: PlanDocument,
    captured: Captured,
    *,
    seed: int = 0,
    steps: int = 10,
    timeout_s: float = 120.0,
    pool: Pool | None = None,
) -> Measured:
    """Run a plan on processes of this machine for its time, memory and collectives alone.

    Three steps go ahead of the ``steps`` that are timed: one whose collectives are recorded, one
    whose memory is, and one to warm up.

    Raises:
        ValidationError: other collectives were issued than predicted.
        RequestError: more processes or memory than this machine has.
        RankError: a process failed; with its own error.
    """
    _check_room(plan, plan.dtype)
    found = measure_program(plan, captured, seed=seed, steps=steps, timeout_s=timeout_s, pool=pool)
    if found.collectives.differences:
        raise ValidationError(
            f"{found.collectives.differences} collectives differ between what was predicted and "
            f"what was issued in {plan.dtype}; {found.collectives.first}"
        )
    return found


def _check_room(plan: PlanDocument, dtype: str) -> None:
    """Refuse what this machine cannot hold, before it tries.

    Raises:
        RequestError: too many processes, or too much memory; says how much is needed.
    """
    devices = prod(plan.mesh.sizes)
    instead = "use the dry run (--dry-run), which needs neither processes nor memory"
    if devices > MOST_PROCESSES:
        raise RequestError(
            f"the plan is for {devices} devices; at most {MOST_PROCESSES} processes are run on one "
            f"machine; {instead}"
        )
    wider = ITEM_BYTES[dtype] / ITEM_BYTES[plan.dtype]
    m = plan.memory
    whole = sum(prod(p.shape) * ITEM_BYTES[p.dtype] for p in plan.parameters.values())
    activations = (m.activations_bytes + m.kv_cache_bytes) * devices
    need = int(wider * (devices * m.allocated_bytes + 4 * whole + activations))
    room = int(psutil.virtual_memory().available * MEMORY_SHARE)
    if need > room:
        raise RequestError(
            f"running {plan.model.name} on {devices} processes in {dtype} needs about "
            f"{need / 2**30:.1f} GiB; {room / 2**30:.1f} GiB may be used here; {instead}, or a "
            "smaller model or batch"
        )


def lower_here(plan: PlanDocument, captured: Captured, *, seed: int = 0) -> LoweredModule:
    """This rank's part of a planned model; see :meth:`Plan.lower`.

    Raises:
        MeshError: as many processes as the plan has devices are needed.
        RequestError: no process group to run in.
    """
    from autoshard.analyzer import evaluate_constants
    from autoshard.runtime.comm import Communicator
    from autoshard.runtime.lower import lower
    from autoshard.runtime.processes import current_world

    world = current_world()
    if world is None:
        raise RequestError(
            "plan.lower() gives one process's part of the model: run the script with torchrun "
            f"--nproc-per-node {prod(plan.mesh.sizes)}, or initialise torch.distributed before"
        )
    program = program_of(captured.graph, plan)
    world.check_mesh(program.sizes)
    module = captured.materialize(seed, plan.dtype)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return lower(
        program,
        constants=evaluate_constants(captured.graph, buffers),
        parameters={name: p.detach() for name, p in parameters.items()},
        buffers=buffers,
        comm=Communicator(program.sizes, program.axis_names, timeout_s=world.timeout_s),
        device=world.device,
    )
