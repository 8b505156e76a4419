"""Predicted beside measured step times on this machine, after a calibration.

    python -m benchmarks.local_accuracy [--processes 2] [--repeat 3] [--cluster FILE]

calibrates (or takes a cluster file), predicts GPT-2, Llama and ResNet (small configs) under data,
fsdp, tensor and, on 4 processes, hybrid, and runs each plan on real processes, optimizer included.
The constants come from the calibration alone. All plans of a model run in the same processes and
take turns of a few steps, so that what disturbs the machine disturbs all of them; a plan's time is
the median over its steps of the slowest process.

Printed are predicted beside measured seconds, the median of the absolute errors, and Kendall's tau
of the strategies of a model: over all pairs, and over those that differ by more than the noise (the
standard error of the two medians).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import transformers as hf
from torch import nn

from autoshard.analyzer import Captured
from autoshard.assemble import program_of
from autoshard.calibrate import calibrate
from autoshard.cluster import Cluster
from autoshard.planner import Plan, estimate
from autoshard.planner.capture import capture
from autoshard.program import Program
from autoshard.runtime.comm import Communicator
from autoshard.runtime.lower import lower
from autoshard.runtime.processes import Pool, World
from autoshard.validation.validate import draw_values
from autoshard.validation.values import WholeValues

ROUNDS = 2
WARM_STEPS = 1
STEPS = 4
"""Of each round, after those that warm up."""

BATCH, SEQ = 8, 128


def gpt2() -> nn.Module:
    """4 layers, hidden 384, dropout as GPT-2 has it."""
    config = hf.GPT2Config(
        vocab_size=4096,
        n_embd=384,
        n_head=6,
        n_layer=4,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """4 layers, hidden 384."""
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=4096,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=256,
        )
    )


def resnet() -> nn.Module:
    """ResNet-18."""
    config = hf.ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=100,
    )
    return hf.ResNetForImageClassification(config)


MODELS: Mapping[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "gpt2": (gpt2, {"batch": BATCH, "seq_len": SEQ}),
    "llama": (llama, {"batch": BATCH, "seq_len": SEQ}),
    "resnet": (resnet, {"batch": BATCH}),
}


def meshes(processes: int) -> dict[str, str]:
    """The mesh of each strategy; hybrid needs both axes."""
    out = {
        "data": f"data={processes}",
        "fsdp": f"data={processes}",
        "tensor": f"model={processes}",
    }
    if processes >= 4:
        out["hybrid"] = f"data={processes // 2},model=2"
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan.

    Attributes:
        model: its name.
        processes: how many ran.
        strategy: what the plan chose from.
        predicted_s: seconds of a step.
        measured_s: the same.
        noise_s: standard error of the median.
    """

    model: str
    processes: int
    strategy: str
    predicted_s: float
    measured_s: float
    noise_s: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted_s / self.measured_s - 1


def steps_of(world: World, programs: Sequence[Program], values: WholeValues) -> list[list[float]]:
    """Seconds of every step of every program, which take turns."""
    turns = []
    for program in programs:
        comm = Communicator(program.sizes, program.axis_names, timeout_s=world.timeout_s)
        module = lower(
            program,
            constants=values.constants,
            parameters=values.parameters,
            buffers=values.buffers,
            comm=comm,
        )
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
        turns.append((module, module.shard_inputs(values.inputs), optimizer))
    found: list[list[float]] = [[] for _ in turns]
    for _ in range(ROUNDS):
        for seconds, (module, inputs, optimizer) in zip(found, turns, strict=True):
            for number in range(WARM_STEPS + STEPS):
                spent = _step(module, inputs, optimizer)
                if number >= WARM_STEPS:
                    seconds.append(spent)
            world.progress("next")
    return found


def _step(module: nn.Module, inputs: tuple[Any, ...], optimizer: torch.optim.Optimizer) -> float:
    from time import perf_counter

    began = perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss, _ = module(*inputs)
    loss.backward()
    optimizer.step()
    return perf_counter() - began


