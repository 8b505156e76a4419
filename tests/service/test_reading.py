"""What is refused before anything is built: by pointer, in bounded time and memory."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.api.configs import model_types
from autoshard.api.limits import check_request
from autoshard.api.presets import model_presets
from autoshard.api.problems import BadRequest, Invalid, Problem
from autoshard.api.reading import read_json, validated
from autoshard.api.settings import Limits
from autoshard.api.wire import PlanRequest, dumped
from autoshard.cluster import Cluster, presets
from tests.service.running import SMALL

EXAMPLES = int(os.environ.get("AUTOSHARD_TEST_FUZZ", "250"))
"""Thousands by AUTOSHARD_TEST_FUZZ=20000: 20 ms each."""

LIMITS = Limits()
DOCUMENT = Cluster.preset("h100").to_json()
CLUSTER = {"preset": "h100", "devices": 8}


def check(body: bytes | dict[str, Any]) -> PlanRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    value = read_json(data, LIMITS.json_depth)
    return check_request(validated(PlanRequest, value), LIMITS)


def refusal(call: Callable[[], object]) -> Problem | None:
    try:
        call()
    except Problem as problem:
        return problem
    return None


def pointer_of(body: bytes | dict[str, Any]) -> str:
    with pytest.raises(Problem) as caught:
        check(body)
    assert 400 <= caught.value.status < 500
    return caught.value.faults[0].pointer


def config(**values: Any) -> dict[str, Any]:
    return {"model": {"config": {"model_type": "gpt2", **values}}, "cluster": CLUSTER}


@pytest.mark.parametrize("name", presets())
def test_each_preset_may_be_sent_as_a_document(name: str) -> None:
    document = Cluster.preset(name).to_json()
    asked = check({"model": {"preset": "gpt2"}, "cluster": document})
    assert dumped(asked)["cluster"] == document


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nul",
        '{"a" 1}',
        "[1,]",
        '{"a":1}x',
        "'a'",
        "\ufeff{}",
        '"\x01"',
        "[" * 100 + "]" * 100,
        "[" * 1_000_000,
        '{"a":' * 10_000,
        "[" + "[]," * 1_000_001 + "[]]",
    ],
)
def test_what_is_not_json_is_a_bad_request(text: str) -> None:
    with pytest.raises(BadRequest):
        read_json(text.encode(), 64)


def test_bytes_that_are_not_utf8_are_named() -> None:
    with pytest.raises(BadRequest, match="byte 6 is not UTF-8"):
        read_json(b'{"a":"\xff"}', 64)


@pytest.mark.parametrize(
    ("text", "pointer"),
    [
        ('{"a": [0, NaN]}', "/a/1"),
        ('{"a": {"b/c": Infinity}}', "/a/b~1c"),
        ("-Infinity", ""),
        ('{"a": 1e999}', "/a"),
        ('{"a": [1' + "0" * 100_000 + "]}", "/a/0"),
        ('{"a": -1' + "0" * 18 + "}", "/a"),
        ('{"a": {"x": 1, "x": 2}}', "/a"),
        ('{"x": 1, "x": NaN}', ""),
        ('{"a": "\\ud800"}', "/a"),
        ('{"a": ["\\u0000"]}', "/a/0"),
        ('{"\\udc00": 1, "a": "\\ud800"}', ""),
    ],
)
def test_value_that_cannot_be_taken_is_named_by_pointer(text: str, pointer: str) -> None:
    with pytest.raises(Invalid) as caught:
        read_json(text.encode(), 64)
    assert caught.value.faults[0].pointer == pointer


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**17), 10**17)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("abc/~ é"), inner),
    )
)
def test_every_json_value_is_read_as_it_was_written(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert read_json(text.encode(), 64) == value


@given(st.binary(max_size=200) | st.text('[]{}",:0123456789.eE-\\u Ntrufalsn').map(str.encode))
@settings(max_examples=500)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    problem = refusal(lambda: read_json(data, 8))
    assert problem is None or problem.status in (400, 422)


# ---- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(model_presets()))
def test_every_preset_passes_as_a_pasted_config(name: str) -> None:
    preset = model_presets()[name]
    found = check({"model": {"config": preset.config}, "cluster": CLUSTER})
    assert dumped(found)["model"]["config"] == preset.config


def test_model_types_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    assert model_types() == set(CONFIG_MAPPING.keys())


CASES: list[tuple[dict[str, Any], str]] = [
    (config(n_layer=10**6), "/model/config/n_layer"),
    (config(n_layer=-1), "/model/config/n_layer"),
    (config(num_hidden_layers=513), "/model/config/num_hidden_layers"),
    (config(depths=[400, 400]), "/model/config/depths"),
    (config(layer_types=["full"] * 1000), "/model/config/layer_types"),
    (config(n_embd=10**9), "/model/config/n_embd"),
    (config(intermediate_size=-(10**9)), "/model/config/intermediate_size"),
    (config(num_local_experts=10**5), "/model/config/num_local_experts"),
    (config(vocab_size=10**8), "/model/config/vocab_size"),
    (config(image_size=[224, 10**7]), "/model/config/image_size/1"),
    (config(n_positions=10**9), "/model/config/n_positions"),
    (config(mlp_ratio=1e300), "/model/config/mlp_ratio"),
    (config(nobody_knows_this=10**7), "/model/config/nobody_knows_this"),
    (
        config(text_config={"num_hidden_layers": 10**6}),
        "/model/config/text_config/num_hidden_layers",
    ),
    (config(vision_config={"a": {"b": [10**9]}}), "/model/config/vision_config/a/b/0"),
    (config(text_config={"model_type": "x"}), "/model/config/text_config/model_type"),
    (
        config(id2label={str(i): "x" for i in range(5)} | {"9": "/etc"}, n_layer=999),
        "/model/config/n_layer",
    ),
    (config(x="/etc/passwd"), "/model/config/x"),
    (config(x="../secret"), "/model/config/x"),
    (config(x="~/secret"), "/model/config/x"),
    (config(x="http://169.254.169.254/"), "/model/config/x"),
    (config(x=["a", "C:\\windows"]), "/model/config/x/1"),
    (config(text_config={"tokenizer": "org/name"}), "/model/config/text_config/tokenizer"),
    (config(backbone="resnet50"), "/model/config/backbone"),
    (config(use_pretrained_backbone=True), "/model/config/use_pretrained_backbone"),
    (config(trust_remote_code=True), "/model/config/trust_remote_code"),
    (config(quantization_config={"bits": 4}), "/model/config/quantization_config"),
    (config(architectures=["a.b"]), "/model/config/architectures"),
    (config(architectures="GPT2LMHeadModel"), "/model/config/architectures"),
    (config(**{"a b": 1}), "/model/config/a b"),
    (config(model_type="gpt9"), "/model/config/model_type"),
    (config(model_type=["gpt2"]), "/model/config/model_type"),
    ({"model": {"config": {}}, "cluster": CLUSTER}, "/model/config"),
    ({"model": {"config": []}, "cluster": CLUSTER}, "/model/config"),
    ({"model": {"preset": "größe"}, "cluster": CLUSTER}, "/model/preset"),
    ({"model": {"preset": "gpt2", "x": 1}, "cluster": CLUSTER}, "/model/x"),
    ({"model": {}, "cluster": CLUSTER}, "/model"),
    ({"model": [], "cluster": CLUSTER}, "/model"),
    ({"cluster": CLUSTER}, "/model"),
    ({**SMALL, "nothing": 1}, "/nothing"),
    ({**SMALL, "cluster": {"preset": "h1000"}}, "/cluster/preset"),
    ({**SMALL, "cluster": {"preset": "../x"}}, "/cluster/preset"),
    ({**SMALL, "cluster": {"preset": "h100", "devices": 9}}, "/cluster/devices"),
    ({**SMALL, "cluster": {"preset": "h100", "devices": 10**9}}, "/cluster/devices"),
    ({**SMALL, "cluster": {"preset": "h100", "devices": 0}}, "/cluster/devices"),
    ({**SMALL, "cluster": {"preset": "h100", "devices": "8"}}, "/cluster/devices"),
    ({**SMALL, "cluster": {"preset": "h100", "devices": True}}, "/cluster/devices"),
    ({**SMALL, "cluster": "h100"}, "/cluster"),
    ({**SMALL, "cluster": {}}, "/cluster/kind"),
    ({**SMALL, "cluster": {**DOCUMENT, "devices": 12}}, "/cluster/devices"),
    ({**SMALL, "cluster": {**DOCUMENT, "more": 12}}, "/cluster/more"),
    ({**SMALL, "cluster": {**DOCUMENT, "tiers": {"node": {}}}}, "/cluster/tiers/node/link"),
    ({**SMALL, "cluster": {**DOCUMENT, "schema_version": 1}}, "/cluster/inside"),
    ({**SMALL, "workload": {"global_batch": 0}}, "/workload/global_batch"),
    ({**SMALL, "workload": {"global_batch": 8.5}}, "/workload/global_batch"),
    ({**SMALL, "workload": {"seq_len": 10**12}}, "/workload/seq_len"),
    ({**SMALL, "workload": {"dtype": "int8"}}, "/workload/dtype"),
    ({**SMALL, "search": {"strategy": "magic"}}, "/search/strategy"),
    ({**SMALL, "search": {"mesh": {"date": 2}}}, "/search/mesh/date"),
    ({**SMALL, "cluster": CLUSTER, "search": {"mesh": {"data": 3}}}, "/search/mesh"),
    ({**SMALL, "search": {"mesh": {"data": 0}}}, "/search/mesh/data"),
    ({**SMALL, "search": {"mesh": {"a/b~c": 2}}}, "/search/mesh/a~1b~0c"),
    ({**SMALL, "search": {"trials": 10**9}}, "/search/trials"),
    ({**SMALL, "search": {"seed": -1}}, "/search/seed"),
    ({**SMALL, "cluster": CLUSTER, "validate": "run"}, "/validate"),
    ({**SMALL, "validate": "perhaps"}, "/validate"),
]


@pytest.mark.parametrize(
    ("body", "pointer"), CASES, ids=[p + str(i) for i, (_, p) in enumerate(CASES)]
)
def test_fault_is_found_before_anything_is_built(body: dict[str, Any], pointer: str) -> None:
    assert pointer_of(body) == pointer


def test_message_lists_what_is_valid() -> None:
    with pytest.raises(Invalid, match="nearest: h100"):
        check({**SMALL, "cluster": {"preset": "h10"}})
    with pytest.raises(Invalid, match="nearest: data"):
        check({**SMALL, "search": {"mesh": {"dada": 2}}})
    with pytest.raises(Invalid, match="use 1 to 8, or a multiple of 8"):
        check({**SMALL, "cluster": {"preset": "h100", "devices": 12}})


# ---- graphs ---------------------------------------------------------------------------------

NODE = {"name": "x", "op": "input", "shape": [2, 3], "dtype": "float32", "attrs": {"path": "x"}}
GRAPH: dict[str, Any] = {
    "kind": "autoshard.graph",
    "schema_version": 1,
    "name": "tiny",
    "batch": 2,
    "loss": "x",
    "outputs": [["x", "x"]],
    "aliases": {},
    "assumptions": [],
    "warnings": [],
    "constants": [],
    "blocks": {},
    "nodes": [NODE],
}
INSTANCE = {"block": "b", "names": ["n"], "operands": {}, "attrs": {}, "modules": {}}


def graph(**changes: Any) -> dict[str, Any]:
    return {"model": {"graph": {**GRAPH, **changes}}, "cluster": CLUSTER}


def test_graph_document_passes() -> None:
    assert dumped(check(graph()))["model"]["graph"] == GRAPH


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"kind": "x"}, "/kind"),
        ({"schema_version": 99}, "/schema_version"),
        ({"batch": 0}, "/batch"),
        ({"batch": "2"}, "/batch"),
        ({"loss": "y"}, "/loss"),
        ({"outputs": [["x"]]}, "/outputs/0"),
        ({"outputs": [["x", "y"]]}, "/outputs/0/1"),
        ({"more": 1}, "/more"),
        ({"nodes": [1]}, "/nodes/0"),
        ({"nodes": [{**NODE, "shape": [2, -3]}]}, "/nodes/0/shape/1"),
        ({"nodes": [{**NODE, "shape": [2**40, 2**40]}]}, "/nodes/0/shape"),
        ({"nodes": [{**NODE, "shape": [True]}]}, "/nodes/0/shape/0"),
        ({"nodes": [{**NODE, "dtype": "int3"}]}, "/nodes/0/dtype"),
        ({"nodes": [{**NODE, "operands": [1]}]}, "/nodes/0/operands/0"),
        ({"nodes": [{**NODE, "code": "import os"}]}, "/nodes/0/code"),
        ({"nodes": [{"name": "x"}]}, "/nodes/0/op"),
        ({"nodes": [{**INSTANCE, "block": "c"}]}, "/nodes/0/block"),
        ({"blocks": {"b": [NODE, NODE]}, "nodes": [INSTANCE]}, "/nodes/0/names"),
        ({"blocks": {"b": [{**NODE, "shape": 1}]}}, "/blocks/b/0/shape"),
        ({"blocks": {"b": [INSTANCE]}}, "/blocks/b/0"),
        ({"blocks": {"b": 3}}, "/blocks/b"),
        ({"constants": [{}]}, "/constants/0/name"),
    ],
)
def test_fault_of_a_graph_is_named(changes: dict[str, Any], pointer: str) -> None:
    assert pointer_of(graph(**changes)) == "/model/graph" + pointer


def test_graph_that_unfolds_to_too_many_operators_is_not_unfolded() -> None:
    names = {**INSTANCE, "names": []}
    tracemalloc.start()
    try:
        body = graph(blocks={"b": [NODE] * 10_000}, nodes=[names] * 50)
        assert pointer_of(body) == "/model/graph/nodes"
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


# ---- by the thousand ------------------------------------------------------------------------

STRANGE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["gpt2", "h100", "../..", "http://x", "a/b", "größe", "float32", "input"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=8)
            | st.sampled_from(["model_type", "preset", "n_layer", "text_config", "nodes", "block"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
PLACES: list[tuple[str | int, ...]] = [
    (),
    ("model",),
    ("model", "config"),
    ("model", "config", "n_layer"),
    ("model", "graph", "nodes", 0),
    ("model", "graph", "nodes", 0, "shape"),
    ("model", "graph", "blocks"),
    ("cluster",),
    ("cluster", "device"),
    ("cluster", "device", "peak_flops_per_second"),
    ("cluster", "devices_per_node"),
    ("workload",),
    ("search", "mesh"),
    ("search", "mesh", "data"),
]


@given(st.sampled_from(PLACES), STRANGE)
@settings(max_examples=EXAMPLES, deadline=None)
def test_strange_value_anywhere_is_taken_or_refused_with_a_pointer(
    place: tuple[str | int, ...], value: Any
) -> None:
    body: Any = json.loads(
        json.dumps(
            {
                "model": {"graph": GRAPH} if "graph" in place else SMALL["model"],
                "cluster": DOCUMENT,
                "workload": {},
                "search": {"mesh": {"data": 8}},
            }
        )
    )
    if place:
        inner = body
        for part in place[:-1]:
            inner = inner[part]
        inner[place[-1]] = value
    else:
        body = value
    problem = refusal(lambda: check(json.dumps(body).encode()))
    if problem is not None:
        assert problem.status in (400, 422)
        assert all(f.pointer == "" or f.pointer.startswith("/") for f in problem.faults)
        assert problem.faults
        assert len(problem.detail) < 3000


def test_large_body_is_refused_or_read_in_bounded_time() -> None:
    # The worst shapes of 2 MiB: many containers, many names, many numbers, one long text.
    size = LIMITS.body_bytes // 4 - 1000  # a quarter, to be quick
    bodies = [
        b'{"a":[' + b"{}," * 600_000 + b"{}]}",
        b"{" + b",".join(b'"%d":0' % i for i in range(size // 11)) + b"}",
        b"[" + b"0," * (size // 2) + b"0]",
        b'"' + b"a" * size + b'"',
        b'"' + b"\\" * (size // 2 * 2) + b'"',
        b'{"model":{"config":{"model_type":"' + b"x" * size + b'"}},"cluster":{"preset":"h100"}}',
    ]
    started_s = time.process_time()
    for body in bodies:
        with pytest.raises(Problem):
            check(body)
    assert time.process_time() - started_s < 60
