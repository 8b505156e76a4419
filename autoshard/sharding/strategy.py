"""The strategies of one operator: for each mesh axis a choice of one factor, or none.

On one axis, with factor ``f`` cut, layouts follow from the rule. With none, everything is ``R``;
or everything is ``RP``, which may pass through *any* operator (the forward is the same on all
devices and the backward is linear in the gradient); or partial sums ``P`` pass where the operator
is linear. On a mesh of several axes a strategy is one choice an axis; two axes may cut one factor,
nested in either order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import prod
from typing import Literal

from autoshard.sharding.layout import (
    RP,
    Cut,
    Layout,
    P,
    R,
    Shape,
    State,
    canonical,
    compatible,
)
from autoshard.sharding.rule import Dims, Rule

Passing = Literal["star", "full"]
"""Which operators hand on ``RP`` and ``P``: every legal way, or the set found sufficient.

``star``: ``RP`` through every operator but adds and products (the first products excepted: behind
them only weights want a gradient), ``P`` through none. It had the optimum of ``full`` in 60 of 60
random cases, at a third of the work; tests use ``full``.
"""

STAR_WITHOUT_RP = frozenset(
    {"aten.add", "aten.linear", "aten.mm", "aten.matmul", "aten.bmm", "aten.convolution"}
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What an operator does on one axis.

    ``factor``: that factor is cut as (outer, n). ``passes``: ``R`` or ``RP`` for everything, or
    ``P`` for the operands in ``partial``.
    """

    factor: str = ""
    outer: int = 1
    n: int = 0
    passes: Literal["R", "RP", "P", ""] = ""
    partial: frozenset[int] = frozenset()

    def __str__(self) -> str:
        """``o:1:4096`` (factor, outer, n), ``R``, ``RP``, or ``P:0,1`` (the partial operands)."""
        if self.factor:
            return f"{self.factor}:{self.outer}:{self.n}"
        if self.passes == "P":
            return "P:" + ",".join(str(i) for i in sorted(self.partial))
        return self.passes

    @classmethod
    def parse(cls, text: str) -> Choice:
        """The choice that ``str`` wrote.

        Raises:
            ValueError: not a choice.
        """
        if text == "R":
            return cls(passes="R")
        if text == "RP":
            return cls(passes="RP")
        head, _, rest = text.partition(":")
        if head == "P":
            return cls(passes="P", partial=frozenset(int(i) for i in rest.split(",")))
        outer, n = rest.split(":")
        return cls(factor=head, outer=int(outer), n=int(n))


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an operator on a mesh.

    Attributes:
        choices: one an axis.
        operands: layout that each operand is taken in.
        result: layout of the result.
        work: largest share of the whole operator's work that one device does.
    """

    choices: tuple[Choice, ...]
    operands: tuple[Layout, ...]
    result: Layout
    work: float

    @property
    def key(self) -> tuple[tuple[Layout, ...], Layout]:
        """What makes two strategies the same."""
        return self.operands, self.result


Proposal = tuple[int, int]
"""(outer, n) of a factor or of a dim."""


def _share(n: int, parts: int) -> float:
    return -(-n // parts) / n


def axis_choices(
    rule: Rule,
    proposals: Mapping[str, Iterable[Proposal]],
    *,
    differentiable: bool,
    allow_rp: bool = True,
    allow_p: bool = True,
) -> list[Choice]:
    """Choices of one operator on one axis, before the axis' size is known."""
    out = [Choice(passes="R")]
    if differentiable and allow_rp:
        out.append(Choice(passes="RP"))
    if allow_p:
        out += [Choice(passes="P", partial=group) for group in rule.linear]
    for factor in rule.factors:
        for outer, n in sorted(set(proposals.get(factor, ()))):
            if n > 1 and rule.sizes[factor] % (outer * n) == 0:
                out.append(Choice(factor=factor, outer=outer, n=n))
    return out


def strategies(
    rule: Rule,
    choices: Sequence[Sequence[Choice]],
    mesh: Shape,
    *,
    operand_grad: Sequence[bool],
    result_grad: bool,
) -> list[Strategy]:
    """Every legal strategy from the given choices of each axis, without repetition.

    Args:
        rule: the operator's rule.
        choices: for each axis, what is allowed there.
        mesh: axis sizes.
        operand_grad: whether each operand is differentiable; others have a forward half only.
        result_grad: whether the result is.
    """
    found: dict[tuple[tuple[Layout, ...], Layout], Strategy] = {}
    known: dict[tuple[int, Choice], _Column] = {}
    for combination in product(*choices):
        for nested in _nestings(combination, mesh):
            columns = []
            for size, choice in zip(mesh, nested, strict=True):
                if (size, choice) not in known:
                    known[size, choice] = _column(rule, choice, size)
                columns.append(known[size, choice])
            strategy = _joined(nested, columns, operand_grad, result_grad)
            if strategy is not None:
                found.setdefault(strategy.key, strategy)
    return list(found.values())


