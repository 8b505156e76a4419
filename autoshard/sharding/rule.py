"""A sharding rule: which dims of an operator's operands and result may be cut together.

A rule names each dim of each operand and of the result with *factors*, like an einsum::

    linear     b s k, o k   -> b s o          k is contracted
    embedding  v d, b s     -> b s d          v is looked up: a cut leaves partial sums
    layer_norm b s d, d, d  -> b s d          d is normalised over: never cut
    view       b s (h d)    -> b s h d        one dim of two factors, major to minor

Everything else follows from the names. Where factor ``f`` is cut over an axis, a tensor that has
``f`` is ``S`` along its dim; an operand without it is ``RP`` (it was broadcast along ``f``, so its
gradient is summed over ``f``) and a result without it is ``P`` (``f`` was contracted). Notation
after Shardy's sharding rules (https://openxla.org/shardy/sharding_rules) and einops.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from autoshard.errors import RuleError
from autoshard.sharding.layout import Cut, P, R, Shape, State

Dim = tuple[str, ...]
"""Factors of one dim, major to minor. Empty for a dim of size 1 that is broadcast."""

Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Internal:
    """A collective that an operator issues inside itself when one of ``when`` is cut.

    It runs over all axes that cut a factor of ``when``. Its message has
    ``count * product(local sizes of elements)`` elements of ``itemsize`` bytes.
    """

    when: frozenset[str]
    elements: tuple[str, ...]
    itemsize: int
    count: int = 1
    op: Literal["all_reduce"] = "all_reduce"
    phase: Literal["forward", "backward"] = "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Factors of an operator's operands and result, and what else its mathematics demands.

    Attributes:
        operands: dims of each operand, in operand order.
        result: dims of the result.
        sizes: global size of each factor.
        whole: factors that must not be cut (normalised over, sorted, a window's extent).
        linear: each entry is a set of operands (by index) that may *together* be partial sums, the
            result then being one too; the other operands are ``RP``. ``({0, 1},)`` for an add,
            ``({0}, {1})`` for a product, ``({0},)`` for a quotient.
        replicated: contracted factors whose result is whole all the same, because the operator
            reduces inside itself (cross-entropy over a cut vocabulary).
        internal: the collectives that it issues to do so.
        anchors: factors that seed cuts of their own; the other factors are only cut as
            neighbouring operators propose (see ``strategy.propose_cuts``).
        mutates: operands written in place; their edges never move data.
    """

    operands: tuple[Dims, ...]
    result: Dims
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    replicated: frozenset[str] = frozenset()
    internal: tuple[Internal, ...] = ()
    anchors: frozenset[str] = frozenset()
    mutates: frozenset[int] = frozenset()
    _cuttable: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        """Check that factors are known and occur at most once in a tensor."""
        for dims in (*self.operands, self.result):
            names = [f for dim in dims for f in dim]
            if len(names) != len(set(names)):
                raise RuleError(f"a factor occurs twice in one tensor of rule {self}")
            if missing := [f for f in names if f not in self.sizes]:
                raise RuleError(f"factors {missing} of rule {self} have no size")
        every = dict.fromkeys(f for t in (*self.operands, self.result) for dim in t for f in dim)
        object.__setattr__(
            self,
            "_cuttable",
            tuple(f for f in every if f not in self.whole and self.sizes[f] > 1),
        )

    def __str__(self) -> str:
        """``b s k, o k -> b s o``, as one would write it."""

        def text(dims: Dims) -> str:
            return " ".join(
                d[0] if len(d) == 1 else "1" if not d else f"({' '.join(d)})" for d in dims
            )

        left = ", ".join(text(t) for t in self.operands)
        whole = f"; whole: {' '.join(sorted(self.whole))}" if self.whole else ""
        return f"{left} -> {text(self.result)}{whole}"

    @property
    def factors(self) -> tuple[str, ...]:
        """Factors that may be cut, in order of first use."""
        return self._cuttable

    def place(self, dims: Dims, factor: str, outer: int, n: int, absent: State) -> State:
        """State of a tensor with ``dims`` where (outer, n) of ``factor`` is cut."""
        for index, dim in enumerate(dims):
            if factor in dim:
                before = 1
                for outer_factor in dim:
                    if outer_factor == factor:
                        return Cut(index, before * outer, n)
                    before *= self.sizes[outer_factor]
        return absent

    def absent_result(self, factor: str) -> State:
        """State of a result that lacks ``factor``, where ``factor`` is cut."""
        return R if factor in self.replicated else P


