"""Collectives over mesh axes, on real ranks and in a dry run."""

from __future__ import annotations

import pytest
import torch

from autoshard.errors import MeshError, RankError, RequestError
from autoshard.runtime.comm import Communicator, Recorder, dry_run
from autoshard.runtime.processes import get_pool
from autoshard.sharding.collective import CollectiveOp
from tests.processes import bodies

OPS: list[tuple[CollectiveOp, tuple[int, ...], tuple[int, ...], int]] = [
    # op, shape in, shape out, bytes counted; a group of 32 ranks
    ("all_reduce", (64, 2), (64, 2), 512),
    ("all_gather", (64, 2), (32, 64, 2), 32 * 512),
    ("reduce_scatter", (32, 4), (4,), 512),
    ("all_to_all", (32, 4), (32, 4), 512),
]


@pytest.mark.multirank
def test_collectives_reach_the_ranks_of_their_axes() -> None:
    by_rank = get_pool(4).run(bodies.run_collectives)
    for rank, got in enumerate(by_rank):
        row, column = divmod(rank, 2)
        tables = [torch.arange(8.0).view(4, 2) + 100 * r for r in range(4)]
        tensors = {k: v for k, v in got.items() if isinstance(v, torch.Tensor)}
        assert tensors["maximum"].tolist() == [3.0, 1.0]
        assert tensors["row"][:, 0].tolist() == [2.0 * row, 2.0 * row + 1]
        assert tensors["every"].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
        assert torch.equal(tensors["scattered"], sum(tables)[rank])  # type: ignore[index]
        pair = [tables[column].view(2, 4), tables[2 + column].view(2, 4)]
        assert torch.equal(tensors["exchanged"], torch.stack([t[row] for t in pair]))
        assert tensors["complex"].tolist() == [2 + 2j]
        assert tensors["late"].tolist() == [4.0 * row + 1, 2.0]
        assert tensors["flags"].flatten().tolist() == [True, False, True, False]
        assert got["empty"] == (2, 0, 3)
        assert got["records"] == [
            ("all_reduce", ("data",), 8, "z"),
            ("all_reduce", ("model",), 8, "late"),
            ("all_gather", ("data", "model"), 4, ""),
            ("all_gather", ("data",), 0, ""),
        ]


@pytest.mark.multirank
def test_meshes_share_groups_and_an_axis_of_one_has_none() -> None:
    assert get_pool(4).run(bodies.meshes_share_groups) == [True] * 4


@pytest.mark.multirank
def test_mesh_of_another_size_than_the_world_names_both() -> None:
    with pytest.raises(RankError, match="a mesh of 2 x 3 has 6 devices, and 4 processes run") as e:
        get_pool(4).run(bodies.build_mesh, (2, 3))
    assert isinstance(e.value.__cause__, MeshError)


@pytest.mark.parametrize(("op", "given", "taken", "num_bytes"), OPS)
@pytest.mark.parametrize("rank", [0, 16_383])
def test_dry_run_of_a_large_world_records_what_would_be_sent(
    rank: int,
    op: CollectiveOp,
    given: tuple[int, ...],
    taken: tuple[int, ...],
    num_bytes: int,
) -> None:
    recorder = Recorder()
    with dry_run(16_384, rank):
        comm = Communicator((8, 64, 32), ("pipeline", "data", "model"), recorder)
        result = comm.start(op, torch.zeros(given), (2,), phase="backward", value="x").wait()
        assert comm.ranks((2,)) == tuple(range(rank // 32 * 32, rank // 32 * 32 + 32))
        assert len(comm.ranks((0, 2))) == 256
        assert comm.size((1, 2)) == 2048
    assert tuple(result.shape) == taken
    (record,) = recorder.collectives
    assert str(record) == f"{op} {num_bytes:,} bytes over model (backward, x)"


def test_dry_runs_follow_one_another() -> None:
    for size in (4, 6):
        with dry_run(size, rank=1):
            comm = Communicator((2, size // 2), ("a", "b"))
            assert comm.all_gather(torch.zeros(3), (1,)).shape == (size // 2, 3)
            assert comm.all_reduce(torch.zeros(3), "sum", (0,)).shape == (3,)


def test_groups_outside_a_world_are_refused() -> None:
    with pytest.raises(RequestError, match="needs a process group"):
        Communicator((1,), ("a",))


def test_axes_out_of_order_are_refused() -> None:
    with (
        dry_run(4),
        pytest.raises(MeshError, match="not ascending"),
    ):
        Communicator((2, 2), ("a", "b")).group((1, 0))
