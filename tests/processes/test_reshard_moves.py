"""Every layout to every layout: values, gradients, bytes and order, on real ranks."""

from __future__ import annotations

import math

import pytest
import torch

from autoshard.runtime.processes import get_pool
from autoshard.runtime.shards import join_shards, take_shard
from autoshard.sharding.layout import (
    Layout,
    P,
    R,
    Shape,
    coordinates,
    forward_half,
    gradient_half,
)
from tests.processes import bodies

pytestmark = pytest.mark.multirank

CASES: list[tuple[Shape, Shape, int | None]] = [
    # mesh, shape, how many pairs of layouts; None: every move
    ((2, 2), (4, 2), None),
    ((2, 2), (5, 3), None),
    ((2, 3), (5, 3), None),
    ((2, 3), (6, 3), None),
    ((2, 2), (8, 12), 200),
    ((2, 2), (7, 6), 150),
    ((2, 3), (8, 12), 100),
    ((2, 3), (7, 6), 100),
    ((2, 1, 2), (4, 6), 80),
]


def assert_holds(
    parts: dict[tuple[int, ...], torch.Tensor],
    value: torch.Tensor,
    layout: Layout,
    mesh: Shape,
    name: str,
) -> None:
    """Every device holds its part of ``value``; summands add up to theirs."""
    partial = [axis for axis, state in enumerate(layout) if state is P]
    uncut = tuple(R if state is P else state for state in layout)
    sums: dict[tuple[int, ...], torch.Tensor] = {}
    for at, local in parts.items():
        place = tuple(0 if axis in partial else i for axis, i in enumerate(at))
        sums[place] = sums[place] + local if place in sums else local
    for place, local in sums.items():
        assert torch.equal(local, take_shard(value, uncut, mesh, place)), f"{name} at {place}"


@pytest.mark.parametrize(("mesh", "shape", "count"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_moves_give_every_device_its_part_of_value_and_gradients(
    mesh: Shape, shape: Shape, count: int | None
) -> None:
    todo = bodies.cases(shape, mesh, count=count, seed=1)
    pool = get_pool(math.prod(mesh))
    everywhere = pool.run(bodies.run_moves, todo)
    for number, case in enumerate(todo):
        places = list(coordinates(mesh))
        moved = {at: everywhere[rank][number] for rank, at in enumerate(places)}
        given = bodies.whole(shape, case.seed)
        cotangent = bodies.whole(shape, case.seed + 500)
        taken, produced = forward_half(case.taken), gradient_half(case.produced)
        assert_holds({at: m.value for at, m in moved.items()}, given, taken, mesh, case.name)
        assert_holds(
            {at: m.gradient for at, m in moved.items()}, cotangent, produced, mesh, case.name
        )
        assert_holds({at: m.second for at, m in moved.items()}, given, taken, mesh, case.name)
        assert len({m.order for m in moved.values()}) == 1, f"{case.name}: order differs"


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (12, 2), (3, 7)], ids=str)
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2)], ids=str)
def test_shards_join_to_the_whole(shape: Shape, mesh: Shape) -> None:
    whole = bodies.whole(shape, 3)
    for layout in bodies.layouts(shape, mesh):
        parts = {at: take_shard(whole, layout, mesh, at) for at in coordinates(mesh)}
        assert torch.equal(join_shards(parts, layout, shape, mesh), whole), layout
        arrays = {at: take_shard(whole.numpy(), layout, mesh, at) for at in parts}
        assert (join_shards(arrays, layout, shape, mesh) == whole.numpy()).all(), layout
