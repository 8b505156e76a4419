"""Operators that only rearrange: reshape, permute, expand, repeat.

They are linear: a partial sum passes through each of them.
"""

from __future__ import annotations

from math import gcd, prod

from autoshard.sharding.layout import Shape
from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Dim, Dims, Rule
from autoshard.sharding.rules.dims import (
    broadcast_dims,
    integer,
    integers,
    letters,
    linear_groups,
    single,
)


def shared_factors(source: Shape, target: Shape) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Dims of two shapes of equal size in factors that they share, their sizes, and what is whole.

    Both shapes are walked from the major end. Where the sizes that remain have a common divisor,
    that is a factor of both; where they have none, the dims up to the next place where both shapes
    end a dim have no factor in common, and cannot be cut: (2, 3, 4) and (2, 4, 3) share only 2.
    Dims of size 1 have no factor.
    """
    shapes = (source, target)
    dims: tuple[list[Dim], list[Dim]] = ([() for _ in source], [() for _ in target])
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    at = [0, 0]
    left = [1, 1]

    def step(side: int) -> bool:
        """Come to the next dim of one side that is not used up; whether there is one."""
        while left[side] == 1 and at[side] < len(shapes[side]):
            left[side] = shapes[side][at[side]]
            at[side] += 1
        return left[side] > 1

    def give(side: int, name: str) -> None:
        dims[side][at[side] - 1] += (name,)

    while step(0) and step(1):
        common = gcd(left[0], left[1])
        if common > 1:
            name = f"f{len(sizes)}"
            sizes[name] = common
            for side in (0, 1):
                give(side, name)
                left[side] //= common
            continue
        # No common divisor: take from the smaller side until both have covered the same.
        covered = [1, 1]
        while covered[0] != covered[1] or covered[0] == 1:
            side = 0 if covered[0] <= covered[1] else 1
            step(side)
            name = f"f{len(sizes)}"
            sizes[name] = left[side]
            whole.add(name)
            give(side, name)
            covered[side] *= left[side]
            left[side] = 1
    return tuple(dims[0]), tuple(dims[1]), sizes, whole


@rule_for(
    "aten.reshape",
    "aten.view",
    "aten._unsafe_view",
    "aten.flatten",
    "aten.unflatten",
    "aten.squeeze",
    "aten.unsqueeze",
)
def reshape(call: OpCall) -> Rule | None:
    """``f0 f1 (f2 f3) -> (f0 f1) f2 f3``: factors that both shapes share."""
    if prod(call.result) == 0:
        return None
    operand, result, sizes, whole = shared_factors(call.shapes[0], call.result)
    return Rule(
        operands=(operand,),
        result=result,
        sizes=sizes,
        whole=frozenset(whole),
        linear=linear_groups(call, [[0]]),
    )


@rule_for("aten.view_as_complex", "aten.view_as_real")
def pairs(call: OpCall) -> Rule:
    """``a b p -> a b`` and ``a b -> a b p``, p whole: the two parts of complex numbers."""
    longer = max(call.shapes[0], call.result, key=len)
    names = letters(len(longer))
    dims = {len(longer): single(names), len(longer) - 1: single(names[:-1])}
    return Rule(
        operands=(dims[len(call.shapes[0])],),
        result=dims[len(call.result)],
        sizes=dict(zip(names, longer, strict=True)),
        whole=frozenset(names[-1:]),
        linear=linear_groups(call, [[0]]),
    )


def _permuted(call: OpCall, order: tuple[int, ...]) -> Rule:
    names = letters(len(order))
    return Rule(
        operands=(single(names),),
        result=single(names[d] for d in order),
        sizes=dict(zip(names, call.shapes[0], strict=True)),
        linear=linear_groups(call, [[0]]),
    )


@rule_for("aten.permute")
def permute(call: OpCall) -> Rule:
    """``a b c -> a c b``."""
    ndim = len(call.result)
    return _permuted(call, tuple(d % ndim for d in integers(call, "dims") or ()))


@rule_for("aten.transpose")
def transpose(call: OpCall) -> Rule:
    """``a b c -> a c b``, two dims exchanged."""
    ndim = len(call.result)
    order = list(range(ndim))
    first, second = integer(call, "dim0", 0) % ndim, integer(call, "dim1", 0) % ndim
    order[first], order[second] = order[second], order[first]
    return _permuted(call, tuple(order))


@rule_for("aten.t", "aten.numpy_T")
def reverse(call: OpCall) -> Rule:
    """``a b -> b a``: all dims reversed."""
    return _permuted(call, tuple(reversed(range(len(call.result)))))


@rule_for("aten.expand", "aten.broadcast_to")
def expand(call: OpCall) -> Rule:
    """``a 1 c -> a b c``: a new factor may be cut, and gradients are then summed."""
    names = letters(len(call.result))
    sizes = dict(zip(names, call.result, strict=True))
    return Rule(
        operands=(broadcast_dims(names, sizes, call.shapes[0]),),
        result=single(names),
        sizes=sizes,
        linear=linear_groups(call, [[0]]),
    )


@rule_for("aten.repeat")
def repeat(call: OpCall) -> Rule:
    """``a b -> (r a) (q b)``: the whole tensor several times along each dim."""
    shape, result = call.shapes[0], call.result
    names, times = letters(len(shape)), tuple(f"r{i}" for i in range(len(result)))
    sizes = dict(zip(names, shape, strict=True))
    padded = (1,) * (len(result) - len(shape)) + shape
    sizes |= {t: size // max(old, 1) for t, size, old in zip(times, result, padded, strict=True)}
    old_names = (None,) * (len(result) - len(shape)) + names
    return Rule(
        operands=(single(names),),
        result=tuple(
            (t,) if n is None else (n,) if sizes[t] == 1 else (t, n)
            for t, n in zip(times, old_names, strict=True)
        ),
        sizes=sizes,
        linear=linear_groups(call, [[0]]),
    )


def _each_repeated(call: OpCall, dim: int) -> Rule:
    names = letters(len(call.result))
    sizes = dict(zip(names, call.shapes[0], strict=True))
    sizes["r"] = call.result[dim] // max(call.shapes[0][dim], 1)
    return Rule(
        operands=(single(names),),
        result=tuple((n, "r") if i == dim else (n,) for i, n in enumerate(names)),
        sizes=sizes,
        linear=linear_groups(call, [[0]]),
    )


@rule_for("autoshard.repeat_kv")
def repeat_kv(call: OpCall) -> Rule:
    """``a b c d -> a (b r) c d``: each key or value head once for every query head that uses it.

    Over more devices than key heads no factor can be cut: keys and values are then computed
    everywhere (``RP``) and the result is sliced, without a message.
    """
    return _each_repeated(call, 1)


@rule_for("aten.repeat_interleave")
def repeat_interleave(call: OpCall) -> Rule | None:
    """``a b -> a (b r)``; None without a dim (flattened) or with a count for each item."""
    if len(call.shapes) != 1 or call.attrs.get("dim") is None:
        return None
    return _each_repeated(call, integer(call, "dim", 0) % len(call.result))
