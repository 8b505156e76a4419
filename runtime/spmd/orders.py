"""What goes to the ranks of a pool and comes back, and the memory that all share."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.runtime.spmd.request import UNCHANGED, Changes
from autoshard.runtime.spmd.shipment import Loose, Shipment
from autoshard.runtime.watch.records import RankTrace
from autoshard.sharding.layout import Layout, Shape

_ALIGN_BYTES = 64

UNKNOWN: Final = "unknown"
"""What a rank answers that does not know what an order refers to."""

Bytes = NDArray[np.uint8]

Lie = tuple[int, int, torch.dtype, tuple[int, ...]]
"""Number of a piece, where it lies in a rank's part (-1: unchanged), dtype and local shape."""


class Plain(NamedTuple):
    """Of :class:`Changes` what is numbers and names, and can be compared with the last ones."""

    lies: Sequence[tuple[Layout, Shape, str]]
    modules: Sequence[tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, bool]]]
    tensors: Mapping[int, int]
    tensor_gradients: Mapping[int, int]
    captured: Mapping[int, int]

    @classmethod
    def of(cls, changes: Changes) -> Plain:
        """That part of ``changes``."""
        return cls(*(getattr(changes, name) for name in cls._fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What goes to every rank.

    Attributes:
        key: of the memory.
        sizes: bytes of the first part, and of each rank's, where the memory is new.
        rest: the call without the bytes of its tensors; None: as last time.
        ambient: pickled; None: as last time.
        watch: whether to time, and to tell.
    """

    key: int
    sizes: tuple[int, int] | None
    rest: Loose | None
    ambient: bytes | None
    watch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What comes from a rank, where more is to be said than that the values are in their places.

    Attributes:
        plain: of rank 0's changes; None: as last time.
        changes: the rest of them, packed; None: as last time.
        lies: where its pieces lie; None: as last time.
        pieces: those that found no room.
        trace: what was seen, if somebody watches.
        written: of rank 0: the pieces that were written in place; None: not known.
    """

    plain: Plain | None = None
    changes: Shipment | None = None
    lies: tuple[Lie, ...] | None = None
    pieces: Shipment | None = None
    trace: RankTrace | None = None
    written: frozenset[int] | None = None


def mapped(descriptor: int, sizes: tuple[int, int], world_size: int) -> Bytes:
    """The shared memory, mapped; the mapping lives as long as the array."""
    num_bytes = sizes[0] + world_size * sizes[1]
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)


def aligned(num_bytes: int) -> int:
    """The next place where a piece may begin."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def views_of(part: torch.Tensor, lies: Sequence[Lie]) -> dict[int, torch.Tensor | str]:
    """The pieces in a rank's part."""
    found: dict[int, torch.Tensor | str] = {}
    for number, start, dtype, shape in lies:
        if start < 0:
            found[number] = UNCHANGED
        else:
            num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            found[number] = part[start : start + num_bytes].view(dtype).view(shape)
    return found


__all__ = ["UNKNOWN", "Answer", "Lie", "Order", "Plain", "aligned", "mapped", "views_of"]
