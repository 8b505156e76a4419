"""One process of the measurement: every plan of a folder, trained in turn, several rounds.

    torchrun ... -m benchmarks.two_hosts.steps FOLDER ROUNDS STEPS

The plans take turns, so that a machine that is slower for a while is so for all of them. Rank 0
writes ``seconds.json`` into the folder: of each plan, the seconds of every step, of the slowest
process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import autoshard


def main(folder: Path, rounds: int, steps: int) -> None:
    """Measure all plans."""
    torch.set_num_threads(1)
    found = {}
    for path in sorted(folder.glob("plan-*.json")):
        plan = autoshard.Plan.load(path)
        mine = plan.lower()
        torch.manual_seed(0)
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        assert plan.seq_len is not None
        tokens = torch.randint(0, vocab, (plan.global_batch, plan.seq_len))
        batch = mine.shard_inputs({"input_ids": tokens, "labels": tokens})
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)
        found[path.stem] = mine, batch, optimizer
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, (mine, shards, optimizer) in found.items():
            for step in range(steps + 1):
                dist.barrier()
                start = time.perf_counter()
                loss, _ = mine(*shards)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                took = torch.tensor([time.perf_counter() - start])
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if step:
                    seconds[name].append(took.item())
    if dist.get_rank() == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
