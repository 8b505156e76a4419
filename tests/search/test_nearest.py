"""What would fit is true: with the change the search finds a plan, with a step less it does not."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError
from autoshard.graph import ModelGraph
from autoshard.search import Asked, explained, search
from autoshard.search.feasible import DIGITS, Feasible, is_hopeless
from autoshard.search.ladder import devices_at, divisors, first, place_of
from tests.search.model_graphs import llama, mlp


def h100(devices: int, memory: int) -> Cluster:
    cluster = replace(Cluster.preset("h100", devices), reserve_bytes=0)
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory))


def a_llama(batch: int, length: int | None) -> ModelGraph:
    return llama(2, batch=batch, seq=length or 16)


@dataclass(frozen=True)
class Case:
    """A request that nothing fits, and the kinds of change that its answer must have."""

    asked: Asked
    kinds: set[str]


def case(devices: int, memory: int, *kinds: str, batch: int = 8, **asked: Any) -> Case:
    graph = a_llama(batch, None)
    return Case(Asked(graph=graph, cluster=h100(devices, memory), **asked), {*kinds, "GB"})


CASES = {
    "little of everything": case(2, 8_000_000, "devices", "optimizer"),
    "activations": case(2, 18_000_000, "devices", "batch", "length", batch=128),
    "one device": case(1, 12_000_000, "devices"),
    "two nodes": case(8, 2_500_000, "devices"),
    "data": case(8, 12_000_000, "strategy", "optimizer", strategy="data"),
    "a strategy on a mesh": case(
        8, 8_000_000, "strategy", mesh={"data": 1, "model": 8}, strategy="data"
    ),
    "a mesh": case(8, 4_300_000, "mesh", mesh={"data": 8, "model": 1}, strategy="hybrid"),
    "both": case(8, 4_200_000, "both", mesh={"data": 8, "model": 1}, strategy="fsdp"),
    "a trial": case(8, 8_000_000, "trials", trials=1),
}


def reason(asked: Asked, regraph: Any = a_llama) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        run(asked)
    return explained(caught.value, asked, regraph)


def run(asked: Asked) -> Any:
    return search(
        asked.graph,
        asked.cluster,
        optimizer=asked.optimizer,
        strategy=asked.strategy,
        mesh=asked.mesh,
        memory_limit=asked.memory_limit,
        pins=asked.pins,
        trials=asked.trials,
    )


def fits(asked: Asked) -> bool:
    try:
        return bool(run(asked).best.fits)
    except InfeasibleError:
        return False


def applied(asked: Asked, text: str) -> tuple[str, Asked, Asked | None]:
    """Its kind, the request with the change, and with one step less (None: the request itself)."""
    graph, cluster = asked.graph, asked.cluster
    match text.split():
        case [count, "devices", *on]:
            place = place_of(int(count), cluster.devices_per_node)
            mesh = None if on else asked.mesh
            less = devices_at(place - 1, cluster.devices_per_node)
            both = (cluster.with_devices(n) for n in (int(count), less))
            one, other = (replace(asked, cluster=c, mesh=mesh) for c in both)
            return "devices", one, other
        case ["global", "batch", count]:
            more = divisors(graph.batch)[divisors(graph.batch).index(int(count)) - 1]
            one, other = (replace(asked, graph=a_llama(b, None)) for b in (int(count), more))
            return "batch", one, other
        case ["sequence", "length", count]:
            more = divisors(16)[divisors(16).index(int(count)) - 1]
            one, other = (replace(asked, graph=a_llama(graph.batch, s)) for s in (int(count), more))
            return "length", one, other
        case ["optimizer", name]:
            richer = {"sgd": "sgd-momentum", "sgd-momentum": asked.optimizer}[name]
            one, other = (replace(asked, optimizer=o) for o in (name, richer))
            return "optimizer", one, other
        case [size, "GB", "on", "each", "device"]:
            limit = round(float(size) * 1e9)
            step = 10 ** max(0, len(str(limit)) - DIGITS)
            one, other = (replace(asked, memory_limit=n) for n in (limit, limit - step))
            return "GB", one, other
        case ["strategy", "auto"]:
            return "strategy", replace(asked, strategy="auto"), None
        case ["any", "mesh"]:
            return "mesh", replace(asked, mesh=None), None
        case ["strategy", "auto", "on", "any", "mesh"]:
            alone = (replace(asked, mesh=None), replace(asked, strategy="auto"))
            assert not any(fits(a) for a in alone)
            return "both", replace(asked, strategy="auto", mesh=None), None
        case ["no", "constraint", "on", name]:
            rest = {n: p for n, p in asked.pins.items() if n != name}
            return "constraint", replace(asked, pins=rest), None
        case ["any", "number", "of", "trials"]:
            return "trials", replace(asked, trials=None), None
    pytest.fail(f"not a change that this test knows: {text}")


@pytest.mark.parametrize("name", CASES)
def test_every_change_fits_and_a_step_less_does_not(name: str) -> None:
    asked = CASES[name].asked
    found = [applied(asked, text) for text in reason(asked).nearest]
    for kind, change, less in found:
        assert fits(change), kind
        assert not fits(less or asked), kind
    assert {kind for kind, _, _ in found} >= CASES[name].kinds


@settings(max_examples=6, deadline=None)
@given(
    devices=st.sampled_from([1, 2, 4, 8, 16]),
    share=st.floats(0.05, 0.95),
    strategy=st.sampled_from(["auto", "data", "fsdp", "tensor"]),
    batch=st.sampled_from([1, 8, 12]),
)
def test_least_memory_is_least(devices: int, share: float, strategy: Any, batch: int) -> None:
    """And below it the quick answer is the search's own."""
    asked = Asked(graph=a_llama(batch, None), cluster=h100(devices, 10**9), strategy=strategy)
    least = Feasible(asked).least
    assert fits(replace(asked, memory_limit=least.limit))
    assert not fits(replace(asked, memory_limit=least.limit - least.step))
    assert least.memory.total_bytes <= least.limit
    other = replace(asked, memory_limit=int(least.limit * (share + 0.5)))
    assert Feasible(other).fits() == fits(other)
    assert not (is_hopeless(other) and fits(other))


