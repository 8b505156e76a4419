"""What cannot be followed is refused with a message that says what to do: never silently wrong."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.eager.world import BodyError, check, layout, run

pytestmark = pytest.mark.multirank


def share(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum()


def vmapped(x):
    return torch.vmap(lambda r: r / r.sum())(x)


def functional_grad(x):
    return torch.func.grad(lambda x: (x / x.sum()).pow(2).sum())(x)


def functional_jvp(x):
    return torch.func.jvp(lambda x: x / x.sum(), (x,), (x,))


def in_a_thread(x):
    import threading

    seen: list[Any] = []

    def work() -> None:
        try:
            seen.append(x.sum())
        except Exception as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(seen[0], Exception):
        raise seen[0]
    return seen[0]


def from_a_pool(x):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: x.mean()).result()


def batched_gradients(x):
    y = x.requires_grad_() * 2
    return torch.autograd.grad(y, x, torch.ones(3, 8, 6), is_grads_batched=True)


def write_to_a_moved_view(x):
    x.view(48)[:5].mul_(2)
    y = x.diagonal()
    y.add_(1)
    return x


def stale_view(x):
    row = x[0]
    x.add_(1)
    return row * 2


def sparse_adam(x):
    w = nn.Parameter(torch.ones(6, 6, dtype=x.dtype))
    (x @ w).sum().backward()
    torch.optim.SparseAdam([w]).step()


def script_inside(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(share)
    return scripted(x)


def under_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x.float() @ torch.ones(6, 6)


REFUSED: dict[Callable[..., Any], str] = {
    vmapped: "local shards only. Write the loop with ordinary operators",
    functional_grad: "autograd.grad",
    script_inside: "call the Python function",
    in_a_thread: "own thread only",
    from_a_pool: "own thread only",
    batched_gradients: "call autograd.grad once for each gradient",
    write_to_a_moved_view: "work on a clone",
    stale_view: "Take the view again",
    under_autocast: "Cast the module and its inputs instead",
    sparse_adam: "use Adam, or SGD",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(BodyError) as error:
        run(function, torch.randn(8, 6), cuts=[layout((8, 6), "data", "model")])
    assert REFUSED[function] in error.value.text
    assert error.value.kind == "RequestError"


def whole_under_vmap(x):
    table = torch.arange(6.0)
    return torch.vmap(lambda r: r * 2)(table.double()) + x


@pytest.mark.filterwarnings("ignore")
def test_forward_mode_gathers() -> None:
    check(functional_jvp, torch.randn(8, 6).double(), cuts=[layout((8, 6), "data", "model")])


def test_transforms_of_whole_values_run() -> None:
    check(whole_under_vmap, torch.randn(8, 6).double(), cuts=[layout((8, 6), "data", "model")])


def hooked() -> nn.Module:
    module = nn.Linear(6, 6)
    module.register_full_backward_hook(_hook)
    return module


def _hook(module: Any, a: Any, b: Any) -> None:
    return None


def test_full_backward_hook_is_refused_before_anything_runs() -> None:
    with pytest.raises(BodyError, match=r"Tensor.register_hook"):
        run(lambda m, x: m(x), hooked(), torch.randn(8, 6))


def test_error_of_the_body_is_its_own() -> None:
    with pytest.raises(BodyError) as error:
        run(lambda x: x @ torch.ones(5, 5), torch.randn(8, 6), cuts=[layout((8, 6), "data")])
    assert error.value.kind == "RuntimeError"
    assert "8x6 and 5x5" in error.value.text
