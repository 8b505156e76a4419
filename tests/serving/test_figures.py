"""What inference costs: laws that prices keep, and bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autoshard
from autoshard.analyzer import analyze
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, MeshError, RequestError, UnknownNameError
from autoshard.plan import Schedule
from autoshard.planner import Plan
from autoshard.planner.capture import capture
from autoshard.search import solve
from autoshard.search.inner import Prepared, Solution
from tests.serving.models import GPT2, LLAMA

LARGE: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 65536,
}
H100 = Cluster.preset("h100", devices=8)


@cache
def large(context: int, batch: int) -> Prepared:
    found = capture(LARGE, batch=batch, seq_len=context, dtype="bfloat16", mode="decode")
    return Prepared(found.graph)


def decoded(context: int, batch: int, cluster: Cluster, sizes: tuple[int, int]) -> Solution:
    ready = large(context, batch)
    return solve(
        ready.graph,
        cluster,
        sizes,
        ("data", "model"),
        optimizer="none",
        style="fused",
        prepared=ready,
    )


def faster(cluster: Cluster, times: float) -> Cluster:
    device = cluster.device
    wider = replace(device, memory_bytes_per_second=times * device.memory_bytes_per_second)
    return replace(cluster, device=wider)


def test_time_falls_with_bandwidth() -> None:
    seconds = [
        decoded(4096, 16, faster(H100, times), (2, 4)).step_time.total_s
        for times in (0.5, 1.0, 2.0, 4.0)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.5 * seconds[2]


def test_time_and_cache_grow_with_context() -> None:
    found = [decoded(context, 16, H100, (2, 4)) for context in (512, 4096, 32768)]
    seconds = [s.step_time.total_s for s in found]
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[0]
    bytes_of = [s.memory.kv_cache_bytes for s in found]
    assert bytes_of == [bytes_of[0] * 8**i for i in range(3)]


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_nothing_is_faster_than_reading_weights_and_cache_once(batch: int) -> None:
    """On one device: all weights but the embedding's rows, and the whole cache, by bandwidth."""
    one = Cluster.preset("h100", devices=1)
    graph = large(4096, batch).graph
    found = decoded(4096, batch, one, (1, 1))
    read = sum(n.num_bytes for n in graph.parameters.values())
    read -= graph.parameters["model.embed_tokens.weight"].num_bytes
    read += sum(n.num_bytes for n in graph.inputs.values() if n.is_cache)
    least = read / one.device.memory_bytes_per_second
    assert least < found.step_time.total_s
    if batch == 256:  # few sequences wait for launches
        assert found.step_time.total_s < 1.5 * least
    assert found.step_time.backward_s == found.step_time.optimizer_s == 0


@pytest.mark.parametrize(
    ("sizes", "uses"),
    [((8, 1), "data"), ((1, 8), "tensor"), ((2, 4), "both")],
    ids=["data", "tensor", "hybrid"],
)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_cache_takes_two_values_a_head_and_token(
    sizes: tuple[int, int], uses: str, mode: Any
) -> None:
    """2 layers heads width tokens batch bytes, shared by what cuts samples or heads."""
    config = {**LARGE, "num_key_value_heads": 8}
    plan = autoshard.optimize(
        config,
        cluster=H100,
        mesh=dict(zip(("data", "model"), sizes, strict=True)),
        strategy={"data": "data", "tensor": "tensor", "both": "hybrid"}[uses],
        global_batch=16,
        dtype="bf16",
        mode=mode,
        progress=False,
        **({"context": 512} if mode == "decode" else {"seq_len": 512}),
    )
    layers, heads, width = config["num_hidden_layers"], 8, 1024 // 16
    assert plan.memory.kv_cache_bytes == 2 * layers * heads * width * 512 * 16 * 2 // 8
    assert plan.memory.gradients_bytes == plan.memory.optimizer_bytes == 0
    assert {g.phase for g in plan.collectives} <= {"forward"}


def test_replicas_need_no_messages() -> None:
    plan = autoshard.optimize(
        LARGE,
        cluster=H100,
        strategy="data",
        global_batch=16,
        mode="decode",
        context=64,
        progress=False,
    )
    assert not plan.collectives
    assert plan.outputs["tokens"].partition_spec == ("data", None)


def test_weights_are_no_larger_than_they_are_stored() -> None:
    """Nothing of training: memory is weights, cache, and a moment's values."""
    graph = capture(GPT2, batch=4, seq_len=32, mode="decode").graph
    one = Cluster.preset("h100", devices=1)
    memory = solve(graph, one, (1, 1), ("data", "model"), optimizer="none").memory
    weights = sum(n.num_bytes for n in graph.parameters.values())
    assert weights <= memory.parameters_bytes < weights + 10_000  # constants: positions
    assert memory.kv_cache_bytes == 2 * 3 * 32 * 32 * 4 * 4
    largest = max(n.num_bytes for n in graph.nodes if not n.is_leaf and n.op != "autoshard.append")
    assert memory.activations_bytes + memory.temporary_bytes < 4 * largest


