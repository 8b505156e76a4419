"""Calls that leave what the last one left, but for values; and those that suddenly do not."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard import DeviceMesh, PartitionSpec, spmd
from autoshard.runtime.processes import World, get_pool
from autoshard.runtime.spmd import ambient

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.filterwarnings("ignore::autoshard.runtime.spmd.SmallCutWarning"),
]

MESH = DeviceMesh(devices=[0, 1], axis_names=["data"])
ROWS = PartitionSpec("data")
CUTS = [None, {"0.weight": ROWS, "2.weight": PartitionSpec(None, "data")}]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), nn.Linear(2, 2)
    ).double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 2, (8,), generator=generator)


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = F.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss


def same(model: nn.Module, reference: nn.Module) -> None:
    pairs = zip(model.state_dict().items(), reference.state_dict().values(), strict=True)
    for (name, p), q in pairs:
        assert torch.allclose(p, q), name
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    assert [m.training for m in model.modules()] == [m.training for m in reference.modules()]


def habits(_: World) -> list[bool]:
    from autoshard.runtime.spmd import performer

    return [kept.habit is not None for kept in performer._kept.values()][-1:]


def ranks_have_a_habit() -> bool:
    pool = get_pool(2, threads=max(1, torch.get_num_threads() // 2))
    return pool.run(habits) == [[True], [True]]


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "cut"])
def test_steps_of_training_are_a_habit_and_those_of_one_device(cut: Any) -> None:
    model = net()
    reference = copy.deepcopy(model)
    called = spmd(mesh=MESH, in_shardings=[ROWS, ROWS], parameter_shardings=cut)(step)
    for seed in range(6):
        torch.testing.assert_close(called(model, *batch(seed)), step(reference, *batch(seed)))
        same(model, reference)
    assert ranks_have_a_habit()
    assert called._standing is not None
    assert called._standing.homecoming is not None


def flagged(model: Any, x: torch.Tensor, y: torch.Tensor, flag: torch.Tensor) -> Any:
    """A step; where the flag is set, something is different this time."""
    loss: Any = step(model, x, y)
    what = int(flag.item())
    if what == 1:
        return loss * torch.ones(3, dtype=loss.dtype)
    if what == 2:
        model.eval()
    if what == 3:
        model(x).sum().backward()  # leaves gradients
    if what == 4:
        return loss + torch.rand((), dtype=loss.dtype)
    if what == 5:
        x.mul_(2)
    if what == 6:
        return loss, {"more": loss * 2}
    if what == 7:
        model[3].weight.data.mul_(2)
    if what == 8:
        model[3].weight = nn.Parameter(model[3].weight.detach() * 3)
    if what == 9:
        return float(loss.item())
    if what == 10:
        model[0].bias.requires_grad_(False)
    if what == 11:
        return None
    if what == 12:
        model.register_buffer("more", torch.ones(2))
    return loss


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "cut"])
@pytest.mark.parametrize("what", range(1, 13))
def test_a_call_that_suddenly_does_more_is_that_of_one_device(what: int, cut: Any) -> None:
    model = net()
    reference = copy.deepcopy(model)
    cuts = [ROWS, ROWS, None]
    called = spmd(mesh=MESH, in_shardings=cuts, parameter_shardings=cut)(flagged)
    flags = [0, 0, 0, 0, what, 0, 0, what, what, 0]
    results = []
    for function, net_ in ((flagged, reference), (called, model)):
        torch.manual_seed(3)
        found = []
        for seed, flag in enumerate(flags):
            x, y = batch(seed)
            found.append((function(net_, x, y, torch.tensor(flag)), x))
        results.append(found)
    for (a, x), (b, z) in zip(*results, strict=True):
        torch.testing.assert_close(b, a)
        assert torch.equal(x, z)
    same(model, reference)


def look(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()  # type: ignore[no-any-return]


def scaled(model: Any, x: torch.Tensor) -> torch.Tensor:
    model[2].weight.data.mul_(1.5)  # which leaves no mark on the parameter
    with torch.no_grad():
        model[3].bias.add_(0)
    return model(x).sum()  # type: ignore[no-any-return]


def test_what_a_body_did_not_write_is_not_written() -> None:
    """A graph of the caller's that has saved the parameters stays good."""
    model = net().eval()
    called = spmd(mesh=MESH, in_shardings=[None, ROWS])(look)
    x, _ = batch(0)
    for _ in range(5):
        out = model(x).square().sum()
        before = [p._version for p in model.parameters()]
        torch.testing.assert_close(called(model, x), look(model, x))
        assert [p._version for p in model.parameters()] == before
        out.backward()
        model.zero_grad()
    assert ranks_have_a_habit()


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "cut"])
def test_what_was_written_without_a_mark_comes_home(cut: Any) -> None:
    model = net().eval()
    reference = copy.deepcopy(model)
    called = spmd(mesh=MESH, in_shardings=[None, ROWS], parameter_shardings=cut)(scaled)
    x, _ = batch(0)
    for _ in range(5):
        torch.testing.assert_close(called(model, x), scaled(reference, x))
        same(model, reference)
    assert ranks_have_a_habit()


