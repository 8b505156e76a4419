"""Calls on a pool: what the body sees, and what comes home."""

from __future__ import annotations

import copy
import functools
import os
import random
import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoshard import DeviceMesh, InputError, PartitionSpec, RankError, RequestError, profiler, spmd
from autoshard.runtime.processes import get_pool

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.filterwarnings("ignore::autoshard.runtime.spmd.SmallCutWarning"),
]

MESH = DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=["data", "model"])
ROWS = PartitionSpec("data")

Pair = namedtuple("Pair", ["first", "second"])


def run(function: Any, *args: Any, **specs: Any) -> Any:
    return spmd(mesh=MESH, **specs)(function)(*args)


def mean(a: Any, b: Any) -> Any:
    return (a + b) / 2


def same(x: Any) -> Any:
    return x


# ---- results ------------------------------------------------------------------------------------


def test_arrays_come_back_as_arrays() -> None:
    a = np.arange(24, dtype=np.float32).reshape(6, 4)
    out = run(mean, a, a + 2, in_shardings=[ROWS, PartitionSpec(None, "model")])
    assert type(out) is np.ndarray
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, a + 1)


def test_containers_keep_their_form() -> None:
    x = torch.arange(6.0)
    value = {"pair": Pair(x, [x * 2, None]), "text": ("a", 3, 2.5), 7: {1, 2}}
    out = run(same, value, in_shardings=ROWS)
    assert isinstance(out["pair"], Pair)
    assert torch.equal(out["pair"].first, x)
    assert torch.equal(out["pair"].second[0], x * 2)
    assert out["pair"].second[1] is None
    assert out["text"] == ("a", 3, 2.5)
    assert out[7] == {1, 2}


def test_specs_in_containers() -> None:
    x, y = torch.arange(8.0), torch.arange(12.0).view(2, 6)
    out = run(
        lambda batch, scale: batch["x"].sum() + (batch["y"][0] * scale).sum(),
        {"x": x, "y": [y]},
        2.0,
        in_shardings={"batch": {"x": ROWS, "y": [PartitionSpec(None, "model")]}},
    )
    assert out == x.sum() + 2 * y.sum()


def test_results_are_detached() -> None:
    model = nn.Linear(3, 1)
    out = run(lambda m, x: m(x).sum(), model, torch.ones(4, 3), in_shardings=[ROWS])
    assert not out.requires_grad


def test_uneven_results_are_put_together() -> None:
    x = torch.arange(35.0).view(7, 5)
    for spec in (ROWS, PartitionSpec("model", "data"), PartitionSpec(None, "model")):
        assert torch.equal(run(lambda x: x * 1.0, x, in_shardings=[spec], out_sharding=spec), x)


def test_what_the_caller_handed_in_comes_back_itself() -> None:
    model = nn.Linear(2, 2)
    out = run(lambda m, x: (m, x), model, torch.ones(2))
    assert out[0] is model


# ---- what the body changes ----------------------------------------------------------------------


def test_a_tensor_written_in_place_is_written() -> None:
    x, before = torch.zeros(6, 2), torch.zeros(6, 2)

    def fill(x: torch.Tensor) -> None:
        x.add_(3.0)

    run(fill, x, in_shardings=[ROWS])
    assert torch.equal(x, before + 3)


def test_a_global_tensor_written_in_place_is_written() -> None:
    log = torch.zeros(3)

    def note(x: torch.Tensor) -> None:
        log[1] = 5.0

    run(note, torch.ones(2))
    assert log.tolist() == [0, 5, 0]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.inner(x))
        return out


def test_a_module_keeps_its_identity_and_gets_what_changed() -> None:
    torch.manual_seed(0)
    model = Counting().double()
    reference = copy.deepcopy(model)
    x = torch.randn(8, 4, dtype=torch.float64)
    objects = {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        loss.backward()
        model.eval()
        return loss

    versions = [p._version for p in model.parameters()]
    loss = run(forward, model, x, in_shardings=[ROWS])
    expected = forward(reference, x)
    torch.testing.assert_close(loss, expected.detach())
    assert objects == {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    assert versions == [p._version for p in model.parameters()]  # not written: they are as before
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-12, rtol=1e-9)
    for a, b in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert not model.training
    assert not model.norm.training


def test_gradients_accumulate_over_calls() -> None:
    model = nn.Linear(3, 2).double()
    reference = copy.deepcopy(model)

    def backward(model: nn.Module, x: torch.Tensor) -> None:
        model(x).square().sum().backward()

    step = spmd(mesh=MESH, in_shardings=[ROWS])(backward)
    for n in range(3):
        x = torch.randn(4, 3, dtype=torch.float64) + n
        step(model, x)
        backward(reference, x)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_leaf_tensor_gets_its_gradient() -> None:
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def backward(x: torch.Tensor) -> None:
        (x**3).sum().backward()

    run(backward, x, in_shardings=[ROWS])
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)


