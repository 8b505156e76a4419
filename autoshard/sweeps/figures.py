"""What a row takes from a plan document; needs no torch, so that a service can fill its rows."""

from __future__ import annotations

from math import prod
from typing import Any

from autoshard.plan import PlanDocument


def figures(plan: PlanDocument) -> dict[str, Any]:
    """The columns of :class:`autoshard.sweeps.rows.Row` that a plan decides, by name.

    ``seq_len`` is among them only where a sample has tokens: elements of the largest input of
    whole numbers, sample x token.
    """
    step, memory = plan.step_time, plan.memory
    tokens = _tokens(plan)
    length = {} if tokens is None else {"seq_len": tokens // plan.global_batch}
    return {
        **length,
        "global_batch": plan.global_batch,
        "dtype": plan.dtype,
        "label": plan.label,
        "mesh": str(plan.mesh),
        "step_time_s": step.total_s,
        "samples_per_s": plan.global_batch / step.total_s,
        "tokens_per_s": None if tokens is None else tokens / step.total_s,
        "memory_bytes": memory.total_bytes,
        "memory_limit_bytes": memory.limit_bytes,
        "fits": memory.fits,
        "compute_s": step.compute_s,
        "communication_s": step.communication_s,
        "exposed_communication_s": step.exposed_communication_s,
        "forward_backward_s": step.forward_s + step.backward_s,
        "comparable_memory_bytes": memory.allocated_bytes,
    }


def _tokens(plan: PlanDocument) -> int | None:
    """Tokens of a global batch."""
    found = (t for t in plan.inputs.values() if t.dtype in ("int64", "int32"))
    return max((prod(t.shape) for t in found if len(t.shape) == 2), default=None)
