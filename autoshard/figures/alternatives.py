"""What else was tried for a plan: its time against its memory."""

from __future__ import annotations

from autoshard.drawing.scene import Scene
from autoshard.figures.palette import NEUTRAL, STRATEGIES
from autoshard.figures.scatter import Dot, time_against_memory
from autoshard.plan import PlanDocument


def alternatives(plan: PlanDocument, *, width: float) -> Scene:
    """The plan and its alternatives, the limit, and the front of the best."""
    mesh = ", ".join(f"{n}={s}" for n, s in zip(*plan.mesh.active, strict=True))
    dots = [
        Dot(
            label=f"this plan: {mesh or 'one device'}",
            kind=plan.strategy,
            color=STRATEGIES.get(plan.strategy, NEUTRAL),
            seconds=plan.step_time.total_s,
            num_bytes=plan.memory.total_bytes,
            fits=plan.memory.fits,
            chosen=True,
            short="this plan",
        )
    ]
    for other in plan.alternatives:
        if other.step_time_s is None or other.memory_bytes is None:
            continue
        kind = other.label.split(",")[0].split(" ")[0]
        dots.append(
            Dot(
                label=other.label,
                kind=kind,
                color=STRATEGIES.get(kind, NEUTRAL),
                seconds=other.step_time_s,
                num_bytes=other.memory_bytes,
                fits=other.fits,
            )
        )
    return time_against_memory(
        "Step time against memory of what was tried",
        dots,
        limit_bytes=plan.memory.limit_bytes,
        width=width,
    )
