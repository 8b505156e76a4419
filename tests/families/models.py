"""Small models of nine families, sizes odd on purpose: what the runtime must get right.

Vocabulary 101, 3 heads over 2, batch 6 over 4, tied embeddings, 2 KV heads over 4; dropout and
stochastic depth as the configs have them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import nn

BATCH, SEQ = 6, 8


class Classifier(nn.Module):
    """An MLP with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 36), nn.ReLU(), nn.Linear(36, 36), nn.GELU())
        self.head = nn.Linear(36, 7)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and logits of ``x`` (batch, 20)."""
        logits = self.head(self.layers(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def mlp() -> nn.Module:
    return Classifier()


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=101, n_embd=24, n_head=3, n_layer=3, n_positions=16)
    )


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def bert() -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=101,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=40,
            max_position_embeddings=16,
        )
    )


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=101,
            d_model=24,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=3,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=40,
            image_size=16,
            patch_size=4,
            num_labels=7,
        )
    )


def resnet() -> nn.Module:
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[16, 24], depths=[2, 2], num_labels=7, image_size=16
        )
    )


def convnext() -> nn.Module:
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(
            hidden_sizes=[8, 12], depths=[2, 2], num_stages=2, num_labels=7, image_size=32
        )
    )


def swin() -> nn.Module:
    return hf.SwinForImageClassification(
        hf.SwinConfig(
            image_size=16,
            patch_size=2,
            embed_dim=12,
            depths=[2, 2],
            num_heads=[3, 6],
            window_size=4,
            num_labels=7,
        )
    )


TOKENS = {"input_ids": "ids", "labels": "ids"}


def example_inputs(family: str) -> dict[str, torch.Tensor]:
    """Inputs of a training step of ``BATCH`` samples."""
    make = torch.Generator().manual_seed(0)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, 101, shape, generator=make)

    if family in ("gpt2", "llama", "bert", "t5"):
        return {"input_ids": ids(BATCH, SEQ), "labels": ids(BATCH, SEQ)}
    labels = torch.randint(0, 7, (BATCH,), generator=make)
    if family == "mlp":
        return {"x": torch.randn(BATCH, 20, generator=make), "labels": labels}
    side = 32 if family == "convnext" else 16
    return {"pixel_values": torch.randn(BATCH, 3, side, side, generator=make), "labels": labels}


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    f.__name__: f for f in (mlp, gpt2, llama, bert, t5, vit, resnet, convnext, swin)
}