def test_constraints_in_the_way_are_named() -> None:
    graph = llama(2, batch=8)
    names = [n for n in graph.parameters if graph.parameters[n].num_bytes > 10_000][:2]
    asked = Asked(graph=graph, cluster=h100(8, 3_000_000), pins={n: {} for n in names})
    least = Feasible(replace(asked, pins={names[0]: {}})).least.limit
    asked = replace(asked, memory_limit=least)
    assert fits(replace(asked, pins={names[0]: {}}))
    error = reason(asked, None)
    assert any(text.startswith("no constraint on") for text in error.nearest)
    for text in error.nearest:
        kind, change, _ = applied(asked, text)
        assert fits(change), kind


def test_what_binds_is_of_the_plan_that_needs_least() -> None:
    asked = CASES["little of everything"].asked
    error = reason(asked)
    least = Feasible(asked).least
    assert f"{least.memory.total_bytes / 1e9:.4g} GB of 0.008 GB" in error.binding
    assert re.search(r"(optimizer state|parameters|activations) \S+ GB \(then ", error.binding)


def test_fixed_inputs_and_stored_graphs_offer_no_other_size() -> None:
    asked = CASES["activations"].asked
    for regraph in (None, lambda batch, length: asked.graph):
        texts = reason(asked, regraph).nearest
        assert not any(t.startswith(("global", "sequence")) for t in texts)


def test_processes_of_one_machine_are_not_multiplied() -> None:
    local = Cluster.preset("local", 2)
    asked = Asked(graph=mlp(), cluster=local, memory_limit=local.reserve_bytes + 1000)
    assert not any("devices" in t for t in reason(asked, None).nearest)


@given(st.integers(-5, 5), st.integers(0, 400), st.integers(0, 400))
def test_the_first_of_a_ladder(low: int, length: int, threshold: int) -> None:
    asked: list[int] = []

    def holds(n: int) -> bool:
        asked.append(n)
        return n >= threshold

    found = first(low, low + length, holds)
    assert found == (max(low, threshold) if threshold <= low + length else None)
    assert len(asked) <= 24


@given(st.integers(1, 5000), st.sampled_from([1, 4, 8, 72]))
def test_places_of_devices_are_their_order(place: int, per_node: int) -> None:
    devices = devices_at(place, per_node)
    assert place_of(devices, per_node) == place
    assert devices < devices_at(place + 1, per_node)
    assert devices <= per_node or devices % per_node == 0
