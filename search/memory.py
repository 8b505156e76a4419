"""What a parameter keeps on a device besides itself, by optimizer, and what an update costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.errors import UnknownNameError

_HALVES = frozenset({"float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer's state.

    Attributes:
        name: as ``optimize(optimizer=...)`` takes it.
        moments: values of float32 (or wider, where the parameter is) kept for each element.
        master: whether 16-bit parameters have a float32 copy that is updated in their place.
    """

    name: str
    moments: int
    master: bool

    def state_bytes(self, elements: int, dtype: str, itemsize: int) -> int:
        """Bytes kept for ``elements`` of a parameter, besides parameter and gradient."""
        wide = max(4, itemsize)
        copies = self.moments + (1 if self.master and dtype in _HALVES else 0)
        return elements * wide * copies

    def traffic_bytes(self, elements: int, dtype: str, itemsize: int) -> int:
        """Bytes that one update reads and writes: the gradient once, all else twice.

        For adamw 28 bytes an element in float32 and 34 with 16-bit parameters and a master copy;
        30 were found over published runs.
        """
        return elements * itemsize * 3 + 2 * self.state_bytes(elements, dtype, itemsize)

    def working_bytes(self, elements: int, dtype: str, itemsize: int) -> int:
        """Bytes that the update of one tensor needs while it runs, where tensors go one by one.

        torch's Adam makes the root of the second moment and that over its correction; a master copy
        is updated by a float32 copy of the gradient.
        """
        wide = max(4, itemsize)
        copies = 2 if self.moments == 2 else 0
        copies += 1 if self.master and dtype in _HALVES else 0
        return elements * wide * copies


OPTIMIZERS: Mapping[str, Optimizer] = {
    o.name: o
    for o in (
        Optimizer("adamw", 2, True),
        Optimizer("adam", 2, True),
        Optimizer("sgd", 0, False),
        Optimizer("sgd-momentum", 1, False),
    )
}
"""Known optimizers: Adam's two moments and a float32 copy of 16-bit parameters; plain SGD keeps
nothing, with momentum one moment."""


NONE = Optimizer("none", 0, False)
"""Of inference: nothing is updated."""


def optimizer_of(name: str) -> Optimizer:
    """The optimizer called ``name``; ``none`` for inference.

    Raises:
        UnknownNameError: nobody knows it.
    """
    if name == NONE.name:
        return NONE
    if name not in OPTIMIZERS:
        raise UnknownNameError("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]
