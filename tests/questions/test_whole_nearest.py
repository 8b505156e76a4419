"""Where nothing of the whole space fits: each change makes it fit, one step less does not."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, MeshError, RequestError, UnknownNameError
from autoshard.planner.family import Family
from autoshard.planner.whole import read_within
from autoshard.planner.whole_nearest import WholeAsked, explained_whole, in_full_space
from autoshard.search.demands import Demands, size_of, span_of
from autoshard.search.feasible import DIGITS
from autoshard.search.ladder import devices_at, divisors, place_of
from autoshard.search.space import arrangements
from autoshard.search.whole import search_whole
from autoshard.stretch import Growth
from tests.search.model_graphs import llama

LENGTH = 64


def small(devices: int, memory: int) -> Cluster:
    """Two devices to a node."""
    cluster = replace(Cluster.preset("h100", 8), reserve_bytes=0, reserve=None, devices_per_node=2)
    inside, across = cluster.tiers
    cluster = replace(
        cluster,
        devices=devices,
        tiers=(replace(inside, devices=2), replace(across, devices=16)),
    )
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory))


@cache
def family(length: int = LENGTH) -> Family:
    """A llama of six blocks, captured at two batches, as graphs."""
    one, two = (llama(3, batch=batch, seq=length) for batch in (2, 4))
    return Family(Growth(one, two), 6)


def asked_for(cluster: Cluster, **options: Any) -> WholeAsked:
    return WholeAsked(**{"family": family(), "cluster": cluster, "global_batch": 8, **options})


def fits(asked: WholeAsked) -> bool:
    """The search's own answer."""
    try:
        points = asked.points()
    except MeshError:
        return False
    return search_whole(points, asked.problems()).found.fits


def reason(asked: WholeAsked) -> InfeasibleError:
    assert not fits(asked)
    return explained_whole(asked, asked.problems(), family, lambda text: None)


@cache
def least() -> int:
    """Bytes that two devices need, 8 samples a step."""
    words = re.fullmatch(
        r"(\S+) GB on each device", reason(asked_for(small(2, 50_000))).nearest[-1]
    )
    assert words
    return round(float(words[1]) * 1e9)


def applied(text: str, asked: WholeAsked) -> tuple[WholeAsked, WholeAsked]:
    """The request with the change, and with a step less (or as it was)."""
    cluster, sizes = asked.cluster, dict(asked.demands.sizes)
    match text.split():
        case [count, "devices"]:
            place = place_of(int(count), cluster.devices_per_node)
            less = devices_at(place - 1, cluster.devices_per_node)
            both = [cluster.with_devices(n) for n in (int(count), less)]
            return replace(asked, cluster=both[0]), replace(asked, cluster=both[1])
        case ["global", "batch", count]:
            batches = divisors(8)
            more = batches[batches.index(int(count)) - 1]
            return replace(asked, global_batch=int(count)), replace(asked, global_batch=more)
        case ["sequence", "length", count]:
            lengths = divisors(LENGTH)
            more = lengths[lengths.index(int(count)) - 1]
            return replace(asked, family=family(int(count))), replace(asked, family=family(more))
        case ["optimizer", name]:
            richer = {"sgd": "sgd-momentum", "sgd-momentum": "adamw"}[name]
            return replace(asked, optimizer=name), replace(asked, optimizer=richer)
        case [size, "GB", "on", "each", "device"]:
            limit = round(float(size) * 1e9)
            step = 10 ** max(0, len(str(limit)) - DIGITS)
            return replace(asked, limit=limit), replace(asked, limit=limit - step)
        case ["recompute", kind]:
            return replace(asked, demands=asked.demands.changed(recompute=(kind,))), asked
        case ["any", *_]:
            names = [w.removeprefix("any ") for w in text.split(" and ")]
            return replace(asked, demands=asked.demands.without(names)), asked
        case [change] if found := re.fullmatch(r"([a-z-]+)(<=|=)(\d+)", change):
            name, size = found[1], int(found[3])
            less = size // 2 if size > sizes[name][0] else 2 * size
            one, other = ({**sizes, name: (n, n)} for n in (size, less))
            if found[2] == "<=":
                one, other = ({**sizes, name: (sizes[name][0], n)} for n in (size, less))
            return (
                replace(asked, demands=asked.demands.changed(sizes=one)),
                replace(asked, demands=asked.demands.changed(sizes=other)),
            )
    pytest.fail(f"not a change that this test knows: {text}")


CASES: dict[str, tuple[float, Demands, set[str]]] = {
    "memory": (0.8, Demands(), {"devices", "optimizer", "GB"}),
    "a microbatch": (1.1, Demands(sizes={"micro-batch": (8, 8)}), {"micro-batch"}),
    "no recomputation": (1.0, Demands(recompute=("none",)), {"recompute"}),
    "an axis": (1.0, Demands(sizes={"model": (1, 1), "data": (2, 2)}), {"any model and any data"}),
}
"""Share of the least memory, what is demanded, kinds of change that must be offered."""


