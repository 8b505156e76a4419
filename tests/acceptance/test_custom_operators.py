"""A model with an operator that nobody knows, before and after one line about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.errors import ValidationError
from autoshard.sharding.registry import forget_rule


@torch.library.custom_op("acceptance::smooth", mutates_args=())
def smooth(x: Tensor, gain: Tensor) -> Tensor:
    """``x * gain`` minus its mean over the last dim."""
    y = x * gain
    return y - y.mean(-1, keepdim=True)


@smooth.register_fake
def _(x: Tensor, gain: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, gain = ctx.saved_tensors
    centred = gradient - gradient.mean(-1, keepdim=True)
    return centred * gain, (centred * x).sum(tuple(range(x.dim() - 1)))


smooth.register_autograd(_backward, setup_context=_keep)


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.gain = nn.Parameter(torch.rand(16))
        self.down = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.ops.acceptance.smooth(self.up(x), self.gain)).pow(2).mean()


@pytest.fixture(autouse=True)
def _no_rule_left() -> Iterator[None]:
    yield
    forget_rule("acceptance::smooth")


def plan(strategy: str = "auto") -> autoshard.Plan:
    torch.manual_seed(0)
    return autoshard.optimize(
        Smooth(), torch.randn(8, 8), cluster="local", devices=4, strategy=strategy, progress=None
    )


@pytest.mark.multirank
def test_without_a_rule_it_plans_and_validates_with_a_warning_that_names_it() -> None:
    found = plan("data")
    assert any("acceptance.smooth" in w and "sharding_rule" in w for w in found.warnings)
    assert found.validate(steps=0, progress=None).passed


@pytest.mark.multirank
def test_one_line_removes_the_warning() -> None:
    autoshard.sharding_rule("acceptance::smooth", "b d, d -> b d", whole="d")
    found = plan("data")
    assert not any("acceptance" in w for w in found.warnings)
    assert found.validate(steps=0, progress=None).passed
    choice = found.choices[next(n for n in found.choices if n.startswith("smooth"))]
    assert choice == ("b:1:8",)


@pytest.mark.multirank
def test_a_wrong_rule_is_caught_and_the_operator_named() -> None:
    autoshard.sharding_rule("acceptance::smooth", "b d, d -> b d")  # the mean needs d whole
    found = plan("tensor")
    choice = found.choices[next(n for n in found.choices if n.startswith("smooth"))]
    assert choice[0].startswith("d:"), "the wrong cut is the one that is tried"
    with pytest.raises(ValidationError, match=r"acceptance\.smooth") as caught:
        found.validate(steps=0, progress=None)
    assert "sharding_rule" in str(caught.value)
    assert caught.value.exit_status == 4


def test_a_built_in_rule_is_not_replaced() -> None:
    with pytest.raises(autoshard.RuleError, match=r"aten\.linear already has a rule"):
        autoshard.sharding_rule("aten::linear", "b k, o k -> b o")
