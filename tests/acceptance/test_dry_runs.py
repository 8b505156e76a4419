"""Full-size Llamas, traced on one rank: what would be issued is what was predicted."""

from __future__ import annotations

import pytest

from autoshard.analyzer import analyze
from autoshard.cluster import Cluster
from autoshard.search import solve
from autoshard.validation import dry_run


@pytest.mark.parametrize("devices", [8, 64, 512])
@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b", "llama-3-405b"])
def test_predicted_collectives_are_those_that_a_rank_would_issue(model: str, devices: int) -> None:
    graph = analyze(model, batch=devices, seq_len=8192, dtype="bf16").graph
    inside = min(8, devices // 2)
    cluster = Cluster.preset("h100", devices=devices)
    solution = solve(graph, cluster, (devices // inside, inside), ("data", "model"))
    report = dry_run(solution.program)
    assert report.collectives.predicted > 100
    assert report.collectives.issued == report.collectives.predicted
    assert report.collectives.differences == 0, report.collectives.first


def test_the_last_device_of_an_uneven_mesh_agrees_too() -> None:
    graph = analyze("gpt2", batch=6, seq_len=64).graph
    cluster = Cluster.preset("local", devices=6)
    solution = solve(graph, cluster, (2, 3), ("data", "model"), ("batch", "tensor"))
    report = dry_run(solution.program, coordinate=(1, 2))
    assert report.passed, report.collectives.first
