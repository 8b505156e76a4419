"""The graph value: its checks, and JSON that stores a repeated block once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autoshard.errors import RequestError
from autoshard.graph import Constant, ModelGraph, Node, Repeat


def tower(layers: int) -> ModelGraph:
    """X -> (linear -> relu -> identity) * layers -> sum."""
    nodes = [Node(name="x", op="input", attrs={"path": "x"}, shape=(4, 8))]
    starts = []
    for i in range(layers):
        starts.append(len(nodes))
        before = nodes[-1].name
        w = f"w{i}"
        nodes += [
            Node(
                name=w,
                op="parameter",
                attrs={"fqn": f"layers.{i}.weight"},
                shape=(8, 8),
                differentiable=True,
                module=f"layers.{i}",
            ),
            Node(
                name=f"y{i}",
                op="aten.linear.default",
                operands=(before, w),
                roles=("input", "weight"),
                shape=(4, 8),
                differentiable=True,
                flops_forward=512,
                saved=("input", "weight"),
                module=f"layers.{i}",
            ),
            Node(
                name=f"h{i}",
                op="autoshard.identity",
                operands=(f"y{i}",),
                roles=("input",),
                shape=(4, 8),
                differentiable=True,
                module=f"layers.{i}",
            ),
        ]
    nodes.append(
        Node(
            name="loss",
            op="aten.sum.dim_IntList",
            operands=(nodes[-1].name,),
            roles=("self",),
            attrs={"dim": (0, 1)},
            differentiable=True,
        )
    )
    return ModelGraph(
        name="tower",
        nodes=tuple(nodes),
        outputs=(("loss", "loss"),),
        loss="loss",
        constants=(Constant(name="c", op="literal", attrs={"data": (1.5, 2.0)}, shape=(2,)),),
        repeats=(Repeat(kind="block", length=3, starts=tuple(starts)),),
        batch=4,
        aliases={"tied.weight": "layers.0.weight"},
    )


def test_json_round_trip_is_equal() -> None:
    graph = tower(5)
    text = json.dumps(graph.to_json())
    assert ModelGraph.from_json(json.loads(text)) == graph


def test_json_stores_a_repeated_block_once() -> None:
    def size(layers: int) -> int:
        return len(json.dumps(tower(layers).to_json()["blocks"]))

    assert size(40) == size(2)


def test_fingerprint_sees_every_change_that_planning_reads() -> None:
    graph = tower(2)
    nodes = (*graph.nodes[:-1], replace(graph.nodes[-1], attrs={"dim": (0,)}))
    assert replace(graph, nodes=nodes).fingerprint != graph.fingerprint
    assert tower(2).fingerprint == graph.fingerprint


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "not a graph document"),
        ({"kind": "autoshard.graph", "schema_version": 99}, "version 99"),
        ({"kind": "autoshard.graph", "schema_version": 1}, "broken graph document: KeyError"),
    ],
)
def test_what_is_no_graph_is_refused(document: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ModelGraph.from_json(document)


def test_unknown_fields_and_dtypes_are_refused() -> None:
    for change in ({"surprise": 1}, {"dtype": "float3"}):
        document = tower(1).to_json()
        document["nodes"][0] |= change
        with pytest.raises(RequestError, match="broken graph document"):
            ModelGraph.from_json(document)


def test_a_value_must_be_computed_before_it_is_used() -> None:
    node = Node(name="y", op="aten.relu.default", operands=("x",), roles=("self",))
    with pytest.raises(RequestError, match="uses \\['x'\\] before it is computed"):
        ModelGraph(name="g", nodes=(node,), outputs=(), loss="y")


def test_float_dtype_can_be_exchanged() -> None:
    graph = tower(1).with_float_dtype("float64")
    assert {n.dtype for n in graph.nodes} == {"float64"}
