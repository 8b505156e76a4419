"""Three steps of data parallelism, the optimizer made outside: as on one device."""

import copy
import sys

import torch
from torch import nn

from autoshard import DeviceMesh, PartitionSpec, profiler, spmd

world = int(sys.argv[1]) if len(sys.argv) > 1 else 4
mesh = DeviceMesh(devices=list(range(world)), axis_names=["data"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.middle = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)]
        )
        self.last = nn.Linear(8, 10)

    def forward(self, x):
        return self.last(self.middle(self.first(x)).mean((2, 3)))


def step(model, optimizer, scheduler, images, labels):
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = Net()
reference = copy.deepcopy(model)
optimizer, scheduler = trained(model)
reference_optimizer, reference_scheduler = trained(reference)
sharded = spmd(mesh=mesh, in_shardings={"images": PartitionSpec("data")})(step)
parameters = list(model.parameters())
for _ in range(3):
    images, labels = torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))
    expected = step(reference, reference_optimizer, reference_scheduler, images, labels)
    with profiler() as prof:
        loss = sharded(model, optimizer, scheduler, images, labels)
    torch.testing.assert_close(loss, expected.detach(), atol=1e-9, rtol=0)
for p, q in zip(model.parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(p, q, atol=1e-9, rtol=0)
    torch.testing.assert_close(p.grad, q.grad, atol=1e-9, rtol=0)
    ours, theirs = optimizer.state[p], reference_optimizer.state[q]
    assert list(ours) == list(theirs)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], atol=1e-9, rtol=0)
assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
assert optimizer.param_groups[0]["lr"] == reference_optimizer.param_groups[0]["lr"]
assert scheduler.last_epoch == reference_scheduler.last_epoch
large = [r for r in prof.collectives if r.op == "all_reduce" and r.bytes > 1000]
assert 1 <= len(large) <= 2, prof.collectives
assert "slowest" in prof.summary()
print("ok")
