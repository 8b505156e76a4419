"""Small sweeps: models of a few kilobytes, planned in well under a second."""

from __future__ import annotations

from typing import Any

GPT2: dict[str, Any] = {
    "name": "tiny-gpt2",
    "config": {
        "model_type": "gpt2",
        "n_embd": 24,
        "n_layer": 1,
        "n_head": 3,
        "vocab_size": 57,
        "n_positions": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
RESNET: dict[str, Any] = {
    "name": "tiny-resnet",
    "config": {
        "model_type": "resnet",
        "architectures": ["ResNetForImageClassification"],
        "num_channels": 3,
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
        "image_size": 16,
    },
}


def grid(**more: Any) -> dict[str, Any]:
    """12 points that are planned."""
    return {
        "name": "grid",
        "parameters": {
            "model": GPT2,
            "cluster": ["a100-80", "h100"],
            "devices": [1, 2, 4],
            "global_batch": [4, 8],
        },
        **more,
    }
