"""Graphs of other batches and depths are what a capture would have given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.errors import InputError, RequestError
from autoshard.planner.capture import capture
from autoshard.planner.family import family_of
from autoshard.stretch import Growth, can_stretch, stretch
from tests.search.model_graphs import llama, mlp

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 7,
    "vocab_size": 256,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 6,
    "vocab_size": 256,
    "n_positions": 64,
}


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_family_gives_the_graph_of_a_capture(config: dict[str, object], batch: int) -> None:
    family = family_of(config, seq_len=16, dtype="bfloat16", say=lambda text: None)
    assert family.blocks == config.get("n_layer", config.get("num_hidden_layers"))
    assert len(family.few(batch).repeats[0].starts) == 3
    real = capture(config, batch=batch, seq_len=16, dtype="bfloat16").graph
    assert family.whole(batch).fingerprint == real.fingerprint


def test_blocks_that_differ_are_captured_whole() -> None:
    config = {
        **LLAMA,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 4,
    }
    family = family_of(config, seq_len=16, dtype="bfloat16", say=lambda text: None)
    assert family.depth is None
    real = capture(config, batch=4, seq_len=16, dtype="bfloat16").graph
    assert family.whole(4).fingerprint == real.fingerprint


@pytest.mark.parametrize("layers", [3, 9])
def test_a_stretched_graph_is_that_of_the_deeper_model(layers: int) -> None:
    deep = llama(layers)
    assert stretch(llama(3), layers) == replace(deep, name="llama3")
    assert stretch(mlp(layers=3), layers) == mlp(layers=layers)


def test_what_cannot_be_stretched_is_refused() -> None:
    assert not can_stretch(llama(2))
    with pytest.raises(RequestError, match="one row of at least 3"):
        stretch(llama(2), 8)
    with pytest.raises(RequestError, match="stretched to 2 blocks"):
        stretch(llama(3), 2)


def test_growth_is_in_proportion_or_refused() -> None:
    assert Growth(llama(3, 2), llama(3, 4)).at(12) == llama(3, 12)
    with pytest.raises(RequestError, match="both graphs"):
        Growth(llama(3, 2), llama(3, 2))
    with pytest.raises(RequestError, match="other operators"):
        Growth(llama(3, 2), llama(4, 4))
    with pytest.raises(RequestError, match="does not grow in proportion"):
        Growth(llama(3, 2), llama(3, 4, width=512))


def test_a_module_has_one_batch() -> None:
    from torch import nn

    with pytest.raises(InputError, match="captured at any batch"):
        family_of(nn.Linear(2, 2), seq_len=None, dtype=None, say=lambda text: None)