_TOKEN = re.compile(r"\(([^()]*)\)|(\S+)")


def _parse_tensor(text: str) -> Dims:
    dims: list[Dim] = []
    for group, single in _TOKEN.findall(text):
        if group:
            dims.append(tuple(group.split()))
        elif single == "1":
            dims.append(())
        elif single.isidentifier():
            dims.append((single,))
        else:
            raise RuleError(f"cannot read {single!r} in {text!r}; write names, 1 or (a b)")
    return tuple(dims)


def parse(
    text: str,
    shapes: Iterable[Shape],
    result: Shape,
    *,
    whole: str = "",
    linear: Iterable[Iterable[int]] = (),
    replicated: str = "",
    internal: Iterable[Internal] = (),
    anchors: str | None = None,
    mutates: Iterable[int] = (),
    sizes: Mapping[str, int] | None = None,
) -> Rule:
    """The rule that ``text`` writes, with factor sizes read off the shapes.

    ``parse("b s k, o k -> b s o", [x, w], y, linear=[[0], [1]], anchors="b s k o")``.

    A dim of size 1 whose factor is larger elsewhere is read as broadcast. Compound dims need the
    sizes of all but one of their factors known from elsewhere or given in ``sizes``.

    Raises:
        RuleError: the text does not fit the shapes; the message names tensor and dim.
    """
    try:
        left, right = text.split("->")
    except ValueError:
        raise RuleError(f"a rule reads 'operands -> result', found {text!r}") from None
    operands = [_parse_tensor(t) for t in left.split(",")] if left.strip() else []
    out = _parse_tensor(right)
    shapes = list(shapes)
    if len(operands) != len(shapes):
        raise RuleError(
            f"rule {text!r} names {len(operands)} operands, the operator has {len(shapes)}"
        )
    tensors = [*zip(operands, shapes, strict=True), (out, result)]
    for index, (dims, shape) in enumerate(tensors):
        if len(dims) != len(shape):
            what = "the result" if index == len(operands) else f"operand {index}"
            raise RuleError(
                f"rule {text!r} names {len(dims)} dims of {what}, which has shape {list(shape)}"
            )
    known = dict(sizes or {})
    for dims, shape in tensors:
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1:
                known[dim[0]] = max(known.get(dim[0], 1), size)
    for _ in range(2):
        for dims, shape in tensors:
            for dim, size in zip(dims, shape, strict=True):
                unknown = [f for f in dim if f not in known]
                if len(unknown) == 1:
                    known[unknown[0]] = size // prod(known[f] for f in dim if f in known)
    checked: list[Dims] = []
    for index, (dims, shape) in enumerate(tensors):
        row: list[Dim] = []
        for position, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            if any(f not in known for f in dim):
                raise RuleError(f"rule {text!r}: the sizes of {dim} cannot be told; give sizes=")
            if prod(known[f] for f in dim) == size:
                row.append(dim)
            elif size == 1:
                row.append(())
            else:
                what = "the result" if index == len(operands) else f"operand {index}"
                raise RuleError(
                    f"rule {text!r}: dim {position} of {what} has size {size}, "
                    f"but {' '.join(dim)} has {prod(known[f] for f in dim)} elsewhere"
                )
        checked.append(tuple(row))
    whole_set = frozenset(whole.split())
    named = {f for dims, _ in tensors for dim in dims for f in dim}
    if stray := (whole_set | set(replicated.split())) - named:
        raise RuleError(f"rule {text!r} has no factor {sorted(stray)}; it has {sorted(named)}")
    return Rule(
        operands=tuple(checked[:-1]),
        result=checked[-1],
        sizes=known,
        whole=whole_set,
        linear=tuple(frozenset(group) for group in linear),
        replicated=frozenset(replicated.split()),
        internal=tuple(internal),
        anchors=frozenset(named if anchors is None else anchors.split()) - whole_set,
        mutates=frozenset(mutates),
    )