@pytest.mark.parametrize("name", CASES)
def test_every_change_fits_and_a_step_less_does_not(name: str) -> None:
    share, demands, kinds = CASES[name]
    asked = asked_for(small(2, int(share * least())), demands=demands)
    error = reason(asked)
    assert "too much" in error.binding
    for text in error.nearest:
        change, less = applied(text, asked)
        assert fits(change), text
        assert not fits(less), text
    for kind in kinds:
        assert any(kind in text for text in error.nearest), (kind, error.nearest)


def test_what_binds_names_the_stage_and_by_how_much() -> None:
    demands = Demands(sizes={"pipeline": (2, 2)})
    found = re.search(
        r"on stage (\d) of 2: .*; (\S+) GB of (\S+) GB, (\S+) GB too much; (1 of the 1|the other)",
        reason(asked_for(small(2, int(0.5 * least())), demands=demands)).binding,
    )
    assert found
    total, limit, over = (float(found[i]) for i in (2, 3, 4))
    assert over == pytest.approx(total - limit, rel=0.02)


@pytest.mark.parametrize("share", [1.0, 1.3, 2.0])
def test_offers_of_the_full_space_fit_and_larger_microbatches_do_not(share: float) -> None:
    asked = asked_for(small(2, int(share * least())))
    offers = list(in_full_space(asked, lambda text: None))
    assert offers
    for text in offers:
        words = text.removeprefix("space full with ").split(", ")
        kinds = tuple(w.removeprefix("recompute ") for w in words if "=" not in w)
        sizes = {name: (int(n), int(n)) for name, n in (w.split("=") for w in words if "=" in w)}
        demands = Demands(sizes=sizes, recompute=kinds)
        assert fits(replace(asked, demands=demands))
        least_, most = sizes.get("micro-batch", (8, 8))
        if most < 8:
            more = {**sizes, "micro-batch": (2 * least_, 2 * most)}
            assert not fits(replace(asked, demands=demands.changed(sizes=more)))


def test_a_sampler_that_missed_what_fits_says_so() -> None:
    asked = asked_for(small(2, int(1.01 * least())), partial="1 trials")
    error = explained_whole(asked, asked.problems(), family, lambda text: None)
    assert "nothing that was looked at fits" in str(error)
    assert error.nearest == ("sampler bound and any number of trials",)
    assert fits(asked)


def test_demands_leave_what_is_as_demanded() -> None:
    cluster = small(8, 10**9)
    every = arrangements(cluster, 8, family().blocks)

    def left(**demands: Any) -> list[Any]:
        return Demands(**demands).points(cluster, 8, family().blocks)

    assert left() == every
    assert left(sizes={"micro-batch": (2, 2)}) == [a for a in every if a.micro_batch == 2]
    assert left(recompute=("full",)) == [a for a in every if a.recompute == "full"]
    in_turn = left(schedules=("1f1b", "interleaved"))
    assert in_turn == [a for a in every if a.order != "zero-bubble"] != every
    split = left(schedules=("zero-bubble",))
    assert split == [a for a in every if a.pipeline == 1 or a.order == "zero-bubble"]
    near = left(within={"model": "node"})
    assert near == [a for a in every if a.model <= 2]
    data = left(within={"data": "node"})
    assert data == [a for a in every if a.data == 1 or a.data * a.model <= 2]
    assert all(span_of(a, "pipeline") in (1, 8) for a in every)
    assert {size_of(a, "virtual-stages") for a in every} == {a.virtual_stages for a in every}
    with pytest.raises(UnknownNameError, match="unknown tier of h100 'rack'"):
        left(within={"model": "rack"})
    with pytest.raises(UnknownNameError, match="unknown recomputation 'ful'; nearest: full"):
        left(recompute=("ful",))
    with pytest.raises(UnknownNameError, match="unknown schedule 'zero'; nearest: zero-bubble"):
        left(schedules=("zero",))
    with pytest.raises(MeshError, match=r"none of .* arrangements .* has micro-batch=3"):
        left(sizes={"micro-batch": (3, 3)})


def test_demands_are_of_the_full_space() -> None:
    for options in ({"within": ["model=node"]}, {"recompute": "full"}, {"schedule": "1f1b"}):
        with pytest.raises(RequestError, match="is of the full space"):
            autoshard.optimize("gpt2", cluster="h100", progress=None, **options)
    with pytest.raises(RequestError, match="write it as model=node"):
        read_within(["model"])
    assert read_within(["tp=node"]) == read_within({"model": "node"}) == {"model": "node"}
