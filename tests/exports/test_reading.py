"""Axes and weights of a plan, in the words of other tools."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.exports import Reading, read
from autoshard.exports.reading import by_pattern, wildcard
from autoshard.planner import Plan
from tests.exports.models import build, planned


def reading(plan: Plan) -> Reading:
    return read(plan, plan.program())


SIZES = [
    ("gpt2", "data", (4, 1, 1)),
    ("gpt2", "fsdp", (1, 4, 1)),
    ("gpt2", "tensor", (1, 1, 4)),
    ("llama", "hybrid", (2, 1, 2)),
    ("mlp", "hybrid", (2, 1, 2)),
]


@pytest.mark.parametrize(("name", "strategy", "sizes"), SIZES)
def test_sizes(name: str, strategy: str, sizes: tuple[int, int, int]) -> None:
    found = reading(planned(name, strategy))
    assert (found.replicate, found.shard, found.tensor) == sizes
    assert found.lost == ()
    assert found.data * found.local_batch == found.plan.global_batch


def test_columns_and_rows() -> None:
    styles = {w.module: w.style for w in reading(planned("llama", "hybrid")).weights}
    block = "model.layers.1."
    assert styles[f"{block}self_attn.v_proj"] == "column"
    assert styles[f"{block}self_attn.o_proj"] == "row"
    assert styles[f"{block}mlp.down_proj"] == "row"
    assert styles["lm_head"] == "column"


def test_fused_and_tied_weights_are_told() -> None:
    weights = {w.module: w for w in reading(planned("gpt2", "tensor")).weights}
    assert weights["transformer.h.0.attn.c_attn"].pieces == 3
    assert weights["transformer.h.0.attn.c_attn"].kind == "product"
    assert weights["transformer.wte"].tied


def test_results_stay_cut_only_where_all_that_follows_is() -> None:
    two = {w.module: w for w in reading(planned("llama", "hybrid")).weights}
    four = {w.module: w for w in reading(planned("llama", "tensor")).weights}
    key = "model.layers.0.self_attn.k_proj"
    assert not two[key].gathers_output, "two heads over two devices"
    assert four[key].gathers_output, "two heads over four devices"
    assert not four["model.layers.0.mlp.up_proj"].gathers_output
    assert four["lm_head"].gathers_output


def test_an_axis_is_called_by_its_use_not_by_its_name() -> None:
    plan = autoshard.estimate(
        build("mlp"),
        {"x": torch.zeros(8, 32), "target": torch.zeros(8, 32)},
        mesh={"data": 4},
        cluster="h100",
        devices=4,
        strategy="tensor",
        progress=False,
    )
    found = reading(plan)
    assert (found.replicate, found.shard, found.tensor) == (1, 1, 4)
    assert found.order == ("data",)


def test_an_axis_without_a_use_is_lost() -> None:
    plan = autoshard.estimate(
        nn.Linear(4, 4),
        torch.zeros(2, 4),
        mesh={"data": 2},
        cluster="h100",
        devices=2,
        progress=False,
    )
    assert any("on axis data=2 all devices compute the same" in t for t in reading(plan).lost)


def test_two_uses_of_one_axis_are_lost() -> None:
    plan = planned("mlp", "tensor")
    program = plan.program()
    fsdp = planned("mlp", "fsdp").program()
    name = next(n.name for n in program.graph.nodes if n.op == "aten.linear.default")
    mixed = {
        key: replace(value, choices=fsdp.strategies[key].choices) if key == name else value
        for key, value in program.strategies.items()
    }
    program.strategies = mixed
    assert any("other tools give an axis one use" in text for text in read(plan, program).lost)


class Tokens(nn.Module):
    """A learned token before the others and learned positions on all: no weights of products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, 1, 16))
        self.places = nn.Parameter(torch.zeros(1, 5, 16))
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return torch.mean(self.out(x).square())


def test_a_parameter_that_is_added_or_joined_is_no_weight_of_a_product() -> None:
    plan = autoshard.estimate(
        Tokens(),
        torch.zeros(8, 4, 16),
        mesh={"data": 2, "model": 2},
        cluster="h100",
        devices=4,
        strategy="hybrid",
        progress=False,
    )
    found = reading(plan)
    assert found.lost == ()
    assert [w.name for w in found.weights] == ["out.weight"]


def test_blocks_are_found_by_their_parameters() -> None:
    assert reading(planned("gpt2", "data")).units == ("transformer.h.0", "transformer.h.1")
    assert reading(planned("mlp", "data")).units == ()


PATTERNS = [
    ("layers.10.mlp.fc1", "layers.*.mlp.fc1"),
    ("h.0", "h.*"),
    ("0.weight", "0.weight"),
    ("experts.1.2.w1", "experts.*.*.w1"),
]


@pytest.mark.parametrize(("name", "pattern"), PATTERNS)
def test_numbers_between_dots_stand_for_any(name: str, pattern: str) -> None:
    assert wildcard(name) == pattern


def test_blocks_that_differ_have_no_pattern() -> None:
    assert by_pattern({"h.0.a": "x", "h.1.a": "x"}) == {"h.*.a": "x"}
    assert by_pattern({"h.0.a": "x", "h.1.a": "y"}) is None
