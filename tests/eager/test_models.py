"""Models of transformers, as they are: loss, gradients and trained parameters of one device."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoshard.sharding.mesh import DeviceMesh
from tests.eager.world import MESH, check, layout

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.filterwarnings("ignore"),
]

DATA = DeviceMesh([0, 1, 2, 3], ["data"])
MODEL = DeviceMesh([0, 1, 2, 3], ["model"])


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=4)
    )


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=37,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            max_position_embeddings=16,
        )
    )


def resnet() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            layer_type="basic",
            num_labels=5,  # type: ignore[call-arg]
        )
    )


def words(model, ids, mask):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-6)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        # With labels the model would make its logits single precision first.
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def images(model, x, labels):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-6)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(pixel_values=x, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def megatron(mesh: DeviceMesh) -> Callable[[str, torch.Tensor], Any]:
    """Matrices cut along the dim that attention heads, or the hidden layer, lie in."""
    rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query", "key", "value")

    def choose(name: str, p: torch.Tensor) -> Any:
        if p.dim() != 2:
            return None
        if any(r in name for r in rows) or "embed" in name:
            return layout(p.shape, "model", mesh=mesh)
        return layout(p.shape, None, "model", mesh=mesh)

    return choose


MESHES = {"data": DATA, "model": MODEL, "hybrid": MESH}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("make", [llama, gpt2, bert], ids=lambda f: f.__name__)
def test_language_model(make: Callable[[], Any], name: str) -> None:
    mesh = MESHES[name]
    ids = torch.randint(3, 37, (4, 8))
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[1, 6:] = 0
    cut = layout((4, 8), "data", mesh=mesh) if name != "model" else None
    check(
        words,
        make(),
        ids,
        mask,
        cuts=[cut, cut],
        mesh=mesh,
        parameters=megatron(mesh) if name != "data" else None,
        tolerance=1e-6 if make is llama else 1e-8,  # its norms are in single precision
    )


@pytest.mark.parametrize("name", MESHES)
def test_image_model_with_batch_norm(name: str) -> None:
    mesh = MESHES[name]

    def by_model(_: str, p: torch.Tensor) -> Any:
        return layout(p.shape, "model", mesh=mesh) if p.dim() == 4 and name != "data" else None

    cuts = [
        layout((8, 3, 16, 16), "data", mesh=mesh) if name != "model" else None,
        layout((8,), "data", mesh=mesh) if name != "model" else None,
    ]
    check(
        images,
        resnet(),
        torch.randn(8, 3, 16, 16),
        torch.randint(0, 5, (8,)),
        cuts=cuts,
        mesh=mesh,
        parameters=by_model,
        tolerance=1e-8,
    )
