"""The property that holds every rule: split, run each rank, join equals one device."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.runtime.local.site import ADAPTORS
from autoshard.sharding.registry import known_families, user_rules
from tests.rules.cases import CASES
from tests.rules.simulation import Whole, all_strategies, check, choices

IDS = [f"{i}-{c}" for i, c in enumerate(CASES)]


@cache
def whole(index: int, seed: int) -> Whole:
    return Whole(CASES[index], seed)


def test_every_family_has_a_case() -> None:
    assert {c.family for c in CASES} == set(known_families()) - set(user_rules())


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_every_strategy_on_one_axis(index: int) -> None:
    it = whole(index, 3)
    for size in (2, 3, 4):
        for strategy in all_strategies(it, [choices(it)], (size,)):
            try:
                check(it, strategy, (size,))
            except BaseException as error:
                error.add_note(f"{it.rule} with {strategy.choices} over {size}: {strategy}")
                raise


def sampled() -> list[int]:
    """Cases that differ in rule or local form: not every elementwise operator again."""
    found: dict[object, int] = {}
    for index, case in enumerate(CASES):
        rule = whole(index, 3).rule
        key = (str(rule), rule.linear, case.kinds, ADAPTORS.get(case.family))
        found.setdefault(key, index)
    return list(found.values())


@pytest.mark.parametrize("index", [pytest.param(i, id=IDS[i]) for i in sampled()])
@given(
    mesh=st.sampled_from([(2, 2), (2, 2), (3, 2), (2, 4), (2, 2, 2)]), seed=st.integers(0, 2**16)
)
@settings(max_examples=3, deadline=None)
def test_sampled_strategies_on_several_axes(index: int, mesh: tuple[int, ...], seed: int) -> None:
    it = whole(index, seed % 5)
    rng = random.Random(seed)
    every = choices(it)
    rows = [rng.sample(every, min(3, len(every))) for _ in mesh]
    found = all_strategies(it, rows, mesh)
    for strategy in rng.sample(found, min(3, len(found))):
        try:
            check(it, strategy, mesh)
        except BaseException as error:
            error.add_note(f"{it.rule} with {strategy.choices} over {mesh}: {strategy}")
            raise
