"""Calls that ranks got ready for while the caller read the last answer: equal to one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard import DeviceMesh, PartitionSpec, profiler, spmd
from autoshard.runtime.processes import World, get_pool

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.filterwarnings("ignore::autoshard.runtime.spmd.SmallCutWarning"),
]

MESH = DeviceMesh(devices=[0, 1], axis_names=["data"])
ROWS = PartitionSpec("data")


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = F.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss


def tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    ).double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 5, (4,), generator=generator)


def same(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(
        model.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        assert torch.allclose(p, q), name


def ready(_: World) -> bool:
    from autoshard.runtime.spmd import performer

    return performer._ready is not None


def test_ranks_get_ready_for_a_call_like_the_last_one() -> None:
    model = tower()
    reference = copy.deepcopy(model)
    sharded = spmd(mesh=MESH, in_shardings=[ROWS, ROWS])(step)
    for seed in range(4):
        expected = step(reference, *batch(seed))
        assert torch.allclose(sharded(model, *batch(seed)), expected)
        same(model, reference)
    pool = get_pool(2, threads=max(1, torch.get_num_threads() // 2))
    assert pool.run(ready) == [True, True]


def entered(_: World) -> tuple[bool, int]:
    from autoshard.runtime.spmd import performer

    held = list(performer._kept.values())[-1].held
    assert held is not None
    is_ready = performer._ready is not None and performer._ready.entry is held.entry
    return is_ready, held.misses


def frozen_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Freezes what is not frozen when the call begins."""
    model.get_parameter("3.bias").requires_grad_(False)
    return step(model, x, y)


def replacing_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Other memory, and a part of the parameters only."""
    bias = model.get_parameter("3.bias")
    bias.data = bias.data + 1
    optimizer = torch.optim.SGD([bias], lr=0.1)
    loss = F.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    model.zero_grad()
    return loss


def writing_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Into its arguments."""
    x.mul_(2)
    y.clamp_(max=3)
    return step(model, x, y)


