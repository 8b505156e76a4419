"""Runs a plan on real processes and compares it with one device; traces it at full size."""

from autoshard.validation.dry import dry_run
from autoshard.validation.reference import run_unsharded
from autoshard.validation.report import (
    CaptureCheck,
    CollectiveCheck,
    DryRunReport,
    Measured,
    TensorCheck,
    ValidationReport,
)
from autoshard.validation.validate import measure_program, validate_program
from autoshard.validation.values import WholeValues, draw_buffers, draw_parameters

__all__ = [
    "CaptureCheck",
    "CollectiveCheck",
    "DryRunReport",
    "Measured",
    "TensorCheck",
    "ValidationReport",
    "WholeValues",
    "draw_buffers",
    "draw_parameters",
    "dry_run",
    "measure_program",
    "run_unsharded",
    "validate_program",
]
