"""Which of several priced plans is preferred."""

from __future__ import annotations

from autoshard.plan import Memory, StepTime


def preference(step_time: StepTime, memory: Memory) -> tuple[bool, float]:
    """Least for the best: what fits, the faster first; of what does not fit, the smaller first."""
    if memory.fits:
        return False, step_time.total_s
    return True, float(memory.total_bytes)
