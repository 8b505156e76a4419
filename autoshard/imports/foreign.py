"""What another tool's document says, before it is set against a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoshard.exports.reading import Style

Format = Literal["hf", "megatron"]
FORMATS: tuple[Format, ...] = ("hf", "megatron")


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a module's weight is cut over the tensor ranks; see ``autoshard.exports.Weight``."""

    style: Style
    pieces: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Sizes and styles of a document.

    Attributes:
        format: where it comes from.
        replicate: devices with the same shards and different samples.
        shard: devices that share a stored copy of the parameters.
        tensor: devices that share every weight.
        rules: name of a module, ``*`` for numbers and leading parts left out -> how it is cut.
        by_leaf: whether rules name the last part of a module's name and need not all apply.
        model_rules: whether rules that the model itself brings hold where the document has none.
        global_batch: samples of one step, where it says so.
        seq_len: tokens of a sample, where it says so.
        dtype: where it says so.
        optimizer: where it says so.
        notes: what was not read, or is priced otherwise than the tool does it.
    """

    format: Format
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    rules: Mapping[str, Cutting] = field(default_factory=dict)
    by_leaf: bool = False
    model_rules: bool = False
    global_batch: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Devices of all sizes together."""
        return self.replicate * self.shard * self.tensor
