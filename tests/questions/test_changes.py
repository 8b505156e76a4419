"""Changes of a request are read as they are written, or refused with what there is."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, RequestError, UnknownNameError
from autoshard.planner.changes import EXAMPLES, Asked, changed

H100 = Cluster.preset("h100", 8)


def after(text: str, **options: Any) -> Asked:
    return changed(text, Asked(H100, options), batch=64, length=1024)


def test_hardware() -> None:
    device = H100.device
    assert after("memory=0.5x").cluster.device.memory_bytes == device.memory_bytes // 2
    assert after("memory=40GB").cluster.device.memory_bytes == 40 * 10**9
    assert after("memory=0.5x", memory_limit_bytes=10**9).options["memory_limit_bytes"] == 5 * 10**8
    faster = after("peak=2x").cluster.flops_per_second("bfloat16")
    assert faster == 2 * H100.flops_per_second("bfloat16")
    assert after("peak=500T").cluster.device.peak_flops_per_second["bfloat16"] == 500e12
    assert (
        after("memory-bandwidth=2x").cluster.copy_bytes_per_second == 2 * H100.copy_bytes_per_second
    )


def test_links() -> None:
    both = after("link=2x").cluster.tiers
    assert [t.bytes_per_second for t in both] == [2 * t.bytes_per_second for t in H100.tiers]
    one = after("link.fabric=100GB/s").cluster.tiers
    assert one[0] == H100.tiers[0]
    assert one[1].bytes_per_second == 100e9
    near = after("latency.node=0.5x").cluster.tiers
    assert near[0].latency_s == H100.inside.latency_s / 2
    assert near[0].bulk_latency_s == H100.inside.bulk_latency_s / 2
    assert near[1] == H100.across
    assert after("latency=2us").cluster.inside.latency_s == pytest.approx(2e-6)


def test_sizes() -> None:
    assert after("nodes=+1").cluster.devices == 16
    assert after("nodes=3").cluster.devices == 24
    assert after("devices=2x").cluster.devices == 16
    assert after("devices=-4").cluster.devices == 4
    several = after("global-batch=2x, seq-len=512,dtype=fp32")
    assert several.rebuilds
    assert several.options == {"global_batch": 128, "seq_len": 512, "dtype": "fp32"}
    assert not after("optimizer=sgd,strategy=fsdp").rebuilds
    assert after("nodes=+1,nodes=+1").cluster.devices == 24


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_can_be_applied(name: str) -> None:
    asked = after(EXAMPLES[name])
    assert asked.cluster != H100 or asked.options


WRONG: dict[str, tuple[str, type[AutoshardError], str]] = {
    "unknown": ("lnk=2x", UnknownNameError, "unknown change 'lnk'; nearest: link"),
    "tier": ("link.rack=2x", UnknownNameError, "unknown tier of h100 'rack'"),
    "tier of memory": ("memory.node=2x", UnknownNameError, "unknown change 'memory.node'"),
    "nothing": ("link", RequestError, "change 'link': write it as link=2x"),
    "no number": ("memory=much", RequestError, "write a factor above 0"),
    "nought": ("peak=0x", RequestError, "write a factor above 0"),
    "less than none": ("nodes=-1", RequestError, "write a whole number from 1"),
    "half a node": ("devices=12", RequestError, "fill no whole nodes"),
    "part of a sample": ("global-batch=0.3x", RequestError, "write a whole number from 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused(case: str) -> None:
    text, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        after(text)


def test_a_forced_mesh_and_other_devices_are_refused() -> None:
    with pytest.raises(RequestError, match="the mesh that is forced has other devices"):
        after("devices=16", mesh={"data": 8})
