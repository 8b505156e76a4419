"""What a configuration of another tool fixes, in the words of the whole space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Storage = Literal["whole", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Sizes and habits of a configuration; what it does not state is free.

    Attributes:
        tool: whose it is.
        sizes: of the axes pipeline, replica, data, expert, context and model, and ``micro-batch``
            and ``virtual-stages``, where it states them.
        said: for each of those, and for ``recompute``, the words of the configuration.
        recompute: as ``Schedule.recompute`` has it, where it is stated.
        recompute_per_chunk: of how many blocks of each chunk of a stage that is; None: of all.
        layers_per_chunk: blocks of a virtual stage, where that is stated in place of their number.
        parameters: how it stores them along its data-parallel devices.
        replicas: groups of devices that each hold all cut parameters.
        shares_optimizer: whether devices that hold a parameter whole share the optimizer's work.
        global_batch: samples of a step.
        rank_batch: samples of a step of one data-parallel device, where only that is stated.
        seq_len: tokens of a sample.
        dtype: of training.
        optimizer: see ``search.memory.OPTIMIZERS``.
        notes: what is read otherwise than the tool does it, or not read.
    """

    tool: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)
    recompute: str | None = None
    recompute_per_chunk: int | None = None
    layers_per_chunk: int | None = None
    parameters: Storage = "whole"
    replicas: int = 1
    shares_optimizer: bool = False
    global_batch: int | None = None
    rank_batch: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    notes: tuple[str, ...] = ()

    def size(self, name: str) -> int:
        """What is stated of a size, else 1, as both tools have it."""
        return self.sizes.get(name, 1)

    @property
    def group(self) -> int:
        """Devices that share a sample or its stages: the rest are data-parallel."""
        return self.size("pipeline") * self.size("context") * self.size("model")
