"""The optimizer of a measured step: torch's own, at a learning rate of 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

TORCH: Mapping[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.0),
    "adam": partial(torch.optim.Adam, lr=0.0),
    "sgd": partial(torch.optim.SGD, lr=0.0),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.0, momentum=0.9),
}
"""By the names that a plan knows."""

MASTERS = frozenset({"adamw", "adam"})
"""Those that update a float32 copy of 16-bit parameters."""


class Updates:
    """Updates parameters as a plan says; 16-bit ones by a float32 copy, one after another.

    Args:
        name: of the optimizer.
        parameters: what is trained.
    """

    def __init__(self, name: str, parameters: Iterable[torch.nn.Parameter]) -> None:
        trained = [p for p in parameters if p.requires_grad]
        halves = [p for p in trained if p.itemsize < 4 and name in MASTERS]
        rest = [p for p in trained if p.itemsize >= 4 or name not in MASTERS]
        self._rest = TORCH[name](rest) if rest else None
        self._masters = [(p, torch.nn.Parameter(p.detach().float())) for p in halves]
        self._each = [TORCH[name]([master]) for _, master in self._masters]

    def step(self) -> None:
        """One update; gradients stay."""
        if self._rest is not None:
            self._rest.step()
        for (parameter, master), optimizer in zip(self._masters, self._each, strict=True):
            if parameter.grad is None:
                continue
            master.grad = parameter.grad.float()
            optimizer.step()
            master.grad = None
            with torch.no_grad():
                parameter.copy_(master)

    @property
    def state(self) -> list[Tensor]:
        """Every tensor that is kept from step to step."""
        optimizers = [*self._each, *([] if self._rest is None else [self._rest])]
        found = [v for o in optimizers for s in o.state.values() for v in s.values()]
        return [*(m for _, m in self._masters), *(v for v in found if isinstance(v, Tensor))]
