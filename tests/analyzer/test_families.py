"""A captured graph computes what the model computes, folded or not."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autoshard.analyzer import Captured, analyze
from autoshard.graph import ModelGraph
from tests.analyzer.families import FAMILIES
from tests.analyzer.interpreter import loss_and_gradients

FOLDED = {
    "gpt2": [3],
    "llama": [3],
    "bert": [3],
    "t5": [2, 2],
    "vit": [3],
    "resnet": [3, 2],
    "convnext": [3, 3],
    "swin": [2, 2],
}
"""Instances of each repeated block. T5's first blocks own the position bias; Swin alternates
plain and shifted windows; a ResNet stage's first block changes the width."""


@cache
def model(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family][0]()


@cache
def captured(family: str) -> Captured:
    return analyze(model(family), FAMILIES[family][1], name=family)


def reference(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the module itself."""
    module = copy.deepcopy(module)
    out = module(**inputs)
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest error, relative to each gradient's largest element; key biases have none."""
    scale = max(float(g.abs().max()) for g in expected.values())
    return max(
        float((found[n] - g).abs().max()) / max(float(g.abs().max()), 1e-6 * scale)
        for n, g in expected.items()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_computes_the_loss_and_gradients_of_its_model(family: str) -> None:
    inputs = FAMILIES[family][1]
    loss, gradients = reference(model(family), inputs)
    graph = captured(family).graph
    found_loss, found = loss_and_gradients(graph, model(family), inputs, torch.float32)
    assert float((found_loss - loss).abs()) <= 1e-5 * float(loss.abs())
    assert found.keys() == gradients.keys()
    assert worst(found, gradients) < 1e-4


@pytest.mark.parametrize("family", ["vit", "resnet", "convnext", "swin"])
def test_a_graph_computes_in_float64_what_a_float64_model_computes(family: str) -> None:
    """Models that do not cast to float32 by hand agree to float64's precision."""
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in FAMILIES[family][1].items()}
    loss, gradients = reference(copy.deepcopy(model(family)).double(), inputs)
    found_loss, found = loss_and_gradients(
        captured(family).graph, model(family), inputs, torch.float64
    )
    assert float((found_loss - loss).abs()) <= 1e-12 * float(loss.abs())
    assert worst(found, gradients) < 1e-8


@pytest.mark.parametrize("family", FOLDED)
def test_repeated_blocks_fold(family: str) -> None:
    graph = captured(family).graph
    assert [len(r.starts) for r in graph.repeats] == FOLDED[family]
    assert graph.warnings == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_folded_and_whole_capture_give_equal_graphs(family: str) -> None:
    whole = analyze(model(family), FAMILIES[family][1], name=family, fold=False).graph
    assert captured(family).graph == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_survives_json(family: str) -> None:
    graph = captured(family).graph
    assert ModelGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_is_in_normal_form(family: str) -> None:
    graph = captured(family).graph
    for node in graph.nodes:
        uses = graph.uses[node.name]
        grads = [u for u, _ in uses if graph.by_name[u].differentiable]
        if node.differentiable and node.op != "autoshard.identity":
            assert len(grads) <= 1, node
        assert uses or node.name in {graph.loss, *dict(graph.outputs).values()}, node
        if node.op in ("aten.linear.default", "aten.conv2d.default"):
            assert len(node.operands) == 2, node
        assert "_to_copy" not in node.op
    parameters = {n for n, p in model(family).named_parameters()}
    assert set(graph.parameters) == parameters
    for repeat in graph.repeats:
        for start in repeat.starts:
            last = graph.nodes[start + repeat.length - 1]
            assert last.op == "autoshard.identity", last


@pytest.mark.parametrize("family", FAMILIES)
def test_random_inputs_fit(family: str) -> None:
    drawn = captured(family).draw_inputs(seed=3)
    again = captured(family).draw_inputs(seed=3)
    assert drawn.keys() == FAMILIES[family][1].keys()
    assert all(torch.equal(drawn[k], again[k]) for k in drawn)
    loss, _ = loss_and_gradients(captured(family).graph, model(family), drawn, torch.float32)
    assert bool(loss.isfinite())
