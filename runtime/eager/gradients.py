"""Gradients of parameters that every device uses on its own shard: fused, and sent during backward.

Which parameters these are shows only when they are first used, so the buckets fill as gradients
come. Every device runs the same graph in the same order, hence sends the same messages. When
``backward()`` returns, ``.grad`` is whole; optimizers, clipping and other code need nothing else.

A gradient that was whole before is kept aside and added afterwards: it must not be summed over the
devices a second time. Within :func:`no_sync` gradients stay parts, and the next backward outside
sends them all.

Of a table whose gradient came from look-ups alone, rows and values are sent where that is less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoshard.runtime.comm import Pending
from autoshard.runtime.eager.tags import Meta, meta_of
from autoshard.sharding.layout import RP, Cut, P, R

if TYPE_CHECKING:
    from autoshard.runtime.eager.engine import Engine

LEAST_BUCKET = 1 << 18
MOST_BUCKET = 25 << 20
OVERHEAD = 0.1
"""Share of a message's time that its fixed cost may be, where the bucket's size is chosen by it."""

Key = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class _Summed:
    """A parameter whose gradient is a sum over devices, and over which axes."""

    parameter: Tensor
    axes: tuple[int, ...]
    num_bytes: int


@dataclass(slots=True)
class _Bucket:
    members: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(slots=True)
class _Sent:
    members: list[Tensor]
    flat: Tensor
    pending: Pending


@dataclass(slots=True)
class _Rows:
    """A gradient sent as rows: their indices and values from every device."""

    member: Tensor
    indices: Pending
    values: Pending


class Gradients:
    """The gradients of one rank's parameters.

    Args:
        engine: whose parameters.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bucket_bytes: int | None = None
        self.overlap = True
        self.sparse = True
        self.after: list[Callable[[], None]] = []
        self.reset()

    def reset(self) -> None:
        """Forget the parameters of an earlier call."""
        self._summed: dict[int, _Summed] = {}
        self._limits: dict[Key, tuple[int, int]] = {}
        self._handles: list[Any] = []
        self._deferred = 0
        self._parts: dict[int, None] = {}
        self._expected = 0
        self._lookups: dict[int, list[tuple[Tensor, int]]] = {}
        self._uses: dict[int, int] = {}
        self.after.clear()
        self._giving_way: list[Any] = []
        self._depth = 0
        self._parts_before: set[int] = set()
        self._settled = 0
        self._begin()

    def settle(self) -> None:
        """Take what is decided so far as decided for every call until :meth:`reset`."""
        self._settled = len(self._summed)

    def rewind(self) -> bool:
        """Forget a call, but for what was settled before it; False where it decided more."""
        if len(self._summed) != self._settled:
            return False
        summed, expected, handles = self._summed, self._expected, self._handles
        self.reset()
        self._summed, self._expected, self._handles = summed, expected, handles
        self.settle()
        return True

    def close(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self.reset()

    def _begin(self) -> None:
        self._aside: dict[int, Tensor] = {}
        self._arrived: set[int] = set()
        self._arrived_bytes = 0
        self._buckets: dict[Key, _Bucket] = {}
        self._sent: list[_Sent | _Rows] = []

    # ---- parameters -------------------------------------------------------------------------

    def decided(self, parameter: Tensor, meta: Meta) -> None:
        """A parameter's first use has decided: on ``RP`` axes its gradient is a sum of parts."""
        axes = tuple(a for a, s in enumerate(meta.layout) if s is RP)
        if axes and id(parameter) not in self._summed and parameter.is_leaf:
            num_bytes = parameter.numel() * parameter.element_size()
            self._summed[id(parameter)] = _Summed(parameter, axes, num_bytes)
            self._expected += num_bytes
            hooked: Any = parameter
            self._handles.append(hooked.register_post_accumulate_grad_hook(self._arrive))
            if self._depth:  # first used by a recomputation
                self._keep_aside(parameter)

    @property
    def has_parts(self) -> bool:
        """Whether any ``.grad`` is a sum of parts now."""
        return bool(self._parts)

    def is_partial(self, parameter: Tensor) -> bool:
        """Whether ``.grad`` is a sum of parts now."""
        return id(parameter) in self._parts

    def _keep_aside(self, parameter: Tensor) -> None:
        """A gradient that is whole already gives way where this backward brings a part."""
        key = id(parameter)
        if parameter.grad is None or not parameter.requires_grad or key in self._parts:
            return

        def hook(_: Tensor) -> None:
            if parameter.grad is not None and key not in self._parts and key not in self._aside:
                self._aside[key] = parameter.grad
                parameter.grad = None

        hooked: Any = parameter
        self._giving_way.append(hooked.register_hook(hook))

    def _arrive(self, parameter: Tensor) -> None:
        key = id(parameter)
        self._parts[key] = None
        if self._deferred or not self._depth or key in self._arrived:
            return
        with torch._C.DisableTorchFunction():
            self._arrived.add(key)
            summed = self._summed[key]
            self._arrived_bytes += summed.num_bytes
            if not self._lookups or not self._send_rows(parameter):
                self._add(summed)

    # ---- dense ------------------------------------------------------------------------------

    def _add(self, summed: _Summed) -> None:
        grad = summed.parameter.grad
        assert grad is not None
        key = summed.axes, grad.dtype
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
        bucket.members.append(summed.parameter)
        bucket.num_bytes += summed.num_bytes
        if not self.overlap:
            return
        if len(self._arrived) == len(self._summed):
            for each in list(self._buckets):
                self._launch(each)
            return
        least, most = self._limits_of(key)
        half = not self._sent and 2 * self._arrived_bytes >= self._expected
        if bucket.num_bytes >= (least if half else most):
            self._launch(key)

    def _limits_of(self, key: Key) -> tuple[int, int]:
        """Bytes from which a bucket is sent: with half of all gradients, and in general.

        A first message leaves halfway through backward, so that something hides behind the rest,
        if it takes longer to transfer than to start: else it would cost more than it hides.
        """
        found = self._limits.get(key)
        if found is None:
            seconds = self.engine.chooser.seconds
            start = seconds("all_reduce", key[0], 0)
            rate = (seconds("all_reduce", key[0], 1 << 24) - start) / (1 << 24)
            wanted = start * (1 / OVERHEAD - 1) / rate if rate > 0 else MOST_BUCKET
            most = int(min(max(wanted, LEAST_BUCKET), MOST_BUCKET))
            if self.bucket_bytes is not None:
                most = self.bucket_bytes
            least = min(int(start / rate), most) if rate > 0 else most
            found = self._limits[key] = least, most
        return found

    @torch.no_grad()
    def _launch(self, key: Key) -> None:
        bucket = self._buckets.pop(key)
        grads = [p.grad for p in bucket.members]
        if len(grads) == 1 and grads[0] is not None and grads[0].is_contiguous():
            flat = grads[0].detach().view(-1)
        else:
            flat = torch.cat([g.detach().reshape(-1) for g in grads if g is not None])
        name = f"{len(grads)} gradient{'s' if len(grads) > 1 else ''}"
        pending = self.engine.comm.start(
            "all_reduce", flat, key[0], phase="backward", value=name, async_op=True
        )
        self._sent.append(_Sent(bucket.members, flat, pending))

    # ---- rows -------------------------------------------------------------------------------

    def used(self, parameter: Tensor) -> None:
        """A table or matrix was used, in whatever way."""
        self._uses[id(parameter)] = self._uses.get(id(parameter), 0) + 1

    def looked_up(self, weight: Tensor, indices: Tensor, most: int) -> None:
        """Rows of a table were looked up: ``most`` on the device that looks up the most."""
        if id(weight) in self._uses:
            rows = self._lookups.setdefault(id(weight), [])
            rows.append((indices.detach().reshape(-1), most))

    def _send_rows(self, parameter: Tensor) -> bool:
        """Send a gradient as rows and values where that is less; whether it was."""
        rows = self._lookups.pop(id(parameter), None)
        meta = meta_of(parameter)
        grad = parameter.grad
        if not rows or meta is None or grad is None or grad.dim() != 2 or not self.sparse:
            return False
        if id(parameter) in self._parts_before or self._uses.get(id(parameter)) != len(rows):
            return False
        if any(isinstance(s, Cut) and s.dim == 0 for s in meta.layout):
            return False
        axes = self._summed[id(parameter)].axes
        group = self.engine.comm.size(axes)
        most = sum(n for _, n in rows)
        width = grad.shape[1] * grad.element_size()
        if group * most * (width + 8) >= prod(grad.shape) * grad.element_size():
            return False
        with torch.no_grad():
            touched = torch.unique(torch.cat([r for r, _ in rows]))
            indices = torch.zeros(most, dtype=torch.int64, device=grad.device)
            indices[: len(touched)] = touched
            values = grad.new_zeros(most, grad.shape[1])
            values[: len(touched)] = grad[touched]
            name = "rows of a gradient"
            start = self.engine.comm.start
            sent = _Rows(
                parameter,
                start("all_gather", indices, axes, phase="backward", value=name, async_op=True),
                start("all_gather", values, axes, phase="backward", value=name, async_op=True),
            )
        self._sent.append(sent)
        return True

    # ---- one backward -----------------------------------------------------------------------

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a run of the engine that accumulates gradients."""
        if self._depth == 0:
            self._begin()
            self._parts_before = set(self._parts)
            for summed in self._summed.values():
                self._keep_aside(summed.parameter)
        self._depth += 1
        try:
            yield
            if self._depth == 1 and not self._deferred:
                with torch._C.DisableTorchFunction():
                    self._finish()
        finally:
            self._depth -= 1
            if self._depth == 0:
                while self._giving_way:
                    self._giving_way.pop().remove()
                self._lookups.clear()
                self._uses.clear()
                self.engine.forget_leaves()
                if not self._deferred:
                    self._begin()
        if self._depth == 0:
            hooks, self.after[:] = list(self.after), []
            for hook in hooks:
                hook()

    def reduce_differentiably(self) -> None:
        """Sum gradients that are themselves part of a graph (``create_graph``), one by one."""
        from autoshard.runtime.eager.tags import dual, set_meta

        for key in list(self._parts):
            parameter = self._summed[key].parameter
            grad, meta = parameter.grad, meta_of(parameter)
            self._parts.pop(key, None)
            if grad is None or meta is None:
                continue
            layout = dual(meta.layout)
            whole = tuple(R if s is P else s for s in layout)
            seen = grad.view_as(grad)
            set_meta(seen, Meta(layout, meta.shape))
            before = self._aside.pop(key, None)
            total = self.engine.moved(seen, whole)
            parameter.grad = total if before is None else before + total

    @torch.no_grad()
    def _finish(self) -> None:
        for key in list(self._parts):
            if key not in self._arrived and self._summed[key].parameter.grad is not None:
                self._arrived.add(key)
                self._add(self._summed[key])
        for each in list(self._buckets):
            self._launch(each)
        for sent in self._sent:
            if isinstance(sent, _Rows):
                self._join_rows(sent)
                continue
            sent.pending.wait()
            if len(sent.members) > 1 or sent.flat.data_ptr() != _pointer(sent.members[0]):
                parts = torch.split(sent.flat, [p.numel() for p in sent.members])
                grads = [p.grad.detach() for p in sent.members if p.grad is not None]
                torch._foreach_copy_(
                    grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)]
                )
        for key, before in self._aside.items():
            parameter = self._summed[key].parameter
            if parameter.grad is None:
                parameter.grad = before
            elif parameter.grad.requires_grad:
                with torch.enable_grad():
                    parameter.grad = before + parameter.grad
            else:
                before.add_(parameter.grad)
                parameter.grad = before
        self._parts.clear()

    def _join_rows(self, sent: _Rows) -> None:
        grad = sent.member.grad
        assert grad is not None
        indices = sent.indices.wait().reshape(-1)
        values = sent.values.wait().reshape(-1, grad.shape[1])
        flat = grad.detach()
        flat.index_fill_(0, indices, 0)
        flat.index_add_(0, indices, values)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within it backward leaves gradients as parts; the next one outside sends them all."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1


def _pointer(parameter: Tensor) -> int:
    return 0 if parameter.grad is None else parameter.grad.data_ptr()
