"""Small models of nine families, with arguments and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

Family = tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]

BATCH, SEQ, VOCABULARY, CLASSES = 2, 12, 61, 10
GENERATOR = torch.Generator().manual_seed(7)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)


def ids(high: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, high, (BATCH, SEQ), generator=GENERATOR)


def text() -> dict[str, torch.Tensor]:
    labels = ids()
    labels[0, 2:5] = -100
    return {"input_ids": ids(), "labels": labels}


def image(size: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(BATCH, 3, size, size, generator=GENERATOR),
        "labels": torch.randint(0, CLASSES, (BATCH,), generator=GENERATOR),
    }


def of(cls: Any, config: Any) -> Callable[[], nn.Module]:
    return lambda: cls(config).train()


def gpt2(**changes: Any) -> Callable[[], nn.Module]:
    options: dict[str, Any] = {
        "n_layer": 3,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return of(hf.GPT2LMHeadModel, hf.GPT2Config(**options | changes))


def llama(**changes: Any) -> Callable[[], nn.Module]:
    options: dict[str, Any] = {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    return of(hf.LlamaForCausalLM, hf.LlamaConfig(**options | changes))


FAMILIES: dict[str, Family] = {
    "mlp": (
        lambda: MLP(),
        {
            "x": torch.randn(BATCH, 16, generator=GENERATOR),
            "y": torch.randint(0, CLASSES, (BATCH,), generator=GENERATOR),
        },
    ),
    "gpt2": (gpt2(), text()),
    "llama": (llama(), text()),
    "bert": (
        of(
            hf.BertForMaskedLM,
            hf.BertConfig(
                num_hidden_layers=3,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                vocab_size=VOCABULARY,
                max_position_embeddings=64,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            ),
        ),
        text(),
    ),
    "t5": (
        of(
            hf.T5ForConditionalGeneration,
            hf.T5Config(
                num_layers=3,
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_heads=4,
                vocab_size=VOCABULARY,
                dropout_rate=0.0,
                use_cache=False,
                decoder_start_token_id=0,
            ),
        ),
        text(),
    ),
    "vit": (
        of(
            hf.ViTForImageClassification,
            hf.ViTConfig(
                num_hidden_layers=3,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                image_size=32,
                patch_size=8,
                num_labels=CLASSES,
            ),
        ),
        image(32),
    ),
    "resnet": (
        of(
            hf.ResNetForImageClassification,
            hf.ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 32], depths=[3, 3], num_labels=CLASSES
            ),
        ),
        image(32),
    ),
    "convnext": (
        of(
            hf.ConvNextForImageClassification,
            hf.ConvNextConfig(
                hidden_sizes=[16, 32],
                depths=[3, 3],
                num_stages=2,
                num_labels=CLASSES,
                image_size=32,
            ),
        ),
        image(32),
    ),
    "swin": (
        of(
            hf.SwinForImageClassification,
            hf.SwinConfig(
                image_size=32,
                patch_size=2,
                embed_dim=16,
                depths=[4, 2],
                num_heads=[2, 4],
                window_size=4,
                num_labels=CLASSES,
                drop_path_rate=0.0,
            ),
        ),
        image(32),
    ),
}
