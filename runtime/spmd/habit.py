"""A call on a rank that leaves what the last one left, but for values: they are all that is said.

A step of training does to its objects what the step before did: it writes into the same parameters
and returns a tensor of the same shape. Where a snapshot says that this is all, the pieces lie where
they lay, and nothing has to be worked out, packed or told anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.runtime.eager.body import Body, ModuleState, Piece
from autoshard.runtime.spmd.ambient import Ambient, changed_generators
from autoshard.runtime.spmd.request import Changes, Outcome, Pieces, is_all_slots


class Habit:
    """What calls of one function leave, and where.

    Args:
        body: which the calls run in.
        outcome: of the last one.
        changes: what was told of it.
        views: by number, where this rank's pieces lie in the shared memory.
        is_teller: whether this rank is the one that tells.
    """

    def __init__(
        self,
        body: Body,
        outcome: Outcome,
        changes: Changes,
        views: Mapping[int, torch.Tensor],
        *,
        is_teller: bool,
    ) -> None:
        self.body = body
        self._modules = outcome.result.modules
        self._output, self._forms = _form(outcome.result.output)
        count = len(self._forms)
        owners = zip(body.objects.modules, self._modules, strict=True)
        tensors = [pair for module, state in owners for pair in _tensors(module, state)]
        held = [views.get(count + place) for place in range(len(tensors))]
        self._views = [view for view in held if view is not None]
        self._values = [
            piece.local for (piece, _), view in zip(tensors, held, strict=True) if view is not None
        ]
        self._of_output = [(n, views[n]) for n in range(count) if n in views]
        self._is_teller = is_teller
        self._tensors = [tensor for _, tensor in tensors] if is_teller else []
        self._first = count
        self._versions: list[int] = []
        self.written: frozenset[int] | None = None

    @classmethod
    def of(
        cls,
        body: Body,
        outcome: Outcome,
        changes: Changes,
        views: Mapping[int, torch.Tensor | str],
        *,
        is_teller: bool,
    ) -> Habit | None:
        """The habit that a call may have begun; None if it did more than a habit can be."""
        result = outcome.result
        if (
            not body.keeps(result.modules)
            or not is_all_slots(changes.output)
            or changes.generators is not None
            or changes.schedulers
            or _did_more(outcome)
        ):
            return None
        found = {number: view for number, view in views.items() if isinstance(view, torch.Tensor)}
        return cls(body, outcome, changes, found, is_teller=is_teller)

    def begin(self) -> None:
        """A call begins: its values are in place."""
        self._versions = [tensor._version for tensor in self._tensors]

    def is_kept(self, outcome: Outcome, ambient: Ambient) -> bool:
        """Whether a call left what the last one did, but for values."""
        return (
            outcome.result.modules is self._modules
            and not _did_more(outcome)
            and _form(outcome.result.output) == (self._output, self._forms)
            and (not self._is_teller or changed_generators(ambient.generators) is None)
        )

    @torch.no_grad()
    def leave(self, outcome: Outcome) -> bool:
        """Leave the values in the shared memory; whether other tensors were written than last."""
        views, values = self._views, self._values
        if self._of_output:
            found = Pieces()
            found.replace(outcome.result.output)
            views = [*views, *(view for _, view in self._of_output)]
            values = [*values, *(found.found[n].local for n, _ in self._of_output)]
        if views:
            torch._foreach_copy_(views, values)
        if not self._is_teller:
            return False
        written = frozenset(
            self._first + place
            for place, (tensor, before) in enumerate(
                zip(self._tensors, self._versions, strict=True)
            )
            if tensor._version != before
        )
        before, self.written = self.written, written
        return written != before


def _did_more(outcome: Outcome) -> bool:
    """Whether a call did more than write into modules and return something."""
    result = outcome.result
    return bool(
        result.optimizers
        or result.tensors
        or result.gradients
        or outcome.captured
        or outcome.trace is not None
        or any(state.gradients for state in result.modules)
    )


def _form(output: Any) -> tuple[Any, Sequence[tuple[Any, ...]]]:
    """A result with slots in the places of its pieces, and what they are but for values."""
    pieces = Pieces()
    with_slots = pieces.replace(output)
    forms = [
        (p.layout, p.shape, p.kind, p.local.dtype, p.local.shape, p.local.device)
        for p in pieces.found
    ]
    return with_slots, forms


def _tensors(module: nn.Module, state: ModuleState) -> list[tuple[Piece, torch.Tensor]]:
    """Pieces of a module and what they are of, in the order of their numbers."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    return [
        *((piece, parameters[name]) for name, piece in state.parameters.items()),
        *((piece, buffers[name]) for name, piece in state.buffers.items()),
    ]


__all__ = ["Habit"]
