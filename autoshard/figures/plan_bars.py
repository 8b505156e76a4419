"""Where a step's time goes, what memory holds, and what each axis carries: bars of one plan."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.drawing.scene import Scene
from autoshard.figures.bars import Bar, Part, stacked_bars
from autoshard.figures.palette import COLLECTIVES, MEMORY, NEUTRAL, TIME
from autoshard.figures.scale import byte_unit, time_unit
from autoshard.plan import CollectiveGroup, Memory, StepTime
from autoshard.render.units import bytes_text, percent_text, seconds_text


def step_parts(time: StepTime) -> dict[str, float]:
    """Seconds of a step by what they are spent on; they add up to the step."""
    return {
        "compute": time.compute_s,
        "optimizer": time.optimizer_s,
        "communication not hidden": time.exposed_communication_s,
        "waiting": time.waiting_s if time.waiting_s >= 0.001 * time.total_s else 0.0,
    }


def memory_parts(memory: Memory) -> dict[str, int]:
    """Bytes of the fullest device by what they hold; they add up to the peak."""
    return {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "KV cache": memory.kv_cache_bytes,
        "gathered parameters": memory.gathered_bytes,
        "temporaries": memory.temporary_bytes,
        "reserve": memory.reserve_bytes,
    }


def step_time(time: StepTime, *, lower_bound_s: float | None = None, width: float) -> Scene:
    """The step, its phases, and how much of the communication compute hides."""
    hidden = max(0.0, time.communication_s - time.exposed_communication_s)
    bars = [
        Bar(
            label="One step",
            parts=_times(step_parts(time)),
            note=seconds_text(time.total_s),
        ),
        Bar(
            label="All communication",
            parts=_times(
                {
                    "communication not hidden": time.exposed_communication_s,
                    "communication hidden": hidden,
                }
            ),
            note=(
                f"{seconds_text(time.communication_s)}, "
                f"{percent_text(hidden / time.communication_s)} hidden by compute"
                if time.communication_s
                else "none"
            ),
        ),
        Bar(
            label="Phases",
            parts=_times(
                {
                    "forward": time.forward_s,
                    "backward": time.backward_s,
                    "optimizer": time.optimizer_s,
                }
            ),
            note=(
                f"forward {seconds_text(time.forward_s)}, backward {seconds_text(time.backward_s)}"
            ),
        ),
    ]
    return stacked_bars(
        f"Step time, predicted: {seconds_text(time.total_s)}",
        bars,
        width=width,
        unit=time_unit(time.total_s),
        value_text=seconds_text,
        marked=1,
        mark=None
        if lower_bound_s is None
        else (lower_bound_s, f"no plan is faster than {seconds_text(lower_bound_s)}"),
    )


def _times(parts: dict[str, float]) -> tuple[Part, ...]:
    return tuple(Part(name=n, value=s, color=TIME[n]) for n, s in parts.items() if s > 0)


def memory(memory: Memory, *, width: float) -> Scene:
    """What the fullest device holds, against its limit."""
    total, limit = memory.total_bytes, memory.limit_bytes
    note = bytes_text(total)
    if limit is not None:
        note += f" of {bytes_text(limit)}"
        note += "" if memory.fits else ": does not fit"
    parts = tuple(
        Part(name=n, value=b, color=MEMORY[n]) for n, b in memory_parts(memory).items() if b > 0
    )
    return stacked_bars(
        f"Memory of the fullest device, predicted: {note}",
        [Bar(label="Fullest device", parts=parts, note=note, bad=not memory.fits)],
        width=width,
        unit=byte_unit(limit or total),
        value_text=bytes_text,
        mark=None if limit is None else (limit, f"limit {bytes_text(limit)}"),
    )


def communication(groups: Sequence[CollectiveGroup], *, width: float) -> Scene:
    """Seconds of the messages over each axis, by collective; how many, and their bytes."""
    by_axis: dict[str, list[CollectiveGroup]] = {}
    for group in groups:
        by_axis.setdefault(" x ".join(group.axes), []).append(group)
    bars = []
    for axis, mine in sorted(by_axis.items(), key=lambda item: -sum(g.seconds for g in item[1])):
        seconds: dict[str, float] = {}
        for op in (*COLLECTIVES, *(g.op for g in mine)):
            if here := sum(g.seconds for g in mine if g.op == op):
                seconds[op] = here
        count = sum(g.count for g in mine)
        bars.append(
            Bar(
                label=f"over {axis}",
                parts=tuple(
                    Part(name=op, value=s, color=COLLECTIVES.get(op, NEUTRAL))
                    for op, s in seconds.items()
                ),
                note=(
                    f"{seconds_text(sum(g.seconds for g in mine))}, "
                    f"{bytes_text(sum(g.total_bytes for g in mine))} in {count:,} "
                    f"{'message' if count == 1 else 'messages'}"
                ),
            )
        )
    return stacked_bars(
        "Communication of one device in one step, by axis",
        bars,
        width=width,
        unit=time_unit(max((b.total for b in bars), default=0.0)),
        value_text=seconds_text,
    )
