"""The tag of a tensor: how the local shard it is lies in a global value.

A tag is an attribute of the tensor object; it survives autograd's saving and costs no dispatch. A
tensor without one is whole, and the same on every device.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from autoshard.sharding.layout import (
    RP,
    Layout,
    P,
    Shape,
    State,
    forward_half,
    gradient_half,
)

NAME: Final = "_autoshard_meta"

_interned: dict[tuple[Layout, Shape, tuple[int, ...], Shape | None], Meta] = {}


class Meta:
    """Layout and global shape of a value; equal ones are one object.

    Attributes:
        layout: one state an axis.
        shape: the global shape.
        open: axes on which a parameter is whole and nobody has used it yet: the first use decides
            between ``R`` and ``RP``.
        strides: of the global value, where it is not contiguous: random numbers are drawn in the
            order of memory.
    """

    __slots__ = ("layout", "open", "shape", "strides")

    layout: Layout
    shape: Shape
    open: tuple[int, ...]
    strides: Shape | None

    def __new__(
        cls,
        layout: Layout,
        shape: Shape,
        open: tuple[int, ...] = (),
        strides: Shape | None = None,
    ) -> Meta:
        """The one object of these values."""
        key = (layout, shape, open, strides)
        found = _interned.get(key)
        if found is None:
            found = object.__new__(cls)
            found.layout, found.shape, found.open, found.strides = layout, shape, open, strides
            _interned[key] = found
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Meta, (self.layout, self.shape, self.open, self.strides)

    def __copy__(self) -> Meta:
        return self

    def __deepcopy__(self, memo: object) -> Meta:
        return self

    def __repr__(self) -> str:
        return f"Meta({self.layout}, {self.shape}{f', open={self.open}' if self.open else ''})"

    def forward(self) -> Meta:
        """Of the value without its gradient."""
        return Meta(forward_half(self.layout), self.shape, (), self.strides)

    def moved(self, layout: Layout) -> Meta:
        """Of the same value in another layout."""
        return Meta(layout, self.shape, (), self.strides)

    def gradient(self) -> Meta:
        """Of the value's gradient, as a value that itself needs none."""
        return Meta(gradient_half(self.layout), self.shape)


_DUAL: dict[State, State] = {RP: P, P: RP}


def dual(layout: Layout) -> Layout:
    """The pair of a gradient whose own gradient flows the other way."""
    return tuple(_DUAL.get(s, s) for s in layout)


def meta_of(tensor: Tensor) -> Meta | None:
    """The tag, or None where the tensor is whole."""
    return tensor.__dict__.get(NAME)


def set_meta(tensor: Tensor, meta: Meta | None) -> None:
    """Tag a tensor, or take its tag away."""
    if meta is None:
        tensor.__dict__.pop(NAME, None)
    else:
        tensor.__dict__[NAME] = meta
