"""Sums of tables: many choices at once cost what each costs, factor by factor."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.search.filling import combined, filled
from autoshard.search.problem import LEANEST
from autoshard.search.scheduled import Scheduled
from autoshard.search.sums import Sums, Tied
from tests.search.test_stalls import choices, problem


def _by_factor(sums: Sums, tied: Tied) -> tuple[float, float]:
    """(seconds, bytes), one table after another."""
    seconds = num_bytes = 0.0
    for factor, scope in enumerate(sums.scopes):
        at = tuple(tied.choice[k] for k in scope)
        seconds += sums.seconds[factor][at]
        num_bytes += sums.num_bytes[factor][at]
        if factor in tied.again:
            seconds += sums.again[factor][at]
        elif factor in sums.gathered:
            num_bytes += sums.gathered[factor][at]
    return float(seconds), float(num_bytes)


@pytest.fixture(scope="module", params=[{}, {"context": 1, "model": 2}], ids=str)
def drawn(request: pytest.FixtureRequest) -> tuple[Sums, list[Tied]]:
    """A problem's sums, and choices with and without gathering again."""
    folded, schedule = problem(**request.param)
    sums = Scheduled(folded, schedule, None).sums(1.0)
    found = choices(folded, sums, 12, 0)
    found += [folded.minimum(sums, price)[1] for price in (0.0, 1e-12, 1e-11, 1e-10, LEANEST)]
    assert any(tied.again for tied in found)
    return sums, found


def test_choices_cost_the_sum_of_their_entries(drawn: tuple[Sums, list[Tied]]) -> None:
    sums, found = drawn
    seconds, sizes = sums.totals(np.array([t.choice for t in found]), [t.again for t in found])
    for tied, *total in zip(found, seconds, sizes, strict=True):
        assert total == pytest.approx(_by_factor(sums, tied))
        # The same number with others beside it and alone: no choice wins by rounding.
        assert [tied.seconds, tied.num_bytes] == total


def test_a_price_of_memory_is_paid_for_every_byte(drawn: tuple[Sums, list[Tied]]) -> None:
    sums, found = drawn
    price = 1e-11
    tables = sums.at(price)
    for tied in found:
        again = sums.chosen_again(tied.choice, price)
        seconds, num_bytes = _by_factor(sums, sums.measure(tied.choice, again))
        paid = sum(
            t[tuple(tied.choice[k] for k in s)] for t, s in zip(tables, sums.scopes, strict=True)
        )
        assert paid == pytest.approx(seconds + price * num_bytes)


def test_between_two_sums_choices_cost_what_lies_between(drawn: tuple[Sums, list[Tied]]) -> None:
    sums, found = drawn
    other = sums.with_seconds(2.0 * sums.flat_seconds, {f: 3.0 * t for f, t in sums.again.items()})
    for tied in found:
        low, high, middle = (
            s.measure(tied.choice, tied.again) for s in (sums, other, sums.towards(other, 0.25))
        )
        assert middle.seconds == pytest.approx(0.75 * low.seconds + 0.25 * high.seconds)
        assert middle.num_bytes == tied.num_bytes


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_room_that_is_left_makes_a_choice_faster(
    drawn: tuple[Sums, list[Tied]], share: float
) -> None:
    sums, found = drawn
    fastest, leanest = found[-5], found[-1]
    room = leanest.num_bytes + share * (fastest.num_bytes - leanest.num_bytes)
    full = filled(sums, leanest, fastest, room)
    other = combined(sums, [full, *found], room)
    assert other is not None
    for tied in (full, other):
        assert tied.num_bytes <= room
        assert tied.seconds < leanest.seconds
        assert (tied.seconds, tied.num_bytes) == pytest.approx(_by_factor(sums, tied))
    assert other.seconds <= full.seconds * 1.001
