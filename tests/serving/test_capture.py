"""What a graph of inference holds: caches, no gradients, the module's own results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from autoshard.analyzer import analyze
from autoshard.errors import CaptureError, InputError, RequestError
from autoshard.graph import Mode, ModelGraph
from autoshard.planner.capture import capture
from autoshard.planner.family import family_of
from autoshard.validation.capture_check import check_capture
from tests.serving.models import BATCH, GPT2, LLAMA, MODELS, QWEN, TOKENS, captured, windows

MODES: tuple[Mode, ...] = ("prefill", "decode")
EVERY = pytest.mark.parametrize("mode", MODES)
MODEL = pytest.mark.parametrize("name", MODELS)


@EVERY
@MODEL
def test_the_graph_computes_what_the_module_does_with_a_cache_of_transformers(
    name: str, mode: Mode
) -> None:
    """Logits, next tokens, and every key and value that the cache holds afterwards."""
    found = check_capture(captured(name, mode), seed=3)
    assert not found.skipped
    names = {c.name for c in found.checks if c.kind == "output"}
    assert names == {path for path, _ in captured(name, mode).graph.outputs}
    assert found.agrees, found.worst


@EVERY
@MODEL
def test_each_layer_has_a_cache_as_long_as_it_looks_back(name: str, mode: Mode) -> None:
    caches = {p: n for p, n in captured(name, mode).graph.inputs.items() if n.is_cache}
    assert list(caches) == [
        f"kv_cache.{layer}.{which}"
        for layer in range(len(windows(name)))
        for which in ("key", "value")
    ]
    heads, width = (4, 8) if name == "gpt2" else (2, 8)
    for path, node in caches.items():
        assert node.shape == (BATCH, heads, windows(name)[int(path.split(".")[1])], width)


@EVERY
@MODEL
def test_nothing_wants_a_gradient(name: str, mode: Mode) -> None:
    graph = captured(name, mode).graph
    assert graph.mode == mode
    assert not any(n.differentiable or n.saved or n.flops_backward for n in graph.nodes)
    assert not graph.warnings or name == "qwen2"  # two kinds of blocks


def test_decoding_adds_one_token_and_attends_to_all() -> None:
    graph = captured("llama", "decode").graph
    assert graph.inputs["input_ids"].shape == (BATCH, 1)
    attention = [n for n in graph.nodes if "attention" in n.op]
    assert len(attention) == LLAMA["num_hidden_layers"]
    for node in attention:
        query, key, value = graph.shapes(node)
        assert query == (BATCH, 8, 1, 8)
        assert key == value == (BATCH, 2, TOKENS, 8)  # heads are shared, not repeated
        assert node.flops_forward == 2 * BATCH * 8 * TOKENS * (8 + 8)


def test_a_prompt_gives_logits_of_its_last_token_alone() -> None:
    graph = captured("llama", "prefill").graph
    logits = graph.by_name[dict(graph.outputs)["logits"]]
    assert logits.shape == (BATCH, 1, LLAMA["vocab_size"])
    assert graph.by_name[graph.loss].shape == (BATCH, 1)


@EVERY
@MODEL
def test_json_gives_the_graph_back(name: str, mode: Mode) -> None:
    graph = captured(name, mode).graph
    again = ModelGraph.from_json(graph.to_json())
    assert again == graph
    assert again.fingerprint == graph.fingerprint


@EVERY
@pytest.mark.parametrize(
    ("config", "batch"), [(LLAMA, 1), (GPT2, 5), (QWEN, 5)], ids=["llama", "gpt2", "qwen2"]
)
def test_a_family_gives_the_graph_of_a_capture(
    config: dict[str, Any], mode: Mode, batch: int
) -> None:
    family = family_of(config, seq_len=TOKENS, dtype="bfloat16", say=lambda text: None, mode=mode)
    real = capture(config, batch=batch, seq_len=TOKENS, dtype="bfloat16", mode=mode).graph
    assert family.whole(batch).outputs == real.outputs
    assert family.whole(batch).fingerprint == real.fingerprint


def test_a_module_is_left_as_it_was() -> None:
    module = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).train()
    before = {n: (p.requires_grad, id(p)) for n, p in module.named_parameters()}
    found = analyze(module, batch=2, seq_len=8, mode="decode")
    assert module.training
    assert all(m.training for m in module.modules())
    assert type(module) is hf.LlamaForCausalLM
    assert {n: (p.requires_grad, id(p)) for n, p in module.named_parameters()} == before
    assert check_capture(found, seed=0).agrees


# ---- refusals -------------------------------------------------------------------------------


def test_a_module_without_a_cache_is_refused() -> None:
    with pytest.raises(RequestError, match=r"Linear takes no input_ids with a KV cache"):
        analyze(nn.Linear(4, 4), mode="decode")


def test_an_encoder_with_a_decoder_is_refused() -> None:
    with pytest.raises(RequestError, match=r"is an encoder with a decoder; mode 'prefill'"):
        analyze("t5-small", mode="prefill")


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(InputError, match=r"65 tokens are more than the 64 positions"):
        analyze(LLAMA, seq_len=65, mode="decode")


def test_inputs_of_ones_own_are_refused() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(InputError, match=r"mode 'decode' makes its inputs itself"):
        analyze(LLAMA, {"input_ids": ids}, mode="decode")


def test_attention_that_cannot_be_recognised_is_refused() -> None:
    module = hf.LlamaForCausalLM._from_config(hf.LlamaConfig(**LLAMA), attn_implementation="eager")
    with pytest.raises(CaptureError, match=r"0 calls of scaled_dot_product_attention .* 4 layers"):
        analyze(module, batch=2, seq_len=8, mode="decode")


def test_a_graph_of_another_mode_is_refused() -> None:
    document = captured("llama", "prefill").graph.to_json()
    assert analyze(document, mode="prefill").graph.mode == "prefill"
    with pytest.raises(RequestError, match=r"is of mode 'prefill', not 'decode'"):
        analyze(document, mode="decode")
