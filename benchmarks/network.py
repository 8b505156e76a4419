"""The network decides, and the plan follows: two hosts, one link, three rates.

    python -m benchmarks.network [--rates 50mbit,1gbit,none] [--rounds N] [--steps N]

Two network namespaces of two processes each are joined by a link that ``tc tbf`` limits. At every
rate the pair is calibrated (``autoshard calibrate`` under torchrun on both), the search picks a
plan with the file that this writes, and every data x model plan is then trained for real, in turn.
Printed are predicted and measured seconds of each, and how far the pick is from the best. Needs
root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import autoshard
from autoshard.cluster import Cluster
from autoshard.search.outer import configurations
from benchmarks.two_hosts.hosts import TwoHosts

CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 512,
    "n_positions": 64,
    "n_embd": 192,
    "n_layer": 4,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
"""What is trained: 1.9 M parameters, whose gradients weigh about as much as the activations."""

SAMPLES, TOKENS = 8, 64
PROCESSES = 2
WITHIN = 0.05
"""How much slower than the best plan the pick may be."""


def calibrated(hosts: TwoHosts, folder: Path) -> Cluster:
    """What ``autoshard calibrate`` finds on the two hosts."""
    path = folder / "cluster.toml"
    hosts.torchrun(["-m", "autoshard.cli", "calibrate", "--out", str(path)], PROCESSES)
    return Cluster.load(path)


def plans(folder: Path, cluster: Cluster) -> tuple[dict[str, float], str]:
    """Write every plan into the folder: predicted seconds of each, and the name of the pick.

    Configurations that come to the same program are one plan.
    """
    source = folder / "config.json"
    source.write_text(json.dumps(CONFIG))

    def plan(**forced: Any) -> autoshard.Plan:
        return autoshard.optimize(
            source, cluster=cluster, global_batch=SAMPLES, seq_len=TOKENS, progress=False, **forced
        )

    found: dict[str, tuple[str, autoshard.Plan]] = {}
    for c in configurations(cluster.devices):
        mesh = dict(zip(c.axis_names, c.sizes, strict=True))
        one = plan(strategy=c.strategy, mesh=mesh)
        found.setdefault(_program(one), (c.label, one))
    best = plan()
    found.setdefault(_program(best), ("the search's own", best))
    predicted = {}
    pick = ""
    for number, (program, (label, one)) in enumerate(found.items()):
        one.save(folder / f"plan-{number}.json")
        predicted[label] = one.predicted_step_s
        if program == _program(best):
            pick = label
    return predicted, pick


def _program(plan: autoshard.Plan) -> str:
    """Equal for plans whose devices do the same."""
    program = plan.program()
    return json.dumps([repr(program.sizes), repr(sorted(program.strategies.items()))])


def compare(rate: str | None, rounds: int, steps: int) -> tuple[str, float]:
    """Calibrate, plan, measure at one rate; prints, and returns the pick and its distance."""
    with TwoHosts(rate) as hosts, tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        cluster = calibrated(hosts, folder)
        predicted, pick = plans(folder, cluster)
        hosts.torchrun(
            ["-m", "benchmarks.two_hosts.steps", str(folder), str(rounds), str(steps)], PROCESSES
        )
        seconds = json.loads((folder / "seconds.json").read_text())
    measured = {
        label: statistics.median(seconds[f"plan-{number}"])
        for number, label in enumerate(predicted)
    }
    best = min(measured, key=lambda label: measured[label])
    print(f"\nlink {rate or 'unlimited'}")
    print(f"{'plan':40}{'predicted':>12}{'measured':>12}{'error':>9}")
    for label in sorted(predicted, key=lambda label: predicted[label]):
        marks = " <- picked" * (label == pick) + " <- fastest" * (label == best)
        error = predicted[label] / measured[label] - 1
        print(
            f"{label:40}{predicted[label] * 1e3:9.1f} ms{measured[label] * 1e3:9.1f} ms"
            f"{error:+9.0%}{marks}"
        )
    away = measured[pick] / measured[best] - 1
    print(f"the pick is {away:.1%} slower than the fastest")
    return pick, away


def main(arguments: Sequence[str] = ()) -> None:
    """Compare at all rates."""
    parser = argparse.ArgumentParser(description="does the plan follow the network?")
    parser.add_argument("--rates", default="50mbit,1gbit,none", help="as tc writes them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each plan in a round")
    options = parser.parse_args(arguments)
    if reason := TwoHosts.unavailable():
        print(f"left out: {reason}")
        return
    found = {
        rate: compare(None if rate == "none" else rate, options.rounds, options.steps)
        for rate in options.rates.split(",")
    }
    print(f"\npicks: {', '.join(f'{rate}: {pick}' for rate, (pick, _) in found.items())}")
    if any(away > WITHIN for _, away in found.values()):
        sys.exit(f"a pick is more than {WITHIN:.0%} slower than the fastest plan")


if __name__ == "__main__":
    main(sys.argv[1:])
