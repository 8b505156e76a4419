"""Axes of a plan that targets have no words for, and why."""

from __future__ import annotations

NO_STAGES = "the pipeline's stages are code (PipelineStage, a schedule), which is not written"


def not_written(**reasons: str) -> dict[str, str]:
    """Reasons by axis; the axes that no exporter writes are added.

    Args:
        reasons: why the target itself cannot, by axis.
    """
    return {
        "pipeline": "this exporter writes no stages",
        "context": "this exporter writes no cut of the sequence",
        "expert": "this exporter writes no placement of experts",
        **reasons,
    }
