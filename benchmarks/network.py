"""The network decides, and the plan follows: two hosts, one link, three rates.

    python -m benchmarks.network [--rates 50mbit,1gbit,none] [--rounds N] [--keep FOLDER]

Two network namespaces of two processes each are joined by a link that ``tc tbf`` limits. At every
rate the pair is calibrated (``autoshard calibrate`` under torchrun on both), and the search picks a
plan with the file that this writes. Then every data x model plan, of all rates, is trained for real
at each rate, in turn. Printed are predicted and measured seconds of each, and how far the pick is
from the best. Needs root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import autoshard
from autoshard.cluster import Cluster
from autoshard.plan import Schedule
from autoshard.planner.capture import capture
from autoshard.program import Program
from autoshard.search.cost import CostModel
from autoshard.search.outer import configurations
from autoshard.search.price import price
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


def calibrated(rate: str | None, folder: Path) -> Cluster:
    """What ``autoshard calibrate`` finds on the two hosts; a file that is there is taken."""
    path = folder / "cluster.toml"
    if path.exists():
        return Cluster.load(path)
    with TwoHosts(rate) as hosts:
        hosts.torchrun(["-m", "autoshard.cli", "calibrate", "--out", str(path)], PROCESSES)
    return Cluster.load(path)


class Plans:
    """The plans of all rates; those whose devices do the same are one.

    Args:
        folder: for the model's config and the plans.
    """

    def __init__(self, folder: Path) -> None:
        self.source = folder / "config.json"
        self.source.write_text(json.dumps(CONFIG))
        self.folder = folder
        for earlier in folder.glob("plan-*.json"):
            earlier.unlink()
        self.captured = capture(self.source, batch=SAMPLES, seq_len=TOKENS)
        self.programs: dict[str, Program] = {}
        self._names: dict[str, str] = {}

    def add(self, cluster: Cluster) -> str:
        """Each configuration's best plan with this cluster's prices; the name of the search's."""
        for c in configurations(cluster.devices):
            mesh = dict(zip(c.axis_names, c.sizes, strict=True))
            self._add(self._plan(cluster, strategy=c.strategy, mesh=mesh))
        return self._add(self._plan(cluster))

    def predicted(self, cluster: Cluster) -> dict[str, float]:
        """Seconds of a step of every plan, by the cluster's prices."""
        return {
            name: price(
                CostModel.of(program, cluster, "adamw", Schedule()), program
            ).step_time.total_s
            for name, program in self.programs.items()
        }

    def _plan(self, cluster: Cluster, **forced: Any) -> autoshard.Plan:
        return autoshard.optimize(
            self.source,
            cluster=cluster,
            captured=self.captured,
            global_batch=SAMPLES,
            seq_len=TOKENS,
            progress=False,
            **forced,
        )

    def _add(self, plan: autoshard.Plan) -> str:
        program = plan.program()
        done = json.dumps([repr(program.sizes), repr(sorted(program.strategies.items()))])
        if done not in self._names:
            same = sum(name.startswith(plan.label) for name in self.programs)
            name = f"{plan.label} ({same + 1})" if same else plan.label
            plan.save(self.folder / f"plan-{len(self.programs)}.json")
            self._names[done] = name
            self.programs[name] = program
        return self._names[done]


def measured(rate: str | None, folder: Path, rounds: int, steps: int) -> list[float]:
    """Seconds of a step of every plan of the folder, in order, at one rate."""
    arguments = ["-m", "benchmarks.two_hosts.steps", str(folder), str(rounds), str(steps)]
    with TwoHosts(rate) as hosts:
        hosts.torchrun(arguments, PROCESSES, timeout_s=1200.0)
    seconds = json.loads((folder / "seconds.json").read_text())
    return [statistics.median(seconds[f"plan-{number}"]) for number in range(len(seconds))]


def show(
    rate: str, predicted: Mapping[str, float], seconds: Mapping[str, float], pick: str
) -> float:
    """Print one rate's table; how much slower the pick is than the fastest."""
    best = min(seconds, key=lambda name: seconds[name])
    print(f"\nlink {rate}")
    print(f"{'predicted':>12}{'measured':>12}{'error':>7}  plan")
    for name in sorted(predicted, key=lambda name: predicted[name]):
        marks = " <- picked" * (name == pick) + " <- fastest" * (name == best)
        error = predicted[name] / seconds[name] - 1
        print(
            f"{predicted[name] * 1e3:9.1f} ms{seconds[name] * 1e3:9.1f} ms{error:+7.0%}  "
            f"{name}{marks}"
        )
    away = seconds[pick] / seconds[best] - 1
    print(f"the pick is {away:.1%} slower than the fastest", flush=True)
    return away


def compare(rates: Sequence[str], rounds: int, steps: int, folder: Path) -> bool:
    """Calibrate at all rates, plan for each, measure all plans at each; whether all picks are good.

    ``folder`` is left with cluster files and plans.
    """
    limits = {rate: None if rate == "none" else rate for rate in rates}
    clusters = {}
    for rate, limit in limits.items():
        (folder / rate).mkdir(parents=True, exist_ok=True)
        clusters[rate] = calibrated(limit, folder / rate)
    plans = Plans(folder)
    picks = {rate: plans.add(cluster) for rate, cluster in clusters.items()}
    away = []
    for rate, limit in limits.items():
        seconds = dict(zip(plans.programs, measured(limit, folder, rounds, steps), strict=True))
        away.append(show(rate, plans.predicted(clusters[rate]), seconds, picks[rate]))
    print("\npicks:", *(f"{rate}: {pick}" for rate, pick in picks.items()), sep="\n  ")
    return max(away) <= WITHIN


def main(arguments: Sequence[str] = ()) -> None:
    """Compare at all rates."""
    parser = argparse.ArgumentParser(description="does the plan follow the network?")
    parser.add_argument("--rates", default="50mbit,1gbit,none", help="as tc writes them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each plan in a round")
    parser.add_argument("--keep", type=Path, help="for cluster files (taken where there) and plans")
    options = parser.parse_args(arguments)
    if reason := TwoHosts.unavailable():
        print(f"left out: {reason}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        if not compare(options.rates.split(","), options.rounds, options.steps, folder):
            sys.exit(f"a pick is more than {WITHIN:.0%} slower than the fastest plan")


if __name__ == "__main__":
    main(sys.argv[1:])
