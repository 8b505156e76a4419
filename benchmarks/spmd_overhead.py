"""A data-parallel step through @spmd beside the same step written by hand; ratio of their times.

By hand: each of 2 processes takes its half of the batch, runs forward and backward, flattens all
gradients into one buffer, averages it with one ``torch.distributed.all_reduce``, and steps; a
second, small one averages the loss. As the plain step does, each step makes its optimizer. Through
@spmd the step is the plain one, called in two ways: with the loop inside the body, and with one
call a step from the script (arguments are then sent, and results brought back, at each step). The
three take turns, so that what else the machine does hits all of them; the ratio is that of the best
turns, since other load only ever adds.

    python -m benchmarks.spmd_overhead [steps a turn] [turns] [batch]
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from autoshard import DeviceMesh, PartitionSpec, spmd
from autoshard.runtime.processes import World, get_pool

WORLD = 2
mesh = DeviceMesh(devices=list(range(WORLD)), axis_names=["data"])


class ConvNet(nn.Module):
    """Eight small convolutions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, kernel_size=7, stride=2, padding=3)
        self.blocks = nn.Sequential(
            *[
                nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
                for _ in range(6)
            ]
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        out: torch.Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


def by_hand(
    world: World, model: nn.Module, data: torch.Tensor, labels: torch.Tensor, steps: int
) -> float:
    """Seconds of a step on this rank."""
    half = data.chunk(world.size)[world.rank].clone()
    own = labels.chunk(world.size)[world.rank].clone()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = nn.functional.cross_entropy(model(half), own)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients]).div_(world.size)
        dist.all_reduce(flat)
        at = 0
        for g in gradients:
            g.copy_(flat[at : at + g.numel()].view_as(g))
            at += g.numel()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / world.size
        dist.all_reduce(total)
    return (time.perf_counter() - start) / steps


def step(model: nn.Module, data: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The plain step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.functional.cross_entropy(model(data), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def loop(
    model: nn.Module, data: torch.Tensor, labels: torch.Tensor, steps: int
) -> tuple[torch.Tensor, float]:
    """The same, ``steps`` times; also the seconds of one."""
    start = time.perf_counter()
    for _ in range(steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = nn.functional.cross_entropy(model(data), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss, (time.perf_counter() - start) / steps


def main(steps: int = 20, turns: int = 7, batch: int = 64) -> None:
    """Print the ratios."""
    torch.manual_seed(0)
    model = ConvNet()
    data, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    cut = [PartitionSpec("data"), PartitionSpec("data")]
    called = spmd(mesh=mesh, in_shardings=cut, out_sharding=PartitionSpec())(step)
    looped = spmd(mesh=mesh, in_shardings=cut)(loop)
    pool = get_pool(WORLD, threads=max(1, torch.get_num_threads() // WORLD))
    times: dict[str, list[float]] = {"by hand": [], "loop inside": [], "one call a step": []}
    for turn in range(turns + 1):
        hand = max(pool.run(by_hand, model, data, labels, steps))
        _, inside = looped(model, data, labels, steps)
        start = time.perf_counter()
        for _ in range(steps):
            called(model, data, labels)
        calls = (time.perf_counter() - start) / steps
        if turn:  # the first is a warm-up
            for key, seconds in zip(times, (hand, inside, calls), strict=True):
                times[key].append(seconds)
    hand = min(times["by hand"])
    for key, seconds in times.items():
        best, middle = min(seconds), median(seconds)
        print(
            f"{key:16} {best * 1e3:7.2f} ms a step (median {middle * 1e3:.2f}), "
            f"ratio {best / hand:.2f}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
