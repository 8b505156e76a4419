"""Gradients: fused, sent while backward runs, accumulated without messages, sent as rows."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.runtime.eager import EagerOptions, no_sync
from autoshard.sharding.mesh import DeviceMesh
from tests.eager.world import BodyError, check, layout, run

pytestmark = pytest.mark.multirank

DATA = DeviceMesh([0, 1, 2, 3], ["data"])


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x)


def square(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss


def test_many_gradients_are_few_messages_sent_before_backward_ends() -> None:
    cuts = [layout((8, 256), "data", mesh=DATA)]
    collectives = check(square, Stack(50, 256), torch.randn(8, 256), cuts=cuts, mesh=DATA)
    backward = [c for c in collectives if c.phase == "backward"]
    assert len(backward) == 2
    assert sum(c.num_bytes for c in backward) == 50 * (256 * 256 + 256) * 8


def test_gradients_that_start_longer_than_they_travel_are_one_message() -> None:
    cuts = [layout((8, 8), "data", mesh=DATA)]
    collectives = check(square, Stack(50, 8), torch.randn(8, 8), cuts=cuts, mesh=DATA)
    backward = [c for c in collectives if c.phase == "backward"]
    assert [c.num_bytes for c in backward] == [50 * (64 + 8) * 8]


def test_buckets_have_the_size_that_is_asked_for() -> None:
    options = EagerOptions(bucket_bytes=10 * 72 * 8)
    cuts = [layout((8, 8), "data", mesh=DATA)]
    collectives = check(
        square, Stack(50, 8), torch.randn(8, 8), cuts=cuts, mesh=DATA, options=options
    )
    sizes = [c.num_bytes for c in collectives if c.phase == "backward"]
    assert len(sizes) == 5
    assert max(sizes) <= 11 * 72 * 8


def accumulating(model, x):
    with no_sync():
        for _ in range(3):
            square(model, x)
    return square(model, x)


def test_no_message_between_accumulated_backwards() -> None:
    cuts = [layout((8, 8), "data", mesh=DATA)]
    collectives = check(accumulating, Stack(5, 8), torch.randn(8, 8), cuts=cuts, mesh=DATA)
    backward = [c for c in collectives if c.phase == "backward"]
    assert sum(c.num_bytes for c in backward) == 5 * 72 * 8


def test_nothing_is_reduced_where_the_input_is_whole() -> None:
    assert check(square, Stack(3, 8), torch.randn(8, 8)) == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.Linear(8, 64)
        self.down = nn.Linear(64, 4)

    def forward(self, x):
        x = self.norm(self.first(x)).mean((2, 3))
        return self.down(torch.relu(self.up(x)) * self.up.bias)


@pytest.mark.parametrize(
    "cut",
    [None, ("up.weight", "model"), ("down.weight", None, "model"), ("up.bias", "model")],
    ids=["nothing", "rows", "columns", "bias"],
)
def test_gradients_are_summed_over_the_axes_that_cut_their_data(cut) -> None:
    """Over ``data`` alone, though parameters of one layer are cut over ``model``."""
    x = torch.randn(64, 3, 32, 32)  # large enough to stay cut

    def parameters(name: str, p: torch.Tensor):
        return layout(p.shape, *cut[1:]) if cut and name == cut[0] else None

    collectives = check(
        square, Block(), x, cuts=[layout(x.shape, "data")], parameters=parameters, tolerance=1e-8
    )
    backward = [c for c in collectives if c.phase == "backward" and "gradient" in c.value]
    assert {c.axes for c in backward if c.num_bytes > 64 * 8} == {("data",)}, backward


def too_early(model, x):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with no_sync():
        square(model, x)
    optimizer.step()


def test_step_with_parts_is_refused() -> None:
    with pytest.raises(BodyError, match="leave no_sync"):
        run(too_early, Stack(2, 8), torch.randn(8, 8), cuts=[layout((8, 8), "data")])


# ---- rows -----------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self, rows: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.tied = tied

    def forward(self, ids):
        x = self.embed(ids)
        return F.linear(x, self.embed.weight).mean() if self.tied else x.tanh().sum()


def looking_up(model, ids):
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def _sent(rows: int, ids: torch.Tensor, **table: bool) -> list[tuple[str, int]]:
    cuts = [layout(tuple(ids.shape), "data", mesh=DATA)]
    found = check(looking_up, Table(rows, **table), ids, cuts=cuts, mesh=DATA)
    return [(c.op, c.num_bytes) for c in found if c.phase == "backward"]


def test_few_rows_of_a_large_table_travel_as_rows() -> None:
    sent = _sent(100_000, torch.randint(0, 100_000, (64,)))
    assert {op for op, _ in sent} == {"all_gather"}
    assert sum(n for _, n in sent) < 0.02 * 2 * 100_000 * 4 * 8


def test_rows_that_occur_often_are_counted_once() -> None:
    assert {op for op, _ in _sent(1000, torch.randint(0, 7, (8, 6)))} == {"all_gather"}


@pytest.mark.parametrize(
    ("rows", "table"), [(40, {}), (1000, {"tied": True})], ids=["most rows", "tied"]
)
def test_dense_gradient_travels_dense(rows: int, table: dict[str, bool]) -> None:
    sent = _sent(rows, torch.randint(0, rows, (64,)), **table)
    assert {op for op, _ in sent} == {"all_reduce"}


def twice(model, ids):
    with no_sync():
        model(ids).backward()
    return model(ids.flip(0)).backward()


def test_accumulated_look_ups() -> None:
    ids = torch.randint(0, 1000, (64,))
    check(twice, Table(1000), ids, cuts=[layout((64,), "data", mesh=DATA)], mesh=DATA)


def test_table_that_is_cut_along_its_rows() -> None:
    check(
        looking_up,
        Table(1001),
        torch.randint(0, 1001, (8, 4)),
        cuts=[layout((8, 4), "data")],
        parameters=lambda name, p: layout(p.shape, "model"),
    )
