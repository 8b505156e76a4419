"""One operator on a simulated mesh: split the operands, run every rank, join, compare.

Ranks are run one after another; where an operator reduces inside itself they are threads that
meet in the reducer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.local import call_op, local_call
from autoshard.runtime.shards import join_shards, view_shard
from autoshard.sharding.layout import (
    Cut,
    Layout,
    P,
    R,
    Shape,
    canonical,
    coordinates,
    forward_half,
    gradient_half,
    local_shape,
)
from autoshard.sharding.registry import OpCall, rule_of
from autoshard.sharding.rule import Rule
from autoshard.sharding.strategy import Choice, Strategy, axis_choices, strategies
from tests.rules.cases import Case

Coordinate = tuple[int, ...]
Message = tuple[str, tuple[int, ...], int]


def seed(number: int) -> None:
    """As ``torch.manual_seed``, which takes 2 ms for its stack summary."""
    torch.default_generator.manual_seed(number)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """As ``torch.testing.assert_close`` for float64, at a fifth of its time."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if not torch.allclose(got, expected, rtol=1e-7, atol=1e-9, equal_nan=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9, equal_nan=True)


@dataclass
class Whole:
    """A case on one device: operands, result, gradients."""

    case: Case
    seed: int
    tensors: list[Tensor] = field(init=False)
    result: Tensor = field(init=False)
    gradients: list[Tensor | None] = field(init=False)
    cotangent: Tensor | None = field(init=False, default=None)
    written: list[Tensor] = field(init=False)
    call: OpCall = field(init=False)
    rule: Rule = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        case = self.case
        self.tensors = case.operands(generator)
        leaves = [t.clone() for t in self.tensors]
        kinds = case.kinds or ("n",) * len(leaves)
        for kind, leaf in zip(kinds, leaves, strict=True):
            leaf.requires_grad_(leaf.is_floating_point() and kind != "U")
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        seed(self.seed)
        out = call_op(case.op, case.roles, case.attrs, leaves, result=case.result)
        self.result = out.detach()
        self.written = [leaf.detach() for leaf in leaves]
        self.gradients = [None] * len(leaves)
        if out.requires_grad:
            self.cotangent = torch.randn(out.shape, generator=generator, dtype=out.dtype)
            found = torch.autograd.grad(
                out,
                [leaves[i] for i in wanted],
                self.cotangent,
                allow_unused=True,
                materialize_grads=True,
            )
            for i, gradient in zip(wanted, found, strict=True):
                self.gradients[i] = gradient
        self.call = OpCall(
            op=case.op,
            shapes=tuple(tuple(t.shape) for t in self.tensors),
            roles=case.roles,
            attrs=case.attrs,
            result=tuple(self.result.shape),
            itemsize=self.result.element_size(),
            operand_itemsizes=tuple(t.element_size() for t in self.tensors),
        )
        rule = rule_of(self.call)
        assert rule is not None, f"{case} has no rule"
        self.rule = rule

    @property
    def differentiable(self) -> list[bool]:
        return [g is not None for g in self.gradients]


def proposals(rule: Rule) -> dict[str, list[tuple[int, int]]]:
    """Every (outer, n) of every factor."""
    found = {}
    for factor in rule.factors:
        size = rule.sizes[factor]
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        found[factor] = [
            (o, n) for o in divisors for n in divisors if n > 1 and size % (o * n) == 0
        ]
    return found


def choices(whole: Whole) -> list[Choice]:
    return axis_choices(
        whole.rule, proposals(whole.rule), differentiable=whole.cotangent is not None
    )


def all_strategies(whole: Whole, rows: list[list[Choice]], mesh: Shape) -> list[Strategy]:
    return strategies(
        whole.rule,
        rows,
        mesh,
        operand_grad=whole.differentiable,
        result_grad=whole.cotangent is not None,
    )


def split(
    whole: Tensor, half: Layout, mesh: Shape, generator: torch.Generator
) -> dict[Coordinate, Tensor]:
    """What each device holds: shards, and random summands that sum to the whole."""
    partial = [axis for axis, s in enumerate(half) if s is P]
    places = list(product(*(range(mesh[a]) for a in partial)))
    summands = {}
    rest = whole
    for place in places[:-1]:
        if whole.is_floating_point():
            noise = torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
        else:
            noise = torch.randint(0, 5, whole.shape, generator=generator).to(whole.dtype)
        summands[place] = noise
        rest = rest - noise
    summands[places[-1]] = rest
    return {
        at: view_shard(summands[tuple(at[a] for a in partial)], half, mesh, at)
        for at in coordinates(mesh)
    }


def joined(shards: dict[Coordinate, Tensor], half: Layout, shape: Shape, mesh: Shape) -> Tensor:
    """The whole, after a check of every shard's shape and that replicas are equal."""
    for at, shard in shards.items():
        assert tuple(shard.shape) == local_shape(shape, half, mesh, at)
        twin = tuple(0 if s is R else i for s, i in zip(half, at, strict=True))
        assert_same(shard, shards[twin])
    return join_shards(shards, half, shape, mesh)


