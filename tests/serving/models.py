"""Small causal language models, as configs."""

from __future__ import annotations

from functools import cache
from typing import Any

from autoshard.analyzer import Captured, analyze
from autoshard.graph import Mode

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "vocab_size": 61,
    "n_positions": 64,
    "dtype": "float32",
}
MISTRAL: dict[str, Any] = {
    **LLAMA,
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 5,
}
QWEN: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
}
MODELS = {"llama": LLAMA, "gpt2": GPT2, "mistral": MISTRAL, "qwen2": QWEN}

BATCH, TOKENS = 6, 12


@cache
def captured(name: str, mode: Mode) -> Captured:
    """A model at ``BATCH`` sequences of ``TOKENS`` tokens."""
    return analyze(MODELS[name], batch=BATCH, seq_len=TOKENS, mode=mode, name=name)


def windows(name: str) -> list[int]:
    """Places of each layer's cache."""
    config = MODELS[name]
    layers = config.get("n_layer", config.get("num_hidden_layers"))
    kinds = config.get("layer_types", ["sliding_attention"] * layers)
    window = config.get("sliding_window", TOKENS)
    return [window if kind == "sliding_attention" else TOKENS for kind in kinds]
