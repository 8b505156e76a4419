"""The one table of sharding rules, read by the search and by the runtime alike.

A rule function takes an :class:`OpCall` (shapes and attributes, no tensors) and gives a
:class:`~autoshard.sharding.rule.Rule`, or None where this very call has none. A second rule for an
operator is an error. An operator without a rule still runs: its operands are gathered and it is
computed everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from autoshard.errors import RuleError
from autoshard.sharding.layout import Shape
from autoshard.sharding.rule import Rule, parse

AttrValue = object


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One call of an operator, as a rule sees it.

    Attributes:
        op: with overload, ``aten.add.Tensor``.
        shapes: global shapes of the tensor operands.
        roles: the schema's argument name of each operand (``tensors.0`` inside a list).
        attrs: the other arguments that differ from the schema's defaults.
        result: global shape of the result.
        itemsize: bytes of one element of the result.
        operand_itemsizes: the same, of each operand.
    """

    op: str
    shapes: tuple[Shape, ...]
    roles: tuple[str, ...]
    result: Shape
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    itemsize: int = 4
    operand_itemsizes: tuple[int, ...] = ()

    @property
    def family(self) -> str:
        """The operator without its overload."""
        parts = self.op.split(".")
        return ".".join(parts[:2]) if len(parts) > 2 else self.op

    def shape(self, role: str) -> Shape | None:
        """Shape of the operand with ``role``, or None."""
        return self.shapes[self.roles.index(role)] if role in self.roles else None


RuleFunction = Callable[[OpCall], Rule | None]
_RULES: dict[str, RuleFunction] = {}
_USER: set[str] = set()
RuleText = tuple[str, str, tuple[tuple[int, ...], ...]]
_TEXTS: dict[str, RuleText] = {}


def rule_for(*families: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function as the rule of operator families (``aten.mm``)."""

    def register(function: RuleFunction) -> RuleFunction:
        for family in families:
            if family in _RULES:
                raise RuleError(f"{family} already has a rule: {_RULES[family].__name__}")
            _RULES[family] = function
        return function

    return register


def rule_of(call: OpCall) -> Rule | None:
    """The rule of a call, or None where it must run whole.

    Raises:
        RuleError: a user's rule does not fit the call; the message names the operator.
    """
    import autoshard.sharding.rules  # noqa: F401  (registers the built-in rules)

    function = _RULES.get(call.family)
    return None if function is None else function(call)


def known_families() -> tuple[str, ...]:
    """Every operator family that has a rule, sorted."""
    import autoshard.sharding.rules  # noqa: F401

    return tuple(sorted(_RULES))


def family_name(operator: object) -> str:
    """``mylib.op`` of ``"mylib::op"``, ``"mylib::op.default"`` or ``torch.ops.mylib.op``."""
    text = (
        operator
        if isinstance(operator, str)
        else str(getattr(operator, "_qualified_op_name", operator))
    )
    return ".".join(text.replace("::", ".").split(".")[:2])


def sharding_rule(
    operator: object,
    text: str,
    *,
    whole: str = "",
    linear: Iterable[Iterable[int]] = (),
) -> None:
    """Give a custom operator its sharding rule, in one line.

    ``autoshard.sharding_rule("mylib::scale_rows", "b s d, d -> b s d")``

    Args:
        operator: ``"mylib::op"`` or ``torch.ops.mylib.op``.
        text: the factors of each tensor operand and of the result; see ``sharding.rule``.
        whole: factors that must not be cut.
        linear: sets of operands (by index) that may together be partial sums.

    Raises:
        RuleError: the text cannot be read, or the operator is built in and has a rule.
    """
    family = family_name(operator)
    if family in _RULES and family not in _USER:
        raise RuleError(f"{family} already has a rule: {_RULES[family].__name__}")
    if text.count("->") != 1:
        raise RuleError(f"rule of {family}: a rule reads 'operands -> result', found {text!r}")
    groups = tuple(tuple(g) for g in linear)

    def user_rule(call: OpCall) -> Rule:
        try:
            return parse(text, call.shapes, call.result, whole=whole, linear=groups)
        except RuleError as error:
            raise RuleError(f"rule of {family}: {error}") from error

    user_rule.__name__ = f"user rule {text!r}"
    _RULES[family] = user_rule
    _USER.add(family)
    _TEXTS[family] = (text, whole, groups)


def forget_rule(operator: object) -> None:
    """Remove a rule given with :func:`sharding_rule`; the built-in ones stay."""
    family = family_name(operator)
    if family in _USER:
        _USER.discard(family)
        del _RULES[family], _TEXTS[family]


def user_rules() -> Mapping[str, RuleFunction]:
    """The rules that users gave, by family."""
    return {family: _RULES[family] for family in sorted(_USER)}


def user_rule_texts() -> dict[str, RuleText]:
    """What users said of their operators, by family: text, ``whole`` and ``linear``."""
    return dict(_TEXTS)
