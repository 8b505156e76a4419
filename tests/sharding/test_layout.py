"""Cuts, local shapes and their arithmetic, against NumPy's own chunks."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.sharding.layout import (
    RP,
    Cut,
    Layout,
    P,
    R,
    canonical,
    chunk,
    compatible,
    coordinate_of,
    coordinates,
    disjoint,
    forward_half,
    gradient_half,
    local_cut,
    local_shape,
    radix,
)


def pick(
    array: np.ndarray, layout: Layout, mesh: tuple[int, ...], at: tuple[int, ...]
) -> np.ndarray:
    """The shard, by the definition: view as digits, take each cut digit's chunk."""
    for dim in range(array.ndim):
        digits = radix(array.shape[dim], dim, layout)
        view = array.reshape(*array.shape[:dim], *digits.sizes, *array.shape[dim + 1 :])
        for place, axis in enumerate(digits.axes):
            if axis is not None:
                start, stop = chunk(digits.sizes[place], mesh[axis], at[axis])
                view = np.take(view, range(start, stop), axis=dim + place)
        local = prod(digits.local_sizes(mesh, at))
        array = view.reshape(*array.shape[:dim], local, *array.shape[dim + 1 :])
    return array


@settings(deadline=None)  # the first example imports torch
@given(n=st.integers(0, 40), parts=st.integers(1, 9))
def test_chunks_are_those_of_torch(n: int, parts: int) -> None:
    import torch

    wanted = [len(c) for c in torch.arange(n).chunk(parts)] if n else []
    wanted += [0] * (parts - len(wanted))
    bounds = [chunk(n, parts, i) for i in range(parts)]
    assert [b - a for a, b in bounds] == wanted
    assert all(bounds[i][1] == bounds[i + 1][0] for i in range(parts - 1))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, tuple[int, ...]]:
    mesh = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.sampled_from([4, 6, 8, 12, 15, 24]), min_size=1, max_size=3)))
    states: list[R | P | Cut] = []
    for size in mesh:
        dim = draw(st.integers(0, len(shape) - 1))
        divisors = [d for d in range(1, shape[dim] + 1) if shape[dim] % d == 0]
        outer = draw(st.sampled_from(divisors))
        rest = shape[dim] // outer
        n = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        cut = canonical(Cut(dim, outer, n), size)
        state = draw(st.sampled_from([R, P, cut, cut]))
        states.append(state if n > 1 and compatible((*states, state)) else R)
    return shape, tuple(states), mesh


@given(layouts())
def test_shards_of_a_layout_partition_the_tensor(case) -> None:
    shape, layout, mesh = case
    whole = np.arange(prod(shape)).reshape(shape)
    seen = np.zeros(prod(shape), dtype=int)
    for at in coordinates(mesh):
        shard = pick(whole, layout, mesh, at)
        assert shard.shape == local_shape(shape, layout, mesh, at)
        seen[shard.ravel()] += 1
    replicas = prod(m for m, s in zip(mesh, layout, strict=True) if not isinstance(s, Cut))
    assert (seen == replicas).all()


@given(layouts())
def test_a_cut_can_be_applied_after_the_others(case) -> None:
    shape, layout, mesh = case
    whole = np.arange(prod(shape)).reshape(shape)
    for axis, state in enumerate(layout):
        if not isinstance(state, Cut):
            continue
        others = tuple(R if a == axis else s for a, s in enumerate(layout))
        for at in coordinates(mesh):
            rest = pick(whole, others, mesh, at)
            if 0 in rest.shape:
                continue
            cut = local_cut(state, shape, others, mesh, at)
            alone = tuple(cut if a == axis else R for a in range(len(mesh)))
            np.testing.assert_array_equal(
                pick(rest, alone, mesh, at), pick(whole, layout, mesh, at)
            )


def test_canonical_cut_has_one_form_for_every_divisible_n() -> None:
    assert canonical(Cut(0, 1, 128), 4) == canonical(Cut(0, 1, 4096), 4) == Cut(0, 1, 4)
    assert canonical(Cut(0, 1, 3), 2) == Cut(0, 1, 3)


@pytest.mark.parametrize(
    ("a", "b", "together"),
    [
        (Cut(0, 1, 4), Cut(0, 4, 2), True),
        (Cut(0, 4, 2), Cut(0, 1, 4), True),
        (Cut(0, 1, 4), Cut(0, 1, 4), False),
        (Cut(0, 1, 4), Cut(0, 2, 4), False),
    ],
)
def test_two_cuts_of_a_dim_stand_together_only_if_nested(a: Cut, b: Cut, together: bool) -> None:
    assert disjoint(a, b) is together
    assert compatible((a, b)) is together


def test_halves_of_a_pair() -> None:
    layout = (R, RP, P, Cut(0, 1, 2))
    assert forward_half(layout) == (R, R, P, Cut(0, 1, 2))
    assert gradient_half(layout) == (R, P, R, Cut(0, 1, 2))


@given(st.lists(st.integers(1, 4), min_size=0, max_size=4))
def test_ranks_and_coordinates_are_row_major(mesh: list[int]) -> None:
    assert [coordinate_of(r, tuple(mesh)) for r in range(prod(mesh))] == list(
        coordinates(tuple(mesh))
    )
