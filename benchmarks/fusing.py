"""1,000 gradients of 1,000 elements on 4 processes: fused into buckets, and one at a time.

Both in one run and in turns; the figure is the time in which at least one message was under way,
as :func:`autoshard.profiler` measures it, the median over turns of the mean over ranks.

    python -m benchmarks.fusing [turns] [gradients] [elements]
"""

from __future__ import annotations

import sys
import warnings
from statistics import fmean, median

import torch
from torch import nn

from autoshard import DeviceMesh, PartitionSpec, profiler, spmd
from autoshard.runtime.spmd import SmallCutWarning

mesh = DeviceMesh(devices=[0, 1, 2, 3], axis_names=["data"])


class Scales(nn.Module):
    """A sum of products with many small parameters."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(elements)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number."""
        total = x.new_zeros(())
        for scale in self.scales:
            total = total + (x * scale).sum()
        return total


def backward(model: nn.Module, x: torch.Tensor) -> None:
    """Gradients of all parameters."""
    model.zero_grad()
    model(x).backward()


def measure(turns: int, count: int, elements: int) -> dict[str, tuple[float, int]]:
    """Seconds of communication and number of gradient messages, fused and one at a time."""
    torch.manual_seed(0)
    model, x = Scales(count, elements), torch.randn(8, elements)
    ways = {"fused": None, "one at a time": 1}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    messages = dict.fromkeys(ways, 0)
    for turn in range(turns + 1):
        for way, bucket_bytes in ways.items():
            step = spmd(mesh=mesh, in_shardings=[PartitionSpec("data")], bucket_bytes=bucket_bytes)(
                backward
            )
            with profiler() as prof:
                step(model, x)
            if turn:  # the first is a warm-up
                (call,) = prof.calls
                seconds[way].append(fmean(rank.communication_s for rank in call.ranks))
                messages[way] = sum(record.phase == "backward" for record in prof.collectives)
    return {way: (median(seconds[way]), messages[way]) for way in ways}


def main(turns: int = 3, count: int = 1000, elements: int = 1000) -> None:
    """Print both, and their ratio."""
    warnings.simplefilter("ignore", SmallCutWarning)
    found = measure(turns, count, elements)
    for way, (seconds, messages) in found.items():
        print(f"{way:14} {messages:5} messages, {seconds * 1e3:8.2f} ms of communication")
    print(f"ratio {found['one at a time'][0] / found['fused'][0]:.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
