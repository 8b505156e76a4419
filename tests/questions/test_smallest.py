"""The fewest devices are enough, and the next smaller number is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, RequestError
from tests.search.model_graphs import llama

GRAPH = llama(2, batch=8).to_json()


def h100(memory: int) -> Cluster:
    cluster = replace(Cluster.preset("h100", 8), reserve_bytes=0, reserve=None, devices_per_node=2)
    inside, across = cluster.tiers
    cluster = replace(
        cluster, devices=2, tiers=(replace(inside, devices=2), replace(across, devices=32))
    )
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory))


@pytest.mark.parametrize("memory", [40_000_000, 5_000_000])
def test_it_fits_and_on_the_next_smaller_number_it_does_not(memory: int) -> None:
    cluster = h100(memory)
    plan = autoshard.smallest(GRAPH, cluster=cluster, progress=None)
    assert plan.memory.fits
    same = autoshard.optimize(GRAPH, cluster=cluster.with_devices(plan.devices), progress=None)
    assert plan.choices == same.choices
    assert f"devices: {plan.devices} are the fewest that fit" in plan.assumptions[-1]
    if plan.devices == 1:
        return
    less = plan.devices - (1 if plan.devices == 2 else 2)
    assert f"; on {less} it does not fit: " in plan.assumptions[-1]
    with pytest.raises(InfeasibleError):
        autoshard.optimize(GRAPH, cluster=cluster.with_devices(less), suggest=False, progress=None)


def test_a_step_time_is_reached_and_a_smaller_number_takes_longer() -> None:
    cluster = h100(10**9)
    times = {
        n: autoshard.optimize(
            GRAPH, cluster=cluster.with_devices(n), progress=None
        ).predicted_step_s
        for n in (1, 2, 4)
    }
    assert times[1] > times[2]
    wanted = (times[1] + times[2]) / 2
    plan = autoshard.smallest(GRAPH, cluster=cluster, step_time_s=wanted, progress=None)
    assert plan.devices == 2
    assert plan.predicted_step_s <= wanted
    assert "; on 1 the best plan takes" in plan.assumptions[-1]


def test_out_of_reach() -> None:
    with pytest.raises(InfeasibleError, match="does not fit on up to 4 devices") as caught:
        autoshard.smallest(GRAPH, cluster=h100(1_000_000), devices=4, progress=None)
    assert "GB too much" in caught.value.binding
    with pytest.raises(InfeasibleError, match=r"does not take at most 1\.00 us a step") as caught:
        autoshard.smallest(GRAPH, cluster=h100(10**9), step_time_s=1e-6, progress=None)
    assert "the fastest is" in caught.value.binding


def test_a_machine_of_its_own_has_no_more_devices() -> None:
    with pytest.raises(RequestError, match="share one machine"):
        autoshard.smallest(GRAPH, progress=None)
    with pytest.raises(RequestError, match="above 0 seconds"):
        autoshard.smallest(GRAPH, cluster="h100", step_time_s=0, progress=None)
