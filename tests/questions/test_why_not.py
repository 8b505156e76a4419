"""Why not: the other figures are those of an estimate, and the parts add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import MeshError, RequestError, UnknownNameError
from tests.search.model_graphs import llama

GRAPH = llama(2, batch=8).to_json()
H100 = replace(Cluster.preset("h100", 8), reserve_bytes=0, reserve=None)


def plan(memory: int | None = None) -> autoshard.Plan:
    return autoshard.optimize(GRAPH, cluster=H100, memory_limit_bytes=memory, progress=None)


@pytest.mark.parametrize("asked", ["data=8", "fsdp, data=8", "tensor, model=8", "data=4, model=2"])
def test_the_other_side_is_its_estimate(asked: str) -> None:
    best = plan()
    answer = best.why_not(asked, progress=None)
    words = [w.strip() for w in asked.split(",")]
    other = autoshard.estimate(
        GRAPH,
        cluster=H100,
        mesh=",".join(w for w in words if "=" in w),
        strategy=next((w for w in words if "=" not in w), "auto"),
        progress=None,
    )
    assert (answer.plan, answer.other) == (best.label, other.label)
    for parts, one, two in (
        (answer.time, best.predicted_step_s, other.predicted_step_s),
        (answer.memory, best.memory.total_bytes, other.memory.total_bytes),
    ):
        assert (parts[-1].plan, parts[-1].other) == (one, two)
        assert sum(p.plan for p in parts[:-1]) == pytest.approx(one)
        assert sum(p.other for p in parts[:-1]) == pytest.approx(two)
    assert sum(p.other for p in answer.messages) == pytest.approx(other.step_time.communication_s)
    assert ("slow" in answer.verdict) == (other.predicted_step_s > 1.0005 * best.predicted_step_s)
    assert answer.verdict in str(answer).replace("\n", " ")


def test_what_does_not_fit_says_so() -> None:
    answer = plan(8_000_000).why_not("data, data=8", progress=None)
    assert not answer.fits
    assert answer.verdict.startswith("does not fit: optimizer state")


def test_what_cannot_be_is_refused() -> None:
    best = plan()
    with pytest.raises(MeshError, match="3 devices, the cluster has 8"):
        best.why_not("data=3", progress=None)
    with pytest.raises(UnknownNameError, match="nearest: fsdp"):
        best.why_not("fsdpp, data=8", progress=None)
    with pytest.raises(RequestError, match="name a mesh"):
        best.why_not("fsdp", progress=None)