def pair_of(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = model(x)
    return out.sum(), {"out": out}


def test_results_of_earlier_calls_stay() -> None:
    model = net().eval()
    called = spmd(mesh=MESH, in_shardings=[None, ROWS])(pair_of)
    found = [called(model, batch(seed)[0]) for seed in range(5)]
    for seed, (total, table) in enumerate(found):
        expected = pair_of(model, batch(seed)[0])
        torch.testing.assert_close(total, expected[0])
        torch.testing.assert_close(table, expected[1])
        table.clear()
    assert ranks_have_a_habit()


def pid_of(world: World) -> int:
    return os.getpid()


def test_a_rank_that_was_killed_in_between_is_replaced() -> None:
    model = net()
    reference = copy.deepcopy(model)
    called = spmd(mesh=MESH, in_shardings=[ROWS, ROWS])(step)
    pool = get_pool(2, threads=max(1, torch.get_num_threads() // 2))
    for seed in range(8):
        if seed in (4, 6):
            process = psutil.Process(pool.run(pid_of)[seed == 4])
            process.kill()
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.001)
        torch.testing.assert_close(called(model, *batch(seed)), step(reference, *batch(seed)))
    same(model, reference)


def failing(model: nn.Module, x: torch.Tensor, y: torch.Tensor, fail: torch.Tensor) -> torch.Tensor:
    loss = step(model, x, y)
    if fail.item():
        raise ValueError("midway")
    return loss


def test_a_call_that_fails_leaves_all_as_it_was() -> None:
    model = net()
    reference = copy.deepcopy(model)
    called = spmd(mesh=MESH, in_shardings=[ROWS, ROWS, None])(failing)
    no, yes = torch.tensor(0), torch.tensor(1)
    for seed in range(5):
        called(model, *batch(seed), no)
        step(reference, *batch(seed))
    with pytest.raises(Exception, match="midway"):
        called(model, *batch(7), yes)
    same(model, reference)
    for seed in range(4):
        torch.testing.assert_close(called(model, *batch(seed), no), step(reference, *batch(seed)))
    same(model, reference)


def test_a_function_that_was_called_may_be_a_part_of_another() -> None:
    model = net().eval()
    inner = spmd(mesh=MESH, in_shardings=[None, ROWS])(look)
    outer = spmd(mesh=MESH, in_shardings=[ROWS])(lambda x: inner.function(model, x) * 2)
    x, _ = batch(0)
    for _ in range(4):
        torch.testing.assert_close(inner(model, x), look(model, x).detach())
        torch.testing.assert_close(outer(x), look(model, x).detach() * 2)


DRAWS: list[Callable[[], object]] = [
    lambda: random.seed(3),
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.gauss(0, 1),
    lambda: random.setstate(random.Random(4).getstate()),
    lambda: random.shuffle([1, 2, 3]),
]


def test_the_state_of_pythons_generator_is_read_anew() -> None:
    before = random.getstate()
    try:
        for draw in DRAWS:
            draw()
            for _ in range(2):
                assert ambient.generators()[2] == random.getstate()
    finally:
        random.setstate(before)
