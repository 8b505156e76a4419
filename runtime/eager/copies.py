"""Results that torch would give as views and that had to be moved: copies, and of what.

A write into one does not reach its base by itself: it is written through, or refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from autoshard.errors import RequestError
from autoshard.runtime.eager.tags import meta_of
from autoshard.sharding.layout import Shape

COPY: Final = "_autoshard_copy"
NO_INDEX: Final = object()


@dataclass(slots=True)
class Copied:
    """What a copy would be a view of, on one device.

    Attributes:
        base: its base.
        index: where it lies in the base, or ``NO_INDEX``.
        version: of the base when the copy was taken.
    """

    base: Tensor
    index: Any
    version: int


def refuse(target: Tensor, shape: Shape) -> None:
    """Refuse to write to what only looks like a view; ``shape`` is the global one."""
    copy = target.__dict__.get(COPY)
    if isinstance(copy, Copied) and copy.index is NO_INDEX:
        raise RequestError(
            f"a write in place to a view of shape {shape}: its base is cut so "
            "that the view had to be communicated, and the write would not reach the base; "
            "write to the base (base[index] = value), or work on a clone()"
        )


def note_copies(func: Any, args: Any, out: Any) -> None:
    """Of results that torch would give as views and that had to be moved: of what."""
    for one in out if isinstance(out, (list, tuple)) else (out,):
        base = one.__dict__.get(COPY) if isinstance(one, Tensor) else None
        if isinstance(base, Tensor):
            index = args[1] if func is torch.Tensor.__getitem__ else NO_INDEX
            one.__dict__[COPY] = Copied(base, index, base._version)


def check_copies(func: Any, copies: Sequence[Tensor]) -> None:
    """Refuse to read a copy whose base was written to since.

    Raises:
        RequestError: naming the function and the view.
    """
    for tensor in copies:
        copy = tensor.__dict__[COPY]
        if isinstance(copy, Copied) and copy.base._version != copy.version:
            meta = meta_of(tensor)
            shape = tuple(tensor.shape) if meta is None else meta.shape
            raise RequestError(
                f"{getattr(func, '__name__', func)} reads a view of shape {shape} "
                "whose base was written to after the view was taken; the base is cut so that "
                "the view is a copy. Take the view again after the write"
            )


__all__ = ["COPY", "NO_INDEX", "Copied", "check_copies", "note_copies", "refuse"]