class Meeting:
    """All ranks' reducer: each call waits for its group, then all have the result."""

    def __init__(self, mesh: Shape) -> None:
        self.mesh = mesh
        self.lock = threading.Lock()
        self.barriers: dict[Any, threading.Barrier] = {}
        self.slots: dict[Any, list[Tensor]] = {}
        self.records: dict[Coordinate, list[tuple[str, Message]]] = {
            at: [] for at in coordinates(mesh)
        }

    def abort(self) -> None:
        for barrier in self.barriers.values():
            barrier.abort()


@dataclass
class Member:
    """One rank's reducer."""

    meeting: Meeting
    at: Coordinate
    value: str = "y"

    def all_reduce(
        self, tensor: Tensor, op: str, axes: tuple[int, ...], phase: str, value: str
    ) -> Tensor:
        assert tensor.is_contiguous()
        assert value == self.value
        meeting = self.meeting
        record = meeting.records[self.at]
        record.append((phase, ("all_reduce", axes, tensor.numel() * tensor.element_size())))
        group = tuple(i for axis, i in enumerate(self.at) if axis not in axes)
        key = (axes, group, len(record))
        size = prod(meeting.mesh[a] for a in axes)
        with meeting.lock:
            barrier = meeting.barriers.setdefault(key, threading.Barrier(size, timeout=20))
            meeting.slots.setdefault(key, []).append(tensor.clone())
        barrier.wait()
        parts = torch.stack(meeting.slots[key])
        return parts.amax(0) if op == "max" else parts.sum(0)


def run_ranks(mesh: Shape, work: Callable[[Coordinate], None], meeting: Meeting | None) -> None:
    if meeting is None:
        for at in coordinates(mesh):
            work(at)
        return
    failures: list[BaseException] = []

    def guarded(at: Coordinate) -> None:
        try:
            work(at)
        except BaseException as error:
            failures.append(error)
            meeting.abort()

    threads = [threading.Thread(target=guarded, args=(at,)) for at in coordinates(mesh)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def predicted(
    rule: Rule, strategy: Strategy, mesh: Shape, at: Coordinate, phase: str
) -> list[Message]:
    """Messages of ``Rule.internal`` at one coordinate, as the contract states them."""
    out: list[Message] = []
    for internal in rule.internal:
        axes = tuple(a for a, c in enumerate(strategy.choices) if c.factor in internal.when)
        if not axes or internal.phase != phase:
            continue
        elements = internal.count
        for factor in internal.elements:
            layout: Layout = tuple(
                canonical(Cut(0, c.outer, c.n), mesh[a]) if c.factor == factor else R
                for a, c in enumerate(strategy.choices)
            )
            elements *= local_shape((rule.sizes[factor],), layout, mesh, at)[0]
        out.append((internal.op, axes, elements * internal.itemsize))
    return out


def check(whole: Whole, strategy: Strategy, mesh: Shape, rule: Rule | None = None) -> None:
    """Split, run every rank forward and backward, join: equal to one device, messages as told."""
    rule = rule or whole.rule
    generator = torch.Generator().manual_seed(whole.seed + 1)
    shards = [
        split(t, forward_half(layout), mesh, generator)
        for t, layout in zip(whole.tensors, strategy.operands, strict=True)
    ]
    cotangents = (
        None
        if whole.cotangent is None
        else split(whole.cotangent, gradient_half(strategy.result), mesh, generator)
    )
    meeting = Meeting(mesh) if rule.internal else None
    results: dict[Coordinate, Tensor] = {}
    gradients: list[dict[Coordinate, Tensor]] = [{} for _ in shards]
    written: list[dict[Coordinate, Tensor]] = [{} for _ in shards]

    def work(at: Coordinate) -> None:
        local = [
            s[at].detach().clone().requires_grad_(needs)
            for s, needs in zip(shards, whole.differentiable, strict=True)
        ]
        run = local_call(
            whole.call,
            strategy.operands,
            strategy.result,
            mesh,
            at,
            reducer=Member(meeting, at) if meeting else None,
            value="y",
        )
        if meeting is None:
            seed(whole.seed)
        out = run(*local)
        results[at] = out.detach()
        if cotangents is not None:
            wanted = [i for i, needs in enumerate(whole.differentiable) if needs]
            found = torch.autograd.grad(
                out,
                [local[i] for i in wanted],
                cotangents[at],
                allow_unused=True,
                materialize_grads=True,
            )
            for i, gradient in zip(wanted, found, strict=True):
                gradients[i][at] = gradient
        for i in rule.mutates:
            written[i][at] = local[i]

    run_ranks(mesh, work, meeting)
    out = joined(results, forward_half(strategy.result), whole.call.result, mesh)
    assert_same(out, whole.result)
    for i, gradient in enumerate(whole.gradients):
        if gradient is not None:
            half = gradient_half(strategy.operands[i])
            got = joined(gradients[i], half, whole.call.shapes[i], mesh)
            assert_same(got, gradient)
    for i in rule.mutates:
        got = joined(written[i], forward_half(strategy.operands[i]), whole.call.shapes[i], mesh)
        assert_same(got, whole.written[i])
    if meeting is not None:
        for at in coordinates(mesh):
            for phase in ("forward", "backward"):
                issued = [m for p, m in meeting.records[at] if p == phase]
                expected = predicted(rule, strategy, mesh, at, phase)
                assert issued == expected, (at, phase, issued, expected)
