"""A row of what-if is the plan that the changed request itself gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import RequestError, UnknownNameError
from tests.search.model_graphs import llama

GRAPH = llama(2, batch=8).to_json()
H100 = replace(Cluster.preset("h100", 8), reserve_bytes=0, reserve=None)


def what_if(*changes: str, **options: Any) -> Any:
    return autoshard.what_if(GRAPH, list(changes), cluster=H100, progress=None, **options)


def test_rows_are_the_plans_of_the_changed_requests() -> None:
    device = replace(H100.device, memory_bytes=H100.device.memory_bytes // 2)
    clusters = [H100, H100.with_devices(16), replace(H100, device=device)]
    answer = what_if("nodes=+1", "memory=0.5x")
    base = None
    for outcome, cluster in zip(answer.outcomes, clusters, strict=True):
        plan = autoshard.optimize(GRAPH, cluster=cluster, progress=None)
        base = base or plan
        assert outcome.step_time_s == plan.predicted_step_s
        assert (outcome.mesh, outcome.label) == (plan.mesh, plan.label)
        assert outcome.memory_bytes == plan.memory.total_bytes
        assert outcome.gain == pytest.approx(base.predicted_step_s / plan.predicted_step_s)
        assert outcome.devices == cluster.devices
    assert [o.change for o in answer.outcomes] == ["", "nodes=+1", "memory=0.5x"]
    assert "nodes=+1" in str(answer)


def test_what_does_not_fit_says_what_binds() -> None:
    answer = what_if("memory=10MB,strategy=data")
    outcome = answer.outcomes[1]
    assert not outcome.fits
    assert outcome.gain is None
    assert "of 0.01 GB" in outcome.binding
    assert "memory=10MB,strategy=data does not fit" in str(answer)


def test_a_base_that_does_not_fit_can_be_asked_about() -> None:
    answer = what_if("memory=10x", memory_limit_bytes=3_000_000)
    assert [o.fits for o in answer.outcomes] == [False, True]
    assert answer.outcomes[1].gain is None


def test_better_hardware_is_never_slower() -> None:
    answer = what_if("link=2x", "peak=2x", "latency=0.5x", "memory-bandwidth=2x")
    assert all(o.gain is not None and o.gain >= 1 - 1e-9 for o in answer.outcomes)


def test_a_plan_remembers_what_was_forced() -> None:
    plan = autoshard.optimize(
        GRAPH, cluster=H100, mesh={"data": 2, "model": 4}, strategy="hybrid", progress=None
    )
    base, other = plan.what_if("link.node=0.1x", progress=None).outcomes
    assert base.mesh == other.mesh == plan.mesh
    assert base.step_time_s == plan.predicted_step_s
    assert other.step_time_s > base.step_time_s


def test_every_change_is_read_before_anything_is_planned() -> None:
    said: list[str] = []
    with pytest.raises(UnknownNameError, match="unknown change 'lnk'"):
        autoshard.what_if(GRAPH, ["link=2x", "lnk=2x"], cluster=H100, progress=said.append)
    assert not any("planning" in line for line in said)


def test_other_batches_need_the_model() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(RequestError, match="example_inputs fix the batch"):
        autoshard.what_if(model, "global-batch=2x", torch.zeros(8, 64), cluster=H100, progress=None)
