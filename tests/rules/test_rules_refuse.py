"""What a rule forbids is forbidden for a reason: cut all the same, the numbers would be wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autoshard.sharding.strategy import Choice, strategies
from tests.rules.cases import CASES
from tests.rules.simulation import Whole, check

LEFT_OUT = {
    ("autoshard.experts", "k"): "right, but no better than a cut of the tokens",
    ("autoshard.experts", "o"): "right, but every device computes the first products again",
    ("aten.scaled_dot_product_attention", "e"): "right, but every device computes all scores "
    "again, and fused kernels want value heads as wide as key heads",
    ("aten.any", "b"): "right, since torch adds truth values as `or`, but no collective does",
    ("aten.new_zeros", "s0"): "right, but the operand's items are not read",
    ("aten.new_zeros", "s1"): "right, but the operand's items are not read",
}
"""Cuts that would be right and are not offered, with the reason."""


@cache
def whole(index: int) -> Whole:
    return Whole(CASES[index], 3)


def forbidden() -> list[tuple[int, str]]:
    return [
        (index, factor)
        for index in range(len(CASES))
        for factor in sorted(whole(index).rule.whole)
        if whole(index).rule.sizes[factor] > 1
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("index", "factor"), [pytest.param(i, f, id=f"{i}-{CASES[i]}-{f}") for i, f in forbidden()]
)
def test_a_whole_factor_cannot_be_cut(index: int, factor: str) -> None:
    it = whole(index)
    rule = replace(it.rule, whole=it.rule.whole - {factor})
    size = rule.sizes[factor]
    found = strategies(
        rule,
        [[Choice(factor=factor, outer=1, n=size)]],
        (2,),
        operand_grad=it.differentiable,
        result_grad=it.cotangent is not None,
    )
    for strategy in found:
        try:
            check(it, strategy, (2,), rule)
        except Exception:
            continue
        assert (it.case.family, factor) in LEFT_OUT, f"{factor} of {it.rule} could be cut"


def test_what_is_left_out_is_whole() -> None:
    kept = {(CASES[i].family, f) for i, f in forbidden()}
    assert set(LEFT_OUT) <= kept
