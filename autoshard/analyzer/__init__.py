"""Model -> ModelGraph: captures one training step without allocating a weight.

    captured = analyze("llama-3-8b", batch=8, seq_len=8192, dtype="bf16")
    captured.graph                      nodes, constants, repeated blocks
    captured.materialize(seed=0)        the model with weights, for validation
    captured.draw_inputs(seed=0)        random inputs that fit it

The way through the files: ``_sources`` (what to build) and ``_inputs`` (what to call it with),
``_blocks`` (which parts repeat), ``_export`` (torch.export of a copy without weights), ``_lower``
(exported operators to the normal form of ``autoshard.normal``), ``_finish`` (gradients, identities,
order, names), ``_cost`` (operations, saved tensors).
"""

from autoshard.analyzer._analyze import Captured, analyze
from autoshard.analyzer._constants import evaluate_constants
from autoshard.analyzer._inputs import InputSpec
from autoshard.analyzer._sources import list_presets, load_preset, read_json, shortened

__all__ = [
    "Captured",
    "InputSpec",
    "analyze",
    "evaluate_constants",
    "list_presets",
    "load_preset",
    "read_json",
    "shortened",
]