def keeping_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Keeps an argument where nobody looks, and uses it in the next call."""
    import sys

    row = sys.__dict__.setdefault("_kept_by_a_test", [])
    before = x if not row else row.pop()
    row.append(x)
    return step(model, (x + before) / 2, y)


@pytest.mark.parametrize(
    ("body", "stays"),
    [
        (step, True),
        (writing_step, True),
        (keeping_step, True),
        (frozen_step, False),
        (replacing_step, False),
    ],
)
def test_objects_stay_entered_where_only_values_were_written(
    body: Callable[..., torch.Tensor], stays: bool
) -> None:
    model = tower()
    reference = copy.deepcopy(model)
    sharded = spmd(mesh=MESH, in_shardings=[ROWS, ROWS])(body)
    for seed in range(6):
        given, expected = batch(seed), batch(seed)
        assert torch.allclose(sharded(model, *given), body(reference, *expected))
        assert torch.equal(given[0], expected[0])
        assert torch.equal(given[1], expected[1])
        same(model, reference)
    pool = get_pool(2, threads=max(1, torch.get_num_threads() // 2))
    for is_ready, misses in pool.run(entered):
        assert (is_ready and misses == 0) is stays


def test_a_function_without_tensors() -> None:
    sharded = spmd(mesh=MESH)(lambda number: number + 1)
    assert [sharded(1) for _ in range(4)] == [2] * 4


@pytest.mark.parametrize("cut", [None, {"0.weight": PartitionSpec("data"), "3.weight": ROWS}])
def test_functions_may_take_turns(cut: Any) -> None:
    model = tower()
    reference = copy.deepcopy(model)
    sharded = spmd(mesh=MESH, in_shardings=[ROWS, ROWS], parameter_shardings=cut)(step)
    look = spmd(mesh=MESH, in_shardings=[ROWS])(lambda m, x: m(x).sum())
    for seed in range(3):
        x, y = batch(seed)
        assert torch.allclose(look(model, x), reference(x).sum())
        assert torch.allclose(sharded(model, x, y), step(reference, x, y))
        assert torch.allclose(sharded(model, x, y), step(reference, x, y))
        same(model, reference)


def _disturb(_: World) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    torch.set_grad_enabled(False)


def test_other_work_of_the_ranks_in_between_is_without_effect() -> None:
    model = tower()
    reference = copy.deepcopy(model)
    sharded = spmd(mesh=MESH, in_shardings=[ROWS, ROWS])(step)
    pool = get_pool(2, threads=max(1, torch.get_num_threads() // 2))
    for seed in range(4):
        assert torch.allclose(sharded(model, *batch(seed)), step(reference, *batch(seed)))
        pool.run(_disturb)
    same(model, reference)


def noise(x: torch.Tensor) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    return x + torch.rand(x.shape, dtype=x.dtype), np.random.standard_normal(3)


def test_generators_go_on_from_call_to_call() -> None:
    sharded = spmd(mesh=MESH, in_shardings=[ROWS])(noise)
    x = torch.zeros(4, dtype=torch.float64)
    torch.manual_seed(1)
    np.random.seed(1)
    expected = [noise(x) for _ in range(3)]
    np.random.seed(1)
    torch.manual_seed(1)
    for tensor, array in expected:
        found = sharded(x)
        assert torch.equal(found[0], tensor)
        assert np.array_equal(found[1], array)


def tied_step(
    one: nn.Module, two: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    loss: torch.Tensor = (two(one(x)).square()).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_two_modules_may_share_a_parameter() -> None:
    torch.manual_seed(0)
    one, two = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    two.weight = one.weight
    optimizer = torch.optim.Adam([*one.parameters(), two.bias], lr=0.1)
    reference = copy.deepcopy((one, two, optimizer))
    sharded = spmd(mesh=MESH, in_shardings={"x": ROWS})(tied_step)
    for seed in range(4):
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        expected = tied_step(reference[0], reference[1], x, reference[2])
        assert torch.allclose(sharded(one, two, x, optimizer), expected)
        if seed == 2:  # no longer
            for pair in ((one, two), reference[:2]):
                pair[1].weight = nn.Parameter(pair[1].weight.detach().clone())
    assert two.weight is not one.weight
    same(one, reference[0])
    same(two, reference[1])


def failing_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, fail: bool) -> torch.Tensor:
    loss = step(model, x, y)
    if fail:
        raise ValueError("midway")
    return loss


def test_a_call_that_raises_leaves_all_as_it_was() -> None:
    model = tower()
    reference = copy.deepcopy(model)
    sharded = spmd(mesh=MESH, in_shardings=[ROWS, ROWS])(failing_step)
    for seed in range(2):
        sharded(model, *batch(seed), False)
        step(reference, *batch(seed))
    with pytest.raises(Exception, match="midway"):
        sharded(model, *batch(7), True)
    same(model, reference)
    for seed in range(2):
        assert torch.allclose(sharded(model, *batch(seed), False), step(reference, *batch(seed)))
    same(model, reference)


def counted(x: torch.Tensor, y: torch.Tensor, ignored: int) -> torch.Tensor:
    return F.cross_entropy(x, y, ignore_index=ignored)


def written(x: torch.Tensor, y: torch.Tensor, ignored: int) -> torch.Tensor:
    y[:] = torch.where(y == 0, torch.full_like(y, ignored), y)
    return F.cross_entropy(x, y, ignore_index=ignored)


@pytest.mark.parametrize(("body", "messages"), [(counted, 1), (written, 2)])
def test_targets_that_are_an_input_are_counted_without_a_message(
    body: Callable[..., torch.Tensor], messages: int
) -> None:
    sharded = spmd(mesh=MESH, in_shardings=[ROWS, ROWS], out_sharding=PartitionSpec())(body)
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for row in ([0, 1, 2, 3, 3, 1], [3, 3, 3, 3, 3, 1], [0, 0, 1, 0, 0, 0]):
        expected = body(x, torch.tensor(row), 3)
        with profiler() as prof:
            found = sharded(x, torch.tensor(row), 3)
        assert torch.allclose(found, expected)
        assert sum(c.op == "all_reduce" for c in prof.collectives) == messages
