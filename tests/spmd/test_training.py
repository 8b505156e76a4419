"""Twenty steps of AdamW through ``@spmd``: losses, weights, buffers and state of one device."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import DeviceMesh, PartitionSpec, spmd

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 20
TOLERANCE = 1e-8
MESHES = {
    "data": DeviceMesh(devices=[0, 1, 2, 3], axis_names=["data"]),
    "model": DeviceMesh(devices=[0, 1, 2, 3], axis_names=["model"]),
    "hybrid": DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=["data", "model"]),
}


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def resnet() -> nn.Module:
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


def gpt2() -> nn.Module:
    """With dropout, as it comes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=4)
    )


def step(model, optimizer, inputs, labels):
    # With labels a language model would make its logits single precision first.
    logits = model(inputs).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def loop(model, optimizer, inputs, labels):
    return [step(model, optimizer, x, y) for x, y in zip(inputs, labels, strict=True)]


def batches(make: Callable[[], nn.Module]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if make is resnet:
        inputs = [torch.randn(8, 3, 16, 16) for _ in range(STEPS)]
        return inputs, [torch.randint(0, 5, (8,)) for _ in range(STEPS)]
    inputs = [torch.randint(0, 37, (4, 8)) for _ in range(STEPS)]
    return inputs, [torch.randint(0, 37, (4, 8)) for _ in range(STEPS)]


def cut_weights(name: str, parameter: nn.Parameter) -> PartitionSpec:
    """Convolutions and tables along dim 0; GPT-2's matrices along rows or columns in turn."""
    if parameter.dim() == 4 or name.endswith(("wte.weight", "wpe.weight")):
        return PartitionSpec("model")
    if name.endswith("c_proj.weight"):
        return PartitionSpec("model")
    if name.endswith(("c_attn.weight", "c_fc.weight")):
        return PartitionSpec(None, "model")
    if name.endswith(("c_attn.bias", "c_fc.bias")):
        return PartitionSpec("model")
    return PartitionSpec()


CASES = [(make, name, True) for make in (resnet, gpt2) for name in MESHES]
CASES.append((gpt2, "hybrid", False))


@pytest.mark.parametrize(
    ("make", "name", "inside"),
    CASES,
    ids=[f"{m.__name__}, {n}, one call{'' if i else ' a step'}" for m, n, i in CASES],
)
def test_training_is_that_of_one_device(
    make: Callable[[], nn.Module], name: str, inside: bool
) -> None:
    ours = make()
    theirs = copy.deepcopy(ours)
    inputs, labels = batches(make)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (ours, theirs)]
    batch = PartitionSpec() if name == "model" else PartitionSpec("data")
    many: Any = [batch] * STEPS if inside else batch
    sharded = spmd(
        mesh=MESHES[name],
        in_shardings={"inputs": many, "labels": many},
        parameter_shardings=cut_weights if name != "data" else None,
    )(loop if inside else step)

    before = torch.get_rng_state()
    expected = [v.detach() for v in loop(theirs, optimizers[1], inputs, labels)]
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    if inside:
        losses = sharded(ours, optimizers[0], inputs, labels)
    else:
        losses = [sharded(ours, optimizers[0], x, y) for x, y in zip(inputs, labels, strict=True)]

    assert torch.equal(torch.get_rng_state(), after)
    for number, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        assert abs(float(loss) - float(wanted)) < TOLERANCE, number
    assert float(expected[0]) != float(expected[-1])
    kept = dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(kept)
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(value, kept[key], atol=TOLERANCE, rtol=0, msg=key)
    for (key, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        state, wanted_state = optimizers[0].state[p], optimizers[1].state[q]
        assert list(state) == list(wanted_state) == ["step", "exp_avg", "exp_avg_sq"]
        assert float(state["step"]) == STEPS
        for part in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                state[part], wanted_state[part], atol=TOLERANCE, rtol=0, msg=f"{part} of {key}"
            )
