"""The constants of the cluster preset ``local``: processes on this machine, talking over gloo.

``python -m benchmarks.local_constants [processes]`` prints them; the preset's ``sources`` say on
what machine they were taken. Each figure is the median of the repetitions, of the slowest process.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _median(call: Callable[[], object], repeat: int) -> float:
    call()
    seconds = []
    for _ in range(repeat):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _compute() -> dict[str, float]:
    """One core by itself: matrix product, copy, small operator."""
    torch.set_num_threads(1)
    out = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        size = 768 if dtype is not torch.bfloat16 else 384
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        seconds = _median(lambda a=a, b=b: a @ b, 15)  # type: ignore[misc]
        out[f"{dtype} GFLOP/s"] = 2 * size**3 / seconds / 1e9
    x = torch.randn(8 << 20)
    y = torch.empty_like(x)
    out["copy GB/s (read + write)"] = 2 * x.numel() * 4 / _median(lambda: y.copy_(x), 15) / 1e9
    small = torch.randn(16, 16, requires_grad=True)

    def hundred() -> None:
        value = small
        for _ in range(100):
            value = value * 1.0001
        value.sum().backward()  # type: ignore[no-untyped-call]

    out["operator us (forward, backward: half)"] = _median(hundred, 15) / 200 * 1e6
    return out


def _rank(rank: int, world: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    rows = []
    for num_bytes in (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24):
        whole = torch.ones(num_bytes // 4)
        part = torch.ones(num_bytes // 4 // world)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda x=whole: dist.all_reduce(x),  # type: ignore[misc]
            "all_gather": lambda x=whole, p=part: dist.all_gather_into_tensor(x, p),  # type: ignore[misc]
            "reduce_scatter": lambda x=whole, p=part: dist.reduce_scatter_tensor(p, x),  # type: ignore[misc]
            "all_to_all": lambda x=whole: dist.all_to_all_single(torch.empty_like(x), x),  # type: ignore[misc]
        }
        for name, call in calls.items():
            seconds = torch.tensor(_median(call, 25 if num_bytes < 1 << 22 else 9))
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            rows.append((name, num_bytes, float(seconds)))
    if rank == 0:
        for name, num_bytes, seconds_ in sorted(rows):
            rate = num_bytes / seconds_ / 1e6
            print(f"{name:15} {num_bytes:>10,} bytes {seconds_ * 1e6:10.0f} us {rate:8.0f} MB/s")
    dist.destroy_process_group()


def main(world: int = 4) -> None:
    """Measure and print."""
    print(f"{os.cpu_count()} cores, torch {torch.__version__}")
    for name, value in _compute().items():
        print(f"{name:40} {value:10.2f}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print(f"gloo, {world} processes")
    mp.spawn(_rank, args=(world, port), nprocs=world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