def test_more_sequences_take_longer_and_give_more() -> None:
    found = [decoded(1024, batch, H100, (2, 4)).step_time.total_s for batch in (1, 8, 64, 512)]
    assert found == sorted(found)
    rates = [batch / s for batch, s in zip((1, 8, 64, 512), found, strict=True)]
    assert rates == sorted(rates)


def test_kernels_launched_one_by_one_are_slower() -> None:
    graph = analyze(LARGE, batch=1, seq_len=64, mode="decode").graph
    one = Cluster.preset("h100", devices=1)
    eager, fused = (
        solve(graph, one, (1, 1), ("data", "model"), style=style).step_time.total_s  # type: ignore[arg-type]
        for style in ("eager", "fused")
    )
    assert eager > 2 * fused


# ---- the plan -------------------------------------------------------------------------------


def test_the_document_says_what_it_is_for() -> None:
    plan = autoshard.optimize(LLAMA, cluster=H100, mode="decode", context=32, progress=False)
    assert (plan.mode, plan.context, plan.seq_len, plan.optimizer) == ("decode", 32, None, "none")
    assert (plan.objective, plan.global_batch, plan.tokens) == ("latency", 1, 1)
    assert plan.schedule == Schedule(style="fused")
    assert Plan.from_json(plan.to_json()) == plan
    text = plan.explain()
    assert "mode decode, for latency" in text
    assert "KV cache" in text
    assert "optimizer" not in text
    prompt = autoshard.optimize(LLAMA, cluster=H100, mode="prefill", seq_len=32, progress=False)
    assert (prompt.mode, prompt.context, prompt.seq_len, prompt.tokens) == ("prefill", None, 32, 32)


def test_a_plan_of_training_says_so() -> None:
    plan = autoshard.optimize(LLAMA, cluster=H100, seq_len=32, progress=False)
    assert (plan.mode, plan.context, plan.memory.kv_cache_bytes) == ("train", None, 0)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mode": "serve"}, UnknownNameError, "mode"),
    ({"mode": "decode", "objective": "cost"}, UnknownNameError, "objective"),
    ({"mode": "decode", "kernels": "fast"}, UnknownNameError, "style of kernels"),
    ({"mode": "decode", "seq_len": 8}, RequestError, "say with context how many tokens"),
    ({"mode": "prefill", "context": 8}, RequestError, "context is of mode 'decode'"),
    ({"context": 8}, RequestError, "context is of mode 'decode', found mode 'train'"),
    ({"objective": "throughput"}, RequestError, "is of inference"),
    ({"mode": "decode", "max_latency_s": 1.0}, RequestError, "add objective='throughput'"),
    (
        {"mode": "decode", "objective": "throughput", "global_batch": 4},
        RequestError,
        "leave global_batch out",
    ),
    (
        {"mode": "decode", "objective": "throughput", "max_latency_s": 0.0},
        RequestError,
        "max_latency_s must be more than 0",
    ),
    ({"mode": "decode", "optimizer": "sgd"}, RequestError, "optimizer 'sgd' is of training"),
    ({"mode": "decode", "space": "full"}, RequestError, "space 'full' is of training"),
    ({"mode": "decode", "mesh": "context=8"}, MeshError, "leave axis 'context' out"),
    ({"optimizer": "none"}, UnknownNameError, "optimizer"),
    ({"mode": "decode", "context": 0}, RequestError, "context must be a positive whole number"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=str)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        autoshard.optimize(LLAMA, cluster=H100, progress=False, **options)


def test_a_graph_of_another_mode_is_refused() -> None:
    graph = analyze(LLAMA, batch=2, seq_len=8, mode="decode").graph.to_json()
    with pytest.raises(RequestError, match="is of mode 'decode', asked for was mode 'train'"):
        autoshard.optimize(graph, cluster=H100, progress=False)
    with pytest.raises(RequestError, match="is of mode 'train', asked for was mode 'prefill'"):
        autoshard.what_if(LLAMA, ["link=2x"], cluster=H100, mode="prefill", progress=False)


@pytest.fixture(scope="module")
def short() -> Plan:
    return autoshard.optimize(LLAMA, cluster=H100, mode="decode", context=8, progress=False)


@pytest.mark.parametrize("question", ["what_if", "why_not", "export"])
def test_questions_of_training_are_refused(question: str, short: Plan) -> None:
    with pytest.raises(RequestError, match=f"{question} is of plans for training"):
        getattr(short, question)("data=8" if question == "why_not" else "hf")


def test_what_does_not_fit_says_what_fills_the_memory() -> None:
    with pytest.raises(InfeasibleError, match="does not fit on 8 devices") as caught:
        autoshard.optimize(
            LARGE,
            cluster=H100,
            mode="decode",
            context=60000,
            global_batch=4096,
            progress=False,
        )
    assert caught.value.binding.startswith("KV cache")
