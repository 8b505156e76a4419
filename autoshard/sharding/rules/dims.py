"""What the rules share: names for dims, and the attributes of a call as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from string import ascii_lowercase

from autoshard.errors import RuleError
from autoshard.sharding.layout import Shape
from autoshard.sharding.registry import OpCall
from autoshard.sharding.rule import Dims, Rule


def letters(ndim: int) -> tuple[str, ...]:
    """Names of ``ndim`` dims: a, b, c, ..."""
    return tuple(ascii_lowercase[:ndim])


def single(names: Iterable[str]) -> Dims:
    """Dims of one factor each."""
    return tuple((name,) for name in names)


def broadcast_dims(names: tuple[str, ...], sizes: Mapping[str, int], shape: Shape) -> Dims:
    """Dims of a tensor broadcast against ``names``; its broadcast dims of size 1 have no factor."""
    mine = names[len(names) - len(shape) :]
    return tuple(
        (name,) if size == sizes[name] else () for name, size in zip(mine, shape, strict=True)
    )


def broadcast(
    call: OpCall,
    *,
    whole: Iterable[str] = (),
    linear: Iterable[Iterable[int]] = (),
) -> Rule:
    """Every operand broadcasts to the result: ``a b c, c -> a b c``."""
    names = letters(len(call.result))
    sizes = dict(zip(names, call.result, strict=True))
    return Rule(
        operands=tuple(broadcast_dims(names, sizes, shape) for shape in call.shapes),
        result=single(names),
        sizes=sizes,
        whole=frozenset(whole),
        linear=linear_groups(call, linear),
    )


def linear_groups(call: OpCall, groups: Iterable[Iterable[int]]) -> tuple[frozenset[int], ...]:
    """``groups``, or none where a value has one byte an item: a sum of truth values is none."""
    if call.itemsize == 1 or 1 in call.operand_itemsizes:
        return ()
    return tuple(frozenset(group) for group in groups)


def integer(call: OpCall, name: str, default: int) -> int:
    """Attribute ``name`` as a number; ``default`` where it is absent or None."""
    value = call.attrs.get(name)
    if value is None:
        return default
    if not isinstance(value, int):
        raise RuleError(f"{call.op}: {name} must be a whole number, found {value!r}")
    return value


def number(call: OpCall, name: str, default: float) -> float:
    """Attribute ``name`` as a real number; ``default`` where it is absent or None."""
    value = call.attrs.get(name)
    if value is None:
        return default
    if not isinstance(value, (int, float)):
        raise RuleError(f"{call.op}: {name} must be a number, found {value!r}")
    return value


def integers(call: OpCall, name: str) -> tuple[int, ...] | None:
    """Attribute ``name`` as numbers, a single one being a list of one; None where absent."""
    value = call.attrs.get(name)
    if value is None:
        return None
    if isinstance(value, int):
        return (value,)
    if isinstance(value, (tuple, list)) and all(isinstance(v, int) for v in value):
        return tuple(value)
    raise RuleError(f"{call.op}: {name} must be whole numbers, found {value!r}")


def dims_of(call: OpCall, name: str, ndim: int) -> tuple[int, ...]:
    """Attribute ``name`` as non-negative dims; every dim where it is absent or empty."""
    dims = integers(call, name)
    return tuple(d % ndim for d in dims) if dims else tuple(range(ndim))


def leaves_out(call: OpCall, reduced: tuple[int, ...], names: tuple[str, ...]) -> Dims:
    """Dims of a result that lacks the dims ``reduced``, or keeps them with size 1."""
    keep = len(call.result) == len(names)
    return tuple(
        () if dim in reduced else (name,)
        for dim, name in enumerate(names)
        if keep or dim not in reduced
    )
