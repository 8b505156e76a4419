"""Reading rules, and the strategies that follow from one line."""

from __future__ import annotations

import pytest

from autoshard.errors import RuleError
from autoshard.sharding.layout import RP, Cut, P, R
from autoshard.sharding.registry import OpCall, forget_rule, rule_of, sharding_rule
from autoshard.sharding.rule import parse
from autoshard.sharding.strategy import Choice, axis_choices, leaf_strategies, strategies

LINEAR = parse("b s k, o k -> b s o", [(2, 4, 6), (8, 6)], (2, 4, 8), linear=[[0], [1]])


def on_one_axis(factor: str, n: int):
    (found,) = strategies(
        LINEAR,
        [[Choice(factor=factor, n=n)]],
        (2,),
        operand_grad=(True, True),
        result_grad=True,
    )
    return found.operands[0][0], found.operands[1][0], found.result[0]


@pytest.mark.parametrize(
    ("factor", "n", "states"),
    [
        ("b", 2, (Cut(0, 1, 2), RP, Cut(0, 1, 2))),
        ("o", 8, (RP, Cut(0, 1, 2), Cut(2, 1, 2))),
        ("k", 6, (Cut(2, 1, 2), Cut(1, 1, 2), P)),
    ],
    ids=["data parallel", "column parallel", "row parallel"],
)
def test_three_ways_to_cut_a_linear_layer(factor: str, n: int, states: tuple) -> None:
    assert on_one_axis(factor, n) == states


def test_two_axes_cut_one_factor_nested_in_either_order() -> None:
    found = strategies(
        LINEAR,
        [[Choice(factor="o", n=8)], [Choice(factor="o", n=8)]],
        (2, 4),
        operand_grad=(True, True),
        result_grad=True,
    )
    assert {s.operands[1] for s in found} == {
        (Cut(0, 1, 2), Cut(0, 2, 4)),
        (Cut(0, 4, 2), Cut(0, 1, 4)),
    }


def test_values_without_gradient_have_no_gradient_half() -> None:
    (found,) = strategies(
        LINEAR, [[Choice(factor="b", n=2)]], (2,), operand_grad=(False, False), result_grad=False
    )
    assert found.operands[1] == (R,)


def test_a_stored_matrix_may_be_cut_by_both_axes_on_either_dim() -> None:
    found = leaf_strategies([[(0, 1, 8), (1, 1, 6)]] * 2, (2, 2), (8, 6))
    assert len(found) == len({s.result for s in found}) == 11


def test_choices_print_as_they_parse() -> None:
    rows = axis_choices(LINEAR, {"o": [(1, 8)], "k": [(2, 3)]}, differentiable=True)
    assert [Choice.parse(str(c)) for c in rows] == rows


@pytest.mark.parametrize(
    ("text", "shapes", "result", "message"),
    [
        ("b k", [(2, 3)], (2,), "'operands -> result'"),
        ("b k -> b", [(2, 3), (3,)], (2,), "names 1 operands, the operator has 2"),
        ("b k -> b", [(2, 3, 4)], (2,), r"names 2 dims of operand 0, which has shape \[2, 3, 4\]"),
        ("b k, k -> b", [(2, 3), (4,)], (2,), "dim 1 of operand 0 has size 3"),
        ("b b -> b", [(2, 2)], (2,), "a factor occurs twice"),
        ("(a b) -> (a b)", [(6,)], (6,), "cannot be told"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said(text, shapes, result, message) -> None:
    with pytest.raises(RuleError, match=message):
        parse(text, shapes, result)


def test_a_whole_factor_must_exist() -> None:
    with pytest.raises(RuleError, match=r"no factor \['z'\]"):
        parse("b d -> b d", [(2, 3)], (2, 3), whole="z")


def test_broadcast_dims_have_no_factor() -> None:
    rule = parse("b s d, b s d -> b s d", [(2, 4, 6), (1, 4, 6)], (2, 4, 6))
    assert rule.operands[1] == ((), ("s",), ("d",))
    assert str(rule) == "b s d, 1 s d -> b s d"


def test_user_rules_come_and_go_but_never_replace_built_in_ones() -> None:
    sharding_rule("testlib::rows", "b d, d -> b d")
    call = OpCall(op="testlib.rows.default", shapes=((2, 3), (3,)), roles=("x", "w"), result=(2, 3))
    try:
        assert str(rule_of(call)) == "b d, d -> b d"
        wrong = OpCall(op="testlib.rows.default", shapes=((2, 3),), roles=("x",), result=(2, 3))
        with pytest.raises(RuleError, match=r"rule of testlib\.rows: .* the operator has 1"):
            rule_of(wrong)
    finally:
        forget_rule("testlib::rows")
    assert rule_of(call) is None