def measure(captured: Captured, plans: Sequence[Plan], pool: Pool) -> list[tuple[float, float]]:
    """(seconds of a step, their standard error) of each plan."""
    programs = [program_of(captured.graph, plan) for plan in plans]
    values = draw_values(captured, captured.graph, None, 0)
    ranks = pool.run(steps_of, programs, values)
    out = []
    for index in range(len(plans)):
        # A step is over when its slowest process is.
        steps = [max(r[index][i] for r in ranks) for i in range(ROUNDS * STEPS)]
        out.append((median(steps), 1.25 * stdev(steps) / math.sqrt(len(steps))))
    return out


def run(
    processes: int, models: Sequence[str], cluster: Cluster, say: Callable[[str], None]
) -> list[Row]:
    """Predict and measure every plan on so many processes."""
    rows = []
    with Pool(processes, timeout_s=120) as pool:
        for name in models:
            make, sizes = MODELS[name]
            captured = capture(make(), **sizes)
            chosen = meshes(processes)
            plans = [
                estimate(
                    name,
                    captured=captured,
                    cluster=cluster,
                    devices=processes,
                    mesh=mesh,
                    strategy=strategy,
                    progress=None,
                )
                for strategy, mesh in chosen.items()
            ]
            found = measure(captured, plans, pool)
            for strategy, plan, (seconds, noise) in zip(chosen, plans, found, strict=True):
                row = Row(
                    model=name,
                    processes=processes,
                    strategy=strategy,
                    predicted_s=plan.step_time.total_s,
                    measured_s=seconds,
                    noise_s=noise,
                )
                rows.append(row)
                say(
                    f"{name:8}{processes:3}  {strategy:8} predicted {row.predicted_s * 1e3:7.0f} ms"
                    f"  measured {seconds * 1e3:7.0f} +- {noise * 1e3:.0f} ms  {row.error:+.0%}"
                )
    return rows


def kendall(rows: Sequence[Row], *, above_noise: bool) -> float | None:
    """Mean over models and process counts of (agreeing - disagreeing) by pairs."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.processes), []).append(row)
    taus = []
    for group in groups.values():
        signs = []
        for a, b in combinations(group, 2):
            measured = a.measured_s - b.measured_s
            if above_noise and abs(measured) < math.hypot(a.noise_s, b.noise_s):
                continue
            signs.append(math.copysign(1.0, measured * (a.predicted_s - b.predicted_s)))
        if signs:
            taus.append(fmean(signs))
    return fmean(taus) if taus else None


def summary(rows: Sequence[Row]) -> str:
    """The figures of one run."""
    tau, clear = kendall(rows, above_noise=False), kendall(rows, above_noise=True)
    return (
        f"median error {median(abs(r.error) for r in rows):.1%}, worst "
        f"{max(abs(r.error) for r in rows):.0%}; Kendall {tau:.2f}"
        + ("" if clear is None else f", of pairs that differ by more than the noise {clear:.2f}")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, predict, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--processes", default="2,4", help="numbers of processes")
    parser.add_argument("--models", default=",".join(MODELS), help="of those that are known")
    parser.add_argument("--repeat", type=int, default=1, help="runs, each with its calibration")
    parser.add_argument(
        "--save", type=Path, help="write the calibrated cluster there, measure none"
    )
    parser.add_argument("--cluster", help="a cluster file of one calibration, instead of a new one")
    parser.add_argument("--out", type=Path, help="write all rows there, as JSON")
    given = parser.parse_args(arguments)
    every: list[Row] = []
    for number in range(given.repeat):
        rows: list[Row] = []
        for processes in map(int, given.processes.split(",")):
            if given.cluster is None:
                found = calibrate(processes)
                assert found is not None
                print(
                    f"calibrated on {processes} processes in {found.seconds:.0f} s, median error "
                    f"of the fit {found.median_error():.1%}",
                    flush=True,
                )
                cluster = found.cluster
                if given.save is not None:
                    found.save(given.save)
                    continue
            else:
                cluster = Cluster.load(given.cluster)
            rows += run(
                processes,
                given.models.split(","),
                cluster,
                lambda text: print(text, flush=True),
            )
        if rows:
            print(f"run {number + 1}: {summary(rows)}", flush=True)
        every += rows
    if given.repeat > 1:
        print(f"all runs: {summary(every)}")
    if given.out is not None:
        given.out.write_text(json.dumps([asdict(r) for r in every], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
