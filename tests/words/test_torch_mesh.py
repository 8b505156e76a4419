from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.errors import SpecError
from autoshard.sharding.layout import Cut, Layout, R
from autoshard.sharding.layout import P as PARTIAL
from autoshard.sharding.mesh import DeviceMesh
from autoshard.sharding.spec import P, ShardingSpec
from autoshard.torch_mesh import (
    from_placements,
    from_torch_mesh,
    layout_of,
    placements_of,
    spec_of,
    to_placements,
    to_torch_mesh,
)

MESH = DeviceMesh([[0, 1], [2, 3]], ["data", "model"])


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
def test_mesh_goes_to_torch_and_back() -> None:
    for mesh in (MESH, DeviceMesh([[3, 1], [0, 2]], ["a", "b"]), DeviceMesh([0, 1, 2, 3], ["x"])):
        there = to_torch_mesh(mesh)
        assert there.mesh_dim_names == mesh.axis_names
        assert there.mesh.tolist() == mesh.devices
        assert from_torch_mesh(there) == mesh
        assert tuple(there.get_coordinate() or ()) == mesh.coordinate(2)


@pytest.mark.usefixtures("fake_group")
def test_dtensor_of_a_spec_holds_the_shard_that_the_spec_names() -> None:
    spec = ShardingSpec(MESH, P(("model", "data"), None))
    whole = torch.arange(24.0).reshape(8, 3)
    placements = to_placements(spec, whole.shape)
    assert placements == (_StridedShard(0, split_factor=2), Shard(0))
    local = apply(whole, placements, MESH.shape, MESH.coordinate(2))
    tensor = DTensor.from_local(
        local, to_torch_mesh(MESH), placements, run_check=False, shape=whole.shape, stride=(3, 1)
    )
    assert spec_of(tensor) == ShardingSpec(MESH, P(("model", "data")))
    assert torch.equal(local, whole[spec.shard_slices((8, 3), 2)])


@pytest.mark.usefixtures("fake_group")
def test_placements_of_fsdp_over_tensor_parallel_are_read() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = to_torch_mesh(MESH)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False))
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    assert spec_of(weight) == ShardingSpec(MESH, P(("model", "data")))


def apply(
    tensor: torch.Tensor,
    placements: tuple[Placement, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> torch.Tensor:
    """The shard by torch's own account, one placement after the other."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard):
            parts: Any = placement._split_tensor(tensor, mesh[axis], with_padding=False)
            tensor = parts[0][coordinate[axis]]
    return tensor


CASES: list[tuple[tuple[int, ...], tuple[int, ...], Layout, tuple[Placement, ...]]] = [
    ((4, 2), (2, 2), (R, R), (Replicate(), Replicate())),
    ((4, 2), (2, 2), (Cut(0, 1, 2), PARTIAL), (Shard(0), Partial())),
    ((8,), (2, 2), (Cut(0, 1, 2), Cut(0, 2, 2)), (Shard(0), Shard(0))),
    ((8,), (2, 2), (Cut(0, 2, 2), Cut(0, 1, 2)), (_StridedShard(0, split_factor=2), Shard(0))),
    ((7,), (2, 2), (R, Cut(0, 1, 7)), (Replicate(), Shard(0))),
    ((10,), (2, 2), (Cut(0, 1, 2), Cut(0, 2, 5)), (Shard(0), Shard(0))),
    ((10,), (2, 2), (Cut(0, 2, 5), Cut(0, 1, 2)), (_StridedShard(0, split_factor=2), Shard(0))),
    ((24,), (2, 2), (R, Cut(0, 3, 2)), (Replicate(), _StridedShard(0, split_factor=3))),
    (
        (24,),
        (2, 2),
        (Cut(0, 1, 2), Cut(0, 6, 2)),
        (Shard(0), _StridedShard(0, split_factor=3)),
    ),
    (
        (5, 24),
        (2, 4),
        (Cut(1, 12, 2), Cut(1, 3, 4)),
        (_StridedShard(1, split_factor=12), _StridedShard(1, split_factor=3)),
    ),
]


@pytest.mark.parametrize(("shape", "mesh", "layout", "placements"), CASES)
def test_layout_and_placements_say_the_same(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    layout: Layout,
    placements: tuple[Placement, ...],
) -> None:
    assert placements_of(layout, mesh, shape) == placements
    assert layout_of(placements, mesh, shape) == layout
    check_shards(shape, mesh, layout, placements)


def check_shards(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    layout: Layout,
    placements: tuple[Placement, ...],
) -> None:
    words = DeviceMesh.of(**{f"a{i}": s for i, s in enumerate(mesh)})
    spec = ShardingSpec.from_layout(words, layout, shape)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for rank in words.ranks:
        held = whole
        for dim, indices in enumerate(spec.shard_indices(shape, rank)):
            held = held.index_select(dim, torch.tensor(indices, dtype=torch.int))
        assert torch.equal(held, apply(whole, placements, mesh, words.coordinate(rank)))


@settings(deadline=None)
@given(
    size=st.sampled_from([4, 5, 6, 8, 12, 16, 24]),
    mesh=st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(1, 2)),
    factors=st.tuples(*[st.sampled_from([0, 1, 1, 2, 3, 4])] * 3),
)
def test_any_placements_are_read_rightly_or_refused(
    size: int, mesh: tuple[int, ...], factors: tuple[int, ...]
) -> None:
    placements = tuple(
        Replicate() if f == 0 else Shard(0) if f == 1 else _StridedShard(0, split_factor=f)
        for f in factors
    )
    try:
        layout = layout_of(placements, mesh, (size,))
    except SpecError:
        return
    check_shards((size,), mesh, layout, placements)
    check_shards((size,), mesh, layout, placements_of(layout, mesh, (size,)))


def test_spec_goes_to_placements_and_back() -> None:
    for entries in ((), ("data",), (None, "model"), (("data", "model"),), (("model", "data"),)):
        spec = ShardingSpec(MESH, P(*entries))
        assert from_placements(MESH, to_placements(spec, (8, 4)), (8, 4)) == spec
    spec = ShardingSpec(MESH, P("data"), partial=("model",))
    assert from_placements(MESH, to_placements(spec, (8, 4)), (8, 4)) == spec


ERRORS = {
    "average": (
        lambda: layout_of((Partial("avg"),), (2,), (4,)),
        "Partial(avg) on axis 0; autoshard's partial values are sums: redistribute it first",
    ),
    "uneven inside uneven": (
        lambda: layout_of((Shard(0), Shard(0)), (2, 2), (7,)),
        "axis 1 (size 2) cuts dim 0 (size 7) inside what the axes before it have left, which "
        "autoshard does not have; choose sizes so that only the last axis of a dim cuts it "
        "unevenly",
    ),
    "uneven in units": (
        lambda: placements_of((Cut(0, 1, 3),), (2,), (12,)),
        "dim 0 (size 12) is cut in 1 x 3 units of 4 elements, unevenly over an axis of size 2; "
        "DTensor cuts single elements only: choose an axis size that divides 3",
    ),
    "count": (
        lambda: layout_of((Shard(0),), (2, 2), (7,)),
        "1 placements for a mesh of 2 axes; give one an axis",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_says_what_where_and_what_to_do(case: str) -> None:
    make, message = ERRORS[case]
    with pytest.raises(SpecError) as caught:
        make()  # type: ignore[no-untyped-call]
    assert str(caught.value) == message
