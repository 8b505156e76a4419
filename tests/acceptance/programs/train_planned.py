"""Trains a planned model on the processes of torchrun, and alone; the losses must agree."""

from __future__ import annotations

import copy

import torch
from torch import nn

import autoshard


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(x), labels)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    inputs = {"x": torch.randn(8, 12), "labels": torch.randint(0, 5, (8,))}
    plan = autoshard.optimize(
        model, inputs, cluster="local", devices=2, strategy="fsdp", progress=None
    )
    lowered = plan.lower()
    optimizer = torch.optim.AdamW(lowered.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    shards = lowered.shard_inputs(inputs)
    for _ in range(5):
        loss, _ = lowered(*shards)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = alone(**inputs)
        expected.backward()
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    whole = lowered.full_state_dict()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-9, atol=1e-9)
    print("equal")


if __name__ == "__main__":
    main()