class Trainer:
    """An object of the program's own that holds what is trained."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("how", ["method", "argument", "closure", "partial"])
def test_what_a_function_refers_to_is_trained(how: str) -> None:
    torch.manual_seed(1)
    ours = Trainer()
    theirs = copy.deepcopy(ours)

    def by_argument(trainer: Trainer, x: torch.Tensor) -> torch.Tensor:
        return trainer.step(x)

    def by_closure(x: torch.Tensor) -> torch.Tensor:
        return ours.step(x)

    x = torch.randn(8, 4, dtype=torch.float64)
    function: Any = {
        "method": ours.step,
        "argument": by_argument,
        "closure": by_closure,
        "partial": functools.partial(by_argument, ours),
    }[how]
    args = (ours, x) if how == "argument" else (x,)
    step = spmd(mesh=MESH, in_shardings=[ROWS])(function)
    for _ in range(2):
        loss = step(*args)
        torch.testing.assert_close(loss, theirs.step(x).detach())
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        for key, value in ours.optimizer.state[p].items():
            torch.testing.assert_close(value, theirs.optimizer.state[q][key])


model_of_this_module = nn.Linear(2, 1)


def train_model_of_this_module(x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model_of_this_module.parameters(), lr=1.0)
    model_of_this_module(x).sum().backward()
    optimizer.step()


def test_a_global_of_an_importable_module_is_trained_here() -> None:
    before = model_of_this_module.bias.detach().clone()
    run(train_model_of_this_module, torch.ones(4, 2), in_shardings=[ROWS])
    torch.testing.assert_close(model_of_this_module.bias.detach(), before - 4)


# ---- the process around it ----------------------------------------------------------------------


def test_random_generators_go_along_and_come_back() -> None:
    def draw() -> tuple[Any, float, float]:
        return torch.rand(3), float(np.random.rand()), random.random()

    for seed in (3, 4):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        ours = [run(draw), draw()]
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        for (a, b, c), (x, y, z) in zip(ours, [draw(), draw()], strict=True):
            assert torch.equal(a, x)
            assert (b, c) == (y, z)


@dataclass
class Seen:
    dtype: torch.dtype
    grad: bool
    variable: str | None
    folder: str


def look() -> Seen:
    return Seen(
        torch.ones(1).dtype, torch.is_grad_enabled(), os.environ.get("SEEN_BY_BODY"), os.getcwd()
    )


def test_defaults_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEN_BY_BODY", "yes")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            assert run(look) == Seen(torch.float64, False, "yes", os.getcwd())
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.delenv("SEEN_BY_BODY")
    assert run(look) == Seen(torch.float32, True, None, os.getcwd())


def test_filters_of_warnings_go_along() -> None:
    def warn() -> None:
        warnings.warn("mind this", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(RankError, match="UserWarning: mind this"):
            run(warn)


# ---- what goes wrong ----------------------------------------------------------------------------


def boom(x: Any) -> Any:
    raise ValueError("no such luck")


def dies(x: Any) -> Any:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), 9)
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (boom, "raised ValueError: no such luck"),
        (dies, "rank 1 of 4 was killed by SIGKILL"),
        (lambda x: os._exit(3), "left with exit status 3"),
    ],
    ids=["raises", "killed", "leaves"],
)
def test_a_failing_rank_is_told_and_the_next_call_works(function: Any, message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run(function, 1)
    if function is boom:
        assert isinstance(caught.value.__cause__, ValueError)
        assert "raise ValueError" in str(caught.value)
    assert run(same, 5) == 5


def test_a_wrong_result_spec_is_an_error_of_the_request() -> None:
    with pytest.raises(RequestError, match=r"out_sharding does not fit result 0: .* is a scalar"):
        run(lambda x: x.sum(), torch.ones(4), out_sharding=ROWS)
    with pytest.raises(RequestError, match="out_sharding has 1 specs, but the result has more"):
        run(lambda x: (x, x + 1), torch.ones(4), out_sharding=[ROWS])


def test_a_call_inside_a_call_is_refused() -> None:
    inner = spmd(mesh=MESH)(same)
    with pytest.raises(RequestError, match=r"was called inside another one; call same\.function"):
        run(lambda x: inner(x), torch.ones(2))
    assert run(lambda x: inner.function(x) + 1, 1) == 2


def test_a_lock_cannot_be_sent() -> None:
    import threading

    with pytest.raises(InputError, match=r"argument 'x' \(lock\) cannot be sent"):
        run(same, threading.Lock())


# ---- watching -----------------------------------------------------------------------------------


def test_gradient_messages_start_before_backward_ends() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])

    def backward(model: nn.Module, x: torch.Tensor) -> None:
        model(x).sum().backward()

    step = spmd(mesh=MESH, in_shardings=[ROWS], bucket_bytes=40_000)(backward)
    with profiler() as prof:
        step(model, torch.ones(64, 64))
    (call,) = prof.calls
    assert [r.rank for r in call.ranks] == [0, 1, 2, 3]
    for trace in call.ranks:
        (span,) = [s for s in trace.spans if s.name == "backward"]
        gradients = [r for r in trace.collectives if r.phase == "backward"]
        assert len(gradients) > 2
        assert gradients[0].start_s < span.end_s
        assert sum(r.start_s < span.end_s for r in gradients) > 1
    assert all("data" in r.axes for r in gradients)
    assert sum(r.bytes for r in gradients) == sum(4 * p.numel() for p in model.parameters())


def test_fused_gradients_are_few_messages() -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(1000)) for _ in range(100)])

    def backward(model: nn.ParameterList, x: torch.Tensor) -> None:
        total = x.new_zeros(())
        for p in model:
            total = total + (x * p).sum()
        total.backward()

    counts = {}
    for size in (None, 1):
        step = spmd(mesh=MESH, in_shardings=[ROWS], bucket_bytes=size)(backward)
        with profiler() as prof:
            step(model, torch.ones(4, 1000))
        counts[size] = sum(r.phase == "backward" for r in prof.collectives)
    assert counts[1] == 100
    assert counts[None] is not None
    assert 1 <= counts[None] <= 4


def test_nobody_watches_nothing_is_recorded() -> None:
    with profiler() as prof:
        pass
    run(same, torch.ones(4))
    assert prof.calls == []
    assert prof.summary() == "no call of an @spmd function was seen"


def test_ranks_are_kept_between_calls() -> None:
    run(same, 1)
    pool = get_pool(4, threads=max(1, torch.get_num_threads() // 4))
    before = pool.generation
    for _ in range(3):
        run(same, 1)
    assert pool.generation == before
