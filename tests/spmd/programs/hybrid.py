"""Batch over one axis, weights over the other, uneven sizes, dropout: as on one device."""

import copy

import torch
from torch import nn

from autoshard import DeviceMesh, PartitionSpec, spmd

mesh = DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=["data", "model"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(51, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 37)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(37, 16)
        self.head = nn.Linear(16, 51, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))
        return self.head(x)


def step(model, ids, targets):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "logits": logits}


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = Net()
reference = copy.deepcopy(model)
sharded = spmd(
    mesh=mesh,
    in_shardings=[PartitionSpec("data"), PartitionSpec("data")],
    parameter_shardings={
        "up.*": PartitionSpec("model"),
        "down.weight": PartitionSpec(None, "model"),
        "embed.weight": PartitionSpec("model"),
        "head.weight": PartitionSpec("model"),
    },
)(step)
for _ in range(3):
    ids, targets = torch.randint(0, 51, (6, 9)), torch.randint(0, 51, (6, 9))
    state = torch.get_rng_state()
    expected = step(reference, ids, targets)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    result = sharded(model, ids, targets)
    assert torch.equal(torch.get_rng_state(), after)
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value.detach(), atol=1e-9, rtol=0)
for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(p, q, atol=1e-9, rtol=0, msg=name)
print("ok")
