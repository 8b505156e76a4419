"""The predicted timeline of a step of several microbatches: one process a stage, one event a task.

A task is the forward or the backward of one microbatch in one chunk of the model, the messages that
it waits for included. What goes from stage to stage has a track of its own. Above ``most_events``
neighbours on a stage are one event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

from autoshard import chrome
from autoshard.plan import PlanDocument
from autoshard.planner.predicted import model_of, trace_document
from autoshard.program import Program
from autoshard.search.pipeline import Placed
from autoshard.search.step import Step, price_step, segments

TASKS = {"F": "forward", "B": "backward", "W": "gradients of weights"}
SEND = "pipeline"


def stages_trace(program: Program, plan: PlanDocument, most_events: int) -> dict[str, Any]:
    """The timeline of a plan whose step is more than one pass, as a Chrome trace document.

    Args:
        program: of one microbatch.
        plan: the plan.
        most_events: bars of tasks that the document may have.
    """
    step = repriced(program, plan)
    schedule = plan.schedule
    each = prod(program.sizes)
    names = _names(program, step)
    chunks = len(step.chunks)
    events: list[dict[str, Any]] = []
    together = -(-len(step.timeline) // most_events)
    for stage in range(schedule.stages):
        rank = stage * each
        tracks = chrome.axis_tracks([SEND] if schedule.stages > 1 else [])
        title = f"stage {stage}, predicted ({plan.model.name})"
        events += chrome.names(rank, tracks, title)
        tasks = [t for t in step.timeline if t.rank == stage]
        for first in range(0, len(tasks), together):
            events.append(_task(rank, tasks[first : first + together], names))
        if together == 1:
            for task in tasks:
                crosses = task.action.chunk < chunks - 1 and task.action.task == "F"
                back = task.action.chunk > 0 and task.action.task == "B"
                if crosses or back:
                    events.append(_send(rank, tracks[SEND], task, step))
        events += _end(rank, step, stage)
    merged = "a task of a stage is one event, the messages inside it included"
    if together > 1:
        merged = f"{together} tasks of a stage that follow each other are one event"
    return trace_document(plan, events, merged)


def repriced(program: Program, plan: PlanDocument) -> Step:
    """The figures of a plan's step, with every task."""
    model = model_of(program, plan)
    return price_step(model, program, plan.schedule, plan.memory.limit_bytes, timeline=True)


def _names(program: Program, step: Step) -> list[str]:
    """Of each chunk: ``blocks 0-3``, with what stands before or after the blocks."""
    parts = segments(program.graph)
    if len(step.chunks) == 1:
        return ["whole model"]
    number: dict[int, int] = {}
    for index, part in enumerate(parts):
        if part.is_block:
            number[index] = len(number)
    out = []
    for first, end in zip(step.bounds, step.bounds[1:], strict=False):
        inside = [number[i] for i in range(first, end) if i in number]
        text = f"blocks {inside[0]}-{inside[-1]}" if inside else "no block"
        if first == 0 and not parts[0].is_block:
            text = f"what is before, {text}"
        if end == len(parts) and not parts[-1].is_block:
            text = f"{text}, what is after"
        out.append(text)
    return out


def _task(rank: int, tasks: Sequence[Placed], names: Sequence[str]) -> dict[str, Any]:
    one, last = tasks[0], tasks[-1]
    phase = "forward" if one.action.task == "F" else "backward"
    if len(tasks) == 1:
        name = f"{TASKS[one.action.task]} {one.action.microbatch}"
    else:
        counted = Counter(TASKS[t.action.task] for t in tasks)
        name = ", ".join(f"{task} x {count}" for task, count in counted.items())
    args: dict[str, object] = {
        "step": 0,
        "phase": phase,
        "microbatch": one.action.microbatch,
        "chunk": names[one.action.chunk],
        "predicted_us": chrome.microseconds(sum(t.seconds for t in tasks)),
    }
    if len(tasks) > 1:
        args["tasks"] = len(tasks)
    return chrome.bar(
        name,
        "compute",
        rank=rank,
        track=chrome.COMPUTE_TRACK,
        start_s=one.start_s,
        end_s=last.start_s + last.seconds,
        args=args,
    )


def _send(rank: int, track: int, task: Placed, step: Step) -> dict[str, Any]:
    forward = task.action.task == "F"
    chunk = task.action.chunk if forward else task.action.chunk - 1
    seconds, start = step.chunks[chunk].send_s, task.start_s + task.seconds
    return chrome.bar(
        f"send {'result' if forward else 'gradient'} {task.action.microbatch}",
        "comm",
        rank=rank,
        track=track,
        start_s=start,
        end_s=start + seconds,
        args={
            "step": 0,
            "phase": "forward" if forward else "backward",
            "op": "send",
            "axis": SEND,
            "bytes": step.sent_bytes,
            "value": f"microbatch {task.action.microbatch}",
            "issued_us": chrome.microseconds(start),
            "predicted_us": chrome.microseconds(seconds),
            "blocked_us": 0.0,
        },
    )


def _end(rank: int, step: Step, stage: int) -> list[dict[str, Any]]:
    """What follows the last task: gradients that nothing hides, and the optimizer."""
    done = max(t.start_s + t.seconds for t in step.timeline)
    out = []
    for name, start, seconds in (
        ("gradients", done, step.late_s),
        ("optimizer", done + step.late_s, step.updates_s[stage]),
    ):
        if seconds:
            out.append(
                chrome.bar(
                    name,
                    "compute",
                    rank=rank,
                    track=chrome.COMPUTE_TRACK,
                    start_s=start,
                    end_s=start + seconds,
                    args={
                        "step": 0,
                        "phase": "optimizer" if name == "optimizer" else "backward",
                        "predicted_us": chrome.microseconds(seconds),
                    },
                )
            )
    return out
