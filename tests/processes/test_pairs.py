"""Sums of two local processes over a socket: values, orders, and ends that go missing."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from autoshard.errors import RankError
from autoshard.runtime.comm import Communicator
from autoshard.runtime.pairs import MOST_BYTES, Pair
from autoshard.runtime.processes import Pool, World, get_pool

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
]


@pytest.fixture
def ends() -> Iterator[tuple[Pair, Pair]]:
    one, other = socket.socketpair()
    pairs = Pair(one, 1, 1.0), Pair(other, 0, 1.0)
    yield pairs
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_both_ends_get_the_same(
    ends: tuple[Pair, Pair], dtype: torch.dtype, reduction: str
) -> None:
    one, other = ends
    a, b = torch.arange(1, 8).to(dtype), torch.tensor([5, 1, 9, 0, 2, 7, 3]).to(dtype)
    combine: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
    }
    expected = combine[reduction](a, b)
    exchanges = [one.start(a, a, reduction), other.start(b, b, reduction)]
    for exchange in exchanges:
        exchange.wait()
        exchange.wait()  # a second time: nothing
    assert torch.equal(a, expected)
    assert torch.equal(b, expected)


def test_many_may_be_under_way_and_waited_for_in_any_order(ends: tuple[Pair, Pair]) -> None:
    """Together they are more than the socket holds."""
    count, length = 24, MOST_BYTES // 4
    buffers = [[torch.full((length,), float(n + end)) for n in range(count)] for end in (0, 1)]

    def run(end: int) -> None:
        started = [ends[end].start(buffer, buffer, "sum") for buffer in buffers[end]]
        for number in range(count - 1, -1, -1) if end else range(count):
            started[number].wait()

    threads = [threading.Thread(target=run, args=(end,)) for end in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for end in (0, 1):
        for number, buffer in enumerate(buffers[end]):
            assert bool((buffer == 2.0 * number + 1).all())


def test_another_size_is_told(ends: tuple[Pair, Pair]) -> None:
    one, other = ends
    exchange = one.start(torch.ones(3), torch.ones(3), "sum")
    other.start(torch.ones(2), torch.ones(2), "sum")
    with pytest.raises(RuntimeError, match="exchanges 12 bytes with rank 1, which gave 8"):
        exchange.wait()


def test_a_silent_end_is_not_waited_for_for_ever(ends: tuple[Pair, Pair]) -> None:
    with pytest.raises(RuntimeError, match="timed out waiting 1 s for rank 1"):
        ends[0].start(torch.ones(3), torch.ones(3), "sum").wait()


def test_an_end_that_is_gone_is_named(ends: tuple[Pair, Pair]) -> None:
    one, other = ends
    exchange = one.start(torch.ones(3), torch.ones(3), "sum")
    other.close()
    with pytest.raises(RuntimeError, match="connection closed by peer: rank 1"):
        exchange.wait()


# ---- between ranks ----


def sums(world: World) -> list[float]:
    comm = Communicator((2,), ("data",))
    large = torch.full((MOST_BYTES // 4 + 1,), 1.0 + world.rank)
    small = large[:5].clone()
    assert comm._pairs[0,] is not None
    assert Communicator((2,), ("other",))._pairs[0,] is comm._pairs[0,]
    return [comm.all_reduce(t, "sum", (0,))[-1].item() for t in (small, large)]


def moves(world: World, length: int) -> list[bool]:
    """Whether each collective gave what it should; row i of rank r is 10 r + i."""
    comm, r = Communicator((2,), ("data",)), world.rank
    rows = torch.stack([torch.full((length,), 10.0 * r + i) for i in range(2)])
    own = rows[0].clone().requires_grad_()
    gathered = comm.all_gather(own, (0,))
    scattered = comm.reduce_scatter(rows, (0,))
    crossed = comm.all_to_all(rows, (0,))
    flags = comm.all_gather(torch.tensor([r == 1]), (0,))
    return [
        bool((gathered == torch.tensor([[0.0], [10.0]])).all()) and not gathered.requires_grad,
        bool((scattered == 10.0 + 2 * r).all()),
        bool((crossed == torch.tensor([[0.0 + r], [10.0 + r]])).all()),
        flags.tolist() == [[False], [True]],
        bool((rows == 10.0 * r + torch.arange(2.0)[:, None]).all()),
    ]


def on_a_plane(world: World) -> list[float]:
    comm = Communicator((2, 2), ("data", "model"))
    found = []
    for axes in ((0,), (1,), (0, 1)):
        one = torch.tensor([10.0**world.rank])
        found.append(comm.all_reduce(one, "sum", axes).item())
    return found


def kill_one(world: World) -> float:
    comm = Communicator((2,), ("data",))
    comm.all_reduce(torch.ones(2), "sum", (0,))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return comm.all_reduce(torch.ones(2), "sum", (0,)).sum().item()


def leave_one(world: World) -> None:
    comm = Communicator((2,), ("data",))
    if world.rank == 0:
        comm.all_reduce(torch.ones(2), "sum", (0,))
    else:
        threading.Event().wait()


@pytest.mark.multirank
def test_ranks_of_a_pool_sum_small_and_large_buffers() -> None:
    assert get_pool(2).run(sums) == [[3.0, 3.0]] * 2


@pytest.mark.multirank
@pytest.mark.parametrize("length", [3, 3 * MOST_BYTES])
def test_ranks_of_a_pool_move_what_every_collective_moves(length: int) -> None:
    assert get_pool(2).run(moves, length) == [[True] * 5] * 2


@pytest.mark.multirank
def test_each_axis_of_two_has_its_pairs() -> None:
    assert get_pool(4).run(on_a_plane) == [
        [101.0, 11.0, 1111.0],
        [1010.0, 11.0, 1111.0],
        [101.0, 1100.0, 1111.0],
        [1010.0, 1100.0, 1111.0],
    ]


@pytest.mark.multirank
def test_a_rank_that_dies_is_named_and_the_next_call_works() -> None:
    with Pool(2, timeout_s=60) as pool:
        with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
            pool.run(kill_one)
        assert pool.run(sums) == [[3.0, 3.0]] * 2


@pytest.mark.multirank
def test_a_rank_that_waits_for_another_is_not_the_culprit() -> None:
    with Pool(2, timeout_s=60) as pool:
        pool.run(sums)
        with pytest.raises(RankError, match="all but rank 1 wait in a collective") as caught:
            pool.call(leave_one, timeout_s=1)
        assert caught.value.rank == 1