def _nestings(combination: Sequence[Choice], mesh: Shape) -> Iterable[tuple[Choice, ...]]:
    """The combination with equal cuts on several axes nested, in every order."""
    groups: dict[tuple[str, int, int], list[int]] = {}
    for axis, choice in enumerate(combination):
        if choice.factor:
            groups.setdefault((choice.factor, choice.outer, choice.n), []).append(axis)
    shared = [axes for axes in groups.values() if len(axes) > 1]
    if not shared:
        yield tuple(combination)
        return
    for orders in product(*(permutations(axes) for axes in shared)):
        out = list(combination)
        legal = True
        for order in orders:
            outer, n = out[order[0]].outer, out[order[0]].n
            for axis in order[:-1]:
                out[axis] = Choice(factor=out[axis].factor, outer=outer, n=n)
                legal = legal and n % mesh[axis] == 0 and n > mesh[axis]
                outer, n = outer * mesh[axis], n // mesh[axis]
            last = order[-1]
            out[last] = Choice(factor=out[last].factor, outer=outer, n=n)
        if legal:
            yield tuple(out)


def _tensor_state(rule: Rule, dims: Dims, choice: Choice, size: int, absent: State) -> State:
    state = rule.place(dims, choice.factor, choice.outer, choice.n, absent)
    return canonical(state, size) if isinstance(state, Cut) else state


_Column = tuple[tuple[State, ...], State, float]
"""Of one axis: the state of each operand, that of the result, and the share of the work."""


def _column(rule: Rule, choice: Choice, size: int) -> _Column:
    """What a choice makes of an axis of ``size`` devices."""
    count = len(rule.operands)
    if choice.factor:
        taken = tuple(_tensor_state(rule, dims, choice, size, RP) for dims in rule.operands)
        absent = rule.absent_result(choice.factor)
        given = _tensor_state(rule, rule.result, choice, size, absent)
        return taken, given, _share(choice.n, size)
    if choice.passes == "P":
        return tuple(P if i in choice.partial else RP for i in range(count)), P, 1.0
    state = RP if choice.passes == "RP" else R
    return (state,) * count, state, 1.0


def build(
    rule: Rule,
    choices: tuple[Choice, ...],
    mesh: Shape,
    operand_grad: Sequence[bool],
    result_grad: bool,
) -> Strategy | None:
    """The strategy that makes exactly these choices, or None where two cuts collide."""
    columns = [_column(rule, choice, size) for choice, size in zip(choices, mesh, strict=True)]
    return _joined(choices, columns, operand_grad, result_grad)


def _joined(
    choices: tuple[Choice, ...],
    columns: Sequence[_Column],
    operand_grad: Sequence[bool],
    result_grad: bool,
) -> Strategy | None:
    operands = [tuple(taken[i] for taken, _, _ in columns) for i in range(len(operand_grad))]
    taken = tuple(
        row if grad else _without_gradient(row)
        for row, grad in zip(operands, operand_grad, strict=True)
    )
    result = tuple(given for _, given, _ in columns)
    given = result if result_grad else _without_gradient(result)
    if len(columns) > 1 and not all(map(compatible, (*taken, given))):
        return None
    work = prod((share for _, _, share in columns), start=1.0)
    return Strategy(choices, taken, given, work)


def _without_gradient(layout: Layout) -> Layout:
    """A value without gradient has the forward half only: ``RP`` is ``R``."""
    return tuple(R if s is RP else s for s in layout)


def leaf_rule(shape: Shape) -> Rule:
    """The rule of a stored value: each dim is a factor, ``d0``, ``d1``, ..."""
    return Rule(
        operands=(),
        result=tuple((f"d{d}",) for d in range(len(shape))),
        sizes={f"d{d}": size for d, size in enumerate(shape)},
    )


def leaf_strategies(
    proposals: Sequence[Iterable[tuple[int, int, int]]], mesh: Shape, shape: Shape
) -> list[Strategy]:
    """Stored layouts of an input, parameter or buffer: ``R``, or cut as proposed, on each axis.

    Args:
        proposals: for each axis the (dim, outer, n) that it may cut.
        mesh: axis sizes.
        shape: the leaf's global shape.
    """
    rule = leaf_rule(shape)
    choices = []
    for row in proposals:
        by_factor: dict[str, list[Proposal]] = {}
        for dim, outer, n in row:
            by_factor.setdefault(f"d{dim}", []).append((outer, n))
        choices.append(axis_choices(rule, by_factor, differentiable=False, allow_p=False))
    return strategies(rule, choices, mesh, operand_grad=(), result_grad=True)
