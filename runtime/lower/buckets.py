"""Gradients that are still sums of local parts: fused into messages, sent while backward runs.

Bucket k is sent when its last gradient is there and bucket k - 1 has been sent, so that every
device sends them in the same order. What is left, or incomplete because a gradient never came, is
sent when backward ends; the engine's callback then waits and writes the sums back, so ``.grad`` is
whole when ``backward()`` returns and an optimizer, clipping or a user's code needs nothing else.

A gradient that is whole already, from an earlier backward, must not be summed over the devices a
second time: before anything is added to it, it is kept on one device and zeroed on the others,
which makes it a sum of parts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Return when it has arrived."""


Send = Callable[[Tensor, int], Pending]
"""Starts the sum of a flat tensor over the axes of bucket ``index``, in place."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message on its way: where its parts go, unless it carries the gradient itself."""

    flat: Tensor
    pending: Pending
    grads: list[Tensor]


class GradientBuckets:
    """The fused gradients of one device's parameters.

    Args:
        members: the parameters whose gradients travel together, for each bucket.
        keeps: for each bucket, whether this is the device that keeps what is whole already.
        send: starts a message.
    """

    def __init__(
        self,
        members: Sequence[Sequence[nn.Parameter]],
        keeps: Sequence[bool],
        send: Send,
    ) -> None:
        self._members, self._keeps, self._send = members, keeps, send
        self._parts: set[int] = set()
        self._deferred = False
        self._start(-1)
        # Kept, since a parameter does not keep its own accumulator; hooks on the parameter itself
        # would run for torch.autograd.grad, too, which adds nothing to .grad.
        self._accumulators = []
        for index, row in enumerate(members):
            for parameter in row:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                node.register_prehook(self._before(index, parameter))
                self._accumulators.append(node)
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._after(index)
                )

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within it, backward leaves gradients as local parts; the next one outside sums all."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def _start(self, task: int) -> None:
        """Forget what an earlier backward, perhaps one that failed, left behind."""
        self._task = task
        self._arrived: set[int] = set()
        self._missing = [len(m) for m in self._members]
        self._sent: list[_Sent] = []

    def _before(self, index: int, parameter: nn.Parameter) -> Callable[[object], None]:
        def hook(_: object) -> None:
            self._to_part(index, parameter)

        return hook

    def _to_part(self, index: int, parameter: nn.Parameter) -> None:
        """Make a gradient that is whole a sum of parts over the devices."""
        if parameter.grad is not None and id(parameter) not in self._parts:
            self._parts.add(id(parameter))
            if not self._keeps[index]:
                parameter.grad.zero_()

    def _after(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self._parts.add(id(parameter))
            if self._deferred:
                return
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._start(task)
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._finish)
            if id(parameter) not in self._arrived:
                self._arrived.add(id(parameter))
                self._missing[index] -= 1
            while len(self._sent) < len(self._members) and not self._missing[len(self._sent)]:
                self._launch(len(self._sent))

        return hook

    @torch.no_grad()
    def _launch(self, index: int) -> None:
        grads = []
        for parameter in self._members[index]:
            self._to_part(index, parameter)
            grad = parameter.grad
            grads.append(torch.zeros_like(parameter) if grad is None else grad)
        if len(grads) == 1 and grads[0].is_contiguous():
            flat, grads = grads[0].view(-1), []
        else:
            flat = torch.cat([g.reshape(-1) for g in grads])
        self._sent.append(_Sent(flat, self._send(flat, index), grads))

    @torch.no_grad()
    def _finish(self) -> None:
        while len(self._sent) < len(self._members):
            self._launch(len(self._sent))
        for sent in self._sent:
            sent.pending.wait()
            if sent.grads:
                parts = torch.split(sent.flat, [g.numel() for g in sent.grads])
                for grad, part in zip(sent.grads, parts, strict=True):
                    grad.copy_(part.view_as(grad))
        self._parts.clear()
        self._start(-1)
