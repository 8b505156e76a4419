"""An operator and its rule, made in the script, some of it after the ranks have started."""

import copy

import torch
from torch import nn

import autoshard
from autoshard import DeviceMesh, PartitionSpec, profiler, spmd

mesh = DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=["data", "model"])
assert spmd(mesh=mesh)(lambda x: x + 1)(1) == 2


@torch.library.custom_op("script::smooth", mutates_args=())
def smooth(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    y = x * gain
    return y - y.mean(-1, keepdim=True)


@smooth.register_fake
def _(x, gain):
    return torch.empty_like(x)


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, gradient):
    x, gain = ctx.saved_tensors
    centred = gradient - gradient.mean(-1, keepdim=True)
    return centred * gain, (centred * x).sum(tuple(range(x.dim() - 1)))


smooth.register_autograd(backward, setup_context=keep)


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.gain = nn.Parameter(torch.rand(16))

    def forward(self, x):
        return torch.ops.script.smooth(self.up(x), self.gain).pow(2).mean()


def step(model, x):
    loss = model(x)
    loss.backward()
    return loss


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sharded = spmd(mesh=mesh, in_shardings=[PartitionSpec("data")])(step)


def forward_gathers():
    """Runs a step, compares it with one device, and counts the gathers before the operator."""
    model, x = Smooth(), torch.randn(64, 8)
    reference = copy.deepcopy(model)
    with profiler() as prof:
        loss = sharded(model, x)
    torch.testing.assert_close(loss, step(reference, x).detach(), atol=1e-12, rtol=0)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-12, rtol=0)
    return sum(r.op == "all_gather" and r.phase == "forward" for r in prof.collectives)


assert forward_gathers() == 1  # nobody knows it: it runs whole
assert torch.is_tensor(spmd(mesh=mesh)(lambda x: smooth(x, x))(torch.ones(2, 3)))
autoshard.sharding_rule("script::smooth", "b d, d -> b d", whole="d")
assert forward_gathers() == 0
print("ok")
