"""How long the whole space takes: cold starts of the command, and growth with depth and devices.

``python -m benchmarks.whole_space``: each case is a command of its own, so imports, captures and
the peak memory (of the largest of its processes, the one that captures the model) count. Counts of
what was searched do not depend on the machine.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from autoshard.analyzer import load_preset


@dataclass(frozen=True)
class Case:
    """One cold start: a preset (with another depth, where given) on a cluster."""

    model: str
    cluster: str
    devices: int
    global_batch: int
    seq_len: int
    blocks: int | None = None


PUBLIC = (
    Case("llama-3-405b", "h100", 16384, 2048, 8192),
    Case("gpt3-175b", "a100-80", 1024, 1536, 2048),
    Case("mixtral-8x22b", "h100", 256, 1024, 4096),
    Case("llama-3-70b", "h100", 64, 128, 8192),
)
DEPTH = tuple(Case("llama-3-405b", "h100", 1024, 512, 8192, blocks) for blocks in (8, 128))
DEVICES = tuple(Case("llama-3-70b", "h100", n, 2048, 8192) for n in (64, 16384))


def run(case: Case) -> tuple[float, float, dict[str, object]]:
    """(seconds, peak GiB, the plan) of a cold start."""
    with tempfile.TemporaryDirectory() as folder:
        model = case.model
        if case.blocks is not None:
            document = load_preset(case.model) | {"num_hidden_layers": case.blocks}
            (Path(folder) / "config.json").write_text(json.dumps(document))
            model = str(Path(folder) / "config.json")
        command = [
            sys.executable,
            "-m",
            "autoshard.cli",
            "plan",
            model,
            "--space",
            "full",
            "--json",
        ]
        command += ["--cluster", case.cluster, "--devices", str(case.devices), "--dtype", "bf16"]
        command += ["--global-batch", str(case.global_batch), "--seq-len", str(case.seq_len)]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return seconds, peak, json.loads(done.stdout)


def _cpu_s() -> float:
    """Of all commands so far and their processes; other work changes it less than the wall's."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(title: str, cases: tuple[Case, ...]) -> list[float]:
    """Run and print a group; gives the seconds of each."""
    print(title)
    out = []
    for case in cases:
        before = _cpu_s()
        seconds, peak, plan = run(case)
        bound, step = plan["lower_bound_s"], plan["step_time"]["total_s"]  # type: ignore[index]
        depth = "" if case.blocks is None else f", {case.blocks} blocks"
        print(
            f"  {case.model}{depth} on {case.devices:,} {case.cluster}: {seconds:.1f} s "
            f"({_cpu_s() - before:.1f} s of CPU), "
            f"largest process so far {peak:.2f} GiB; step {step:.3f} s, within "
            f"{step / bound - 1:.2%} of the bound"  # type: ignore[operator]
        )
        print(f"    {plan['label']}, {plan['schedule']}")
        print(f"    {plan['assumptions'][-1]}")  # type: ignore[index]
        out.append(seconds)
    return out


def main() -> None:
    """Everything."""
    show("cold starts of the command", PUBLIC)
    few, many = show("depth", DEPTH)
    print(f"  128 blocks take {many / few:.2f} times what 8 take")
    few, many = show("devices", DEVICES)
    print(f"  16,384 devices take {many / few:.2f} times what 64 take")


if __name__ == "__main__":
    main()
