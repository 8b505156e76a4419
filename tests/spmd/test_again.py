"""The same function called again: what the caller did in between is always seen."""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoshard import DeviceMesh, PartitionSpec, RankError, profiler, spmd
from autoshard.runtime.processes import get_pool
from autoshard.runtime.spmd.courier import loose
from autoshard.runtime.spmd.request import Request
from autoshard.runtime.spmd.shipment import Loose
from autoshard.runtime.spmd.snapshot import OpaqueError, Snapshot

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.filterwarnings("ignore::autoshard.runtime.spmd.SmallCutWarning"),
]

MESH = DeviceMesh(devices=[0, 1], axis_names=["data"])
ROWS = PartitionSpec("data")
WHOLE, CUT = None, {"first.weight": PartitionSpec("data", None)}


class Net(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 2)
        self.options = {"power": 1}
        self.sizes = [1, 2]
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # seen by nobody outside of the body
        out: torch.Tensor = self.last(self.drop(self.norm(self.first(x)).relu()))
        return out ** self.options["power"] * self.scale * self.calls + len(self.sizes)


def step(
    model: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - y).square().mean()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return loss


def plain_step(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return step(model, optimizer, x, y)


def _replace_parameter(model: Net, _: Any) -> None:
    model.last.weight = nn.Parameter(model.last.weight.detach() * 2)


def _hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out + 1


def _load(model: Net, _: Any) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def _double(model: Net, _: Any) -> None:
    model.first = nn.Linear(4, 6, bias=False).double()
    with torch.no_grad():
        model.first.weight.fill_(0.25)


def _edit_array(model: Net, _: Any) -> None:
    model.first.weight.detach().numpy()[0, 0] = 3.0


def _edit_state(model: Net, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.5)


def _clear_state(model: Net, optimizer: Any) -> None:
    optimizer.state.clear()


def _set_groups(model: Net, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.param_groups[0]["weight_decay"] = 0.1


def _give_gradients(model: Net, _: Any) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "nothing": lambda m, o: None,
    "weights loaded": _load,
    "a parameter replaced": _replace_parameter,
    "a submodule replaced": _double,
    "data set": lambda m, o: setattr(m.first.weight, "data", m.first.weight.data * 2),
    "data written": lambda m, o: m.first.weight.data.mul_(3),
    "written through NumPy": _edit_array,
    "written in place": lambda m, o: nn.init.constant_(m.last.bias, 0.7),
    "frozen": lambda m, o: m.first.weight.requires_grad_(False),
    "eval": lambda m, o: m.eval(),
    "one submodule in eval": lambda m, o: m.drop.eval(),
    "a forward hook": lambda m, o: m.first.register_forward_hook(_hook),
    "a buffer written": lambda m, o: m.norm.running_mean.add_(1),
    "a buffer added": lambda m, o: m.register_buffer("more", torch.ones(2)),
    "an attribute set": lambda m, o: setattr(m.drop, "p", 0.25),
    "an attribute that the class has": lambda m, o: setattr(m, "scale", 2.0),
    "a table of the module edited": lambda m, o: m.options.update(power=2),
    "a list of the module edited": lambda m, o: m.sizes.append(5),
    "gradients given": _give_gradients,
    "groups edited": _set_groups,
    "a large number": lambda m, o: setattr(m.norm, "momentum", 0.31),
    "state edited": _edit_state,
    "state cleared": _clear_state,
    "seeded": lambda m, o: torch.manual_seed(77),
    "another default dtype": lambda m, o: torch.set_default_dtype(torch.float64),
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def _made(kind: str | None) -> tuple[Net, Any]:
    torch.manual_seed(3)
    model = Net().double()
    if kind is None:
        return model, None
    return model, getattr(torch.optim, kind)(model.parameters(), lr=0.05)


def _train(call: Callable[..., torch.Tensor], kind: str | None, change: Any) -> tuple[Any, ...]:
    """Losses, state and gradients of five steps with a change after the second and the fourth."""
    torch.set_default_dtype(torch.float32)
    model, optimizer = _made(kind)
    torch.manual_seed(5)
    losses = []
    for n in range(5):
        x = torch.randn(8, 4, dtype=torch.float64)
        y = torch.randn(8, 2, dtype=torch.float64)
        model.calls = 0
        before = [x] if optimizer is None else [optimizer, x]
        losses.append(call(model, *before, y).detach())
        if n in (1, 3):
            change(model, optimizer)
    state = {} if optimizer is None else optimizer.state_dict()["state"]
    grads = {n: p.grad for n, p in model.named_parameters()}
    flags = [m.training for m in model.modules()]
    return losses, dict(model.state_dict()), state, grads, flags, model.calls


@pytest.mark.parametrize("cut", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", [None, "SGD", "AdamW"])
def test_changes_between_calls_are_seen(kind: str | None, cut: Any) -> None:
    shards = [None, ROWS, ROWS] if kind is None else [None, None, ROWS, ROWS]
    function = plain_step if kind is None else step
    called = spmd(mesh=MESH, in_shardings=shards[-2:], parameter_shardings=cut)(function)
    for name, change in CHANGES.items():
        if kind is None and ("state" in name or "groups" in name):
            continue
        expected = _train(function, kind, change)
        found = _train(called, kind, change)
        for a, b in zip(found[:-1], expected[:-1], strict=True):
            try:
                torch.testing.assert_close(a, b)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
        assert found[-1] == 0, name  # attributes of the caller's module are its own


def test_a_step_like_the_last_one_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []

    def counting(request: Request) -> Loose:
        packed.append(request)
        return loose(request)

    monkeypatch.setattr("autoshard.runtime.spmd.function.loose", counting)
    called = spmd(mesh=MESH, in_shardings=[ROWS, ROWS])(plain_step)
    model, _ = _made(None)
    data = torch.randn(40, 4, dtype=torch.float64)
    for n in range(5):
        called(model, data[8 * n : 8 * n + 8], data[8 * n : 8 * n + 8, :2].contiguous())
    assert len(packed) == 1


def test_shapes_and_numbers_may_change() -> None:
    called = spmd(mesh=MESH, in_shardings=[ROWS])(lambda x, by, more: x * by + more["a"][0])
    for size, by, more in [
        (4, 1, 2),
        (4, 1, 2),
        (6, 1, 2),
        (6, 1.0, 2),
        (6, -0.0, 3),
        (4, 2, True),
    ]:
        x = torch.randn(size, 3)
        found = called(x, by, {"a": [more]})
        torch.testing.assert_close(found, x * by + more, rtol=0, atol=0)


def test_the_sign_of_nought_is_seen() -> None:
    called = spmd(mesh=MESH, in_shardings=[ROWS])(lambda x, by: x * math.copysign(1.0, by))
    for by in (0.0, -0.0, 0.0):
        assert called(torch.ones(2), by).tolist() == [math.copysign(1.0, by)] * 2


def test_tensors_that_come_to_share_memory_do() -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    called = spmd(mesh=MESH, in_shardings=[ROWS, ROWS])(write)
    base = torch.arange(16.0)
    for x, y in [
        (base[:8], base[8:]),
        (base[:8].clone(), base[8:].clone()),
        (base[2:10], base[:8]),
    ]:
        torch.testing.assert_close(called(x, y), x + y)
        torch.testing.assert_close(called(y, x), x + y)
        torch.testing.assert_close(called(x, x), x + x)


def test_a_tensor_written_in_place_is_written_each_time() -> None:
    def add(x: torch.Tensor, by: torch.Tensor) -> None:
        x.add_(by)

    called = spmd(mesh=MESH, in_shardings=[ROWS])(add)
    x = torch.zeros(4)
    for n in range(4):
        called(x, torch.tensor(float(n)))
    assert x.tolist() == [6.0] * 4


def test_what_a_body_leaves_behind_is_gone_in_the_next_call() -> None:
    def leave(model: nn.Linear, x: torch.Tensor) -> tuple[int, torch.Tensor]:
        count = len(model._forward_hooks) + len(model.weight._backward_hooks or ())
        model.register_forward_hook(lambda m, a, out: out * 2)
        model.weight.register_hook(lambda g: g * 2)  # type: ignore[no-untyped-call]
        model.note = "left"  # type: ignore[assignment]
        return count, model(x).sum()

    called = spmd(mesh=MESH, in_shardings=[None, ROWS])(leave)
    model = nn.Linear(3, 1)
    for _ in range(3):
        assert called(model, torch.ones(4, 3))[0] == 0
    assert not hasattr(model, "note")


def test_globals_and_closures_are_read_anew() -> None:
    factor = [2.0]
    weight = 3.0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factor[0] * weight + OFFSET

    called = spmd(mesh=MESH, in_shardings=[ROWS])(scaled)
    x = torch.ones(4)
    global OFFSET
    for n in range(4):
        assert called(x).tolist() == [factor[0] * weight + OFFSET] * 4
        if n == 0:
            factor[0] = 5.0
        elif n == 1:
            weight = 7.0
        else:
            factor.clear()
            factor.append(n + 0.5)


OFFSET = 1.0


def test_classes_made_in_the_program_are_read_anew() -> None:
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    called = spmd(mesh=MESH, in_shardings=[None, ROWS])(lambda model, x: model(x))
    model = Scaled()
    for n in (1.0, 1.0, 3.0):
        Scaled.scale = n
        assert called(model, torch.ones(2)).tolist() == [n, n]
    Scaled.forward = lambda self, x: x - 1  # type: ignore[method-assign]
    assert called(model, torch.ones(2)).tolist() == [0.0, 0.0]


def test_random_numbers_are_those_of_one_device() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(4) + x * 0 + random.random() + float(np.random.rand())

    called = spmd(mesh=MESH, in_shardings=[ROWS])(draw)
    results = []
    for function in (draw, called):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        results.append([function(torch.ones(4)) for _ in range(3)])
        torch.manual_seed(1)
        results[-1].append(function(torch.ones(4)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_the_environment_is_that_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    called = spmd(mesh=MESH)(lambda x: os.environ.get("AUTOSHARD_TEST_AGAIN"))
    for value in ("a", "a", "b"):
        monkeypatch.setenv("AUTOSHARD_TEST_AGAIN", value)
        assert called(torch.ones(2)) == value
    monkeypatch.delenv("AUTOSHARD_TEST_AGAIN")
    assert called(torch.ones(2)) is None


def test_ranks_that_are_new_are_told_all() -> None:
    called = spmd(mesh=MESH, in_shardings=[ROWS, ROWS])(plain_step)
    model, _ = _made(None)
    reference = copy.deepcopy(model)
    torch.manual_seed(2)
    batches = [torch.randn(8, 4, dtype=torch.float64) for _ in range(4)]
    losses = []
    for function, net in ((plain_step, reference), (called, model)):
        torch.manual_seed(4)
        for n, x in enumerate(batches):
            net.calls = 0
            if n == 2 and function is called:
                get_pool(2, threads=max(1, torch.get_num_threads() // 2)).close()
            losses.append(function(net, x, x[:, :2].contiguous()).detach())
    torch.testing.assert_close(losses[:4], losses[4:])


def test_a_failure_is_forgotten() -> None:
    def fail(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        if by.item() == 0:
            raise ValueError("nought")
        return x / by

    called = spmd(mesh=MESH, in_shardings=[ROWS])(fail)
    x = torch.ones(4)
    for by in (1.0, 2.0, 0.0, 4.0, 5.0):
        if by:
            torch.testing.assert_close(called(x, torch.tensor(by)), x / by)
        else:
            with pytest.raises(RankError, match="nought"):
                called(x, torch.tensor(by))


def test_results_are_not_overwritten_by_the_next_call() -> None:
    called = spmd(mesh=MESH, in_shardings=[ROWS])(lambda x: {"a": x * 2, "b": [x.sum()]})
    results = [called(torch.full((4,), float(n))) for n in range(4)]
    assert [r["a"].tolist() for r in results] == [[2.0 * n] * 4 for n in range(4)]
    assert [r["b"][0].item() for r in results] == [4.0 * n for n in range(4)]


def test_later_calls_are_watched() -> None:
    whole = PartitionSpec()
    called = spmd(mesh=MESH, in_shardings=[ROWS], out_sharding=whole)(lambda x: x.sum() * 1.0)
    called(torch.ones(4))
    with profiler() as prof:
        called(torch.ones(4))
    assert [c.op for c in prof.collectives] == ["all_reduce"]
    called(torch.ones(4))
    assert len(prof.collectives) == 1


@pytest.mark.parametrize(
    "value",
    [np.zeros(3), iter(()), torch.Generator(), nn.Module, torch.zeros(2).to_sparse()],
    ids=["array", "iterator", "generator", "class", "sparse"],
)
def test_what_cannot_be_compared_has_no_snapshot(value: object) -> None:
    model = nn.Linear(2, 2)
    model.extra = value  # type: ignore[assignment]
    if value is nn.Module:
        assert Snapshot([model]).holds()
    else:
        with pytest.raises(OpaqueError):
            Snapshot([model])


def test_a_snapshot_does_not_keep_a_model() -> None:
    import weakref

    model = nn.Linear(2, 2)
    snapshot, gone = Snapshot([model]), weakref.ref(model)
    assert snapshot.holds()
    del model
    assert gone() is None
    assert not snapshot.holds()
