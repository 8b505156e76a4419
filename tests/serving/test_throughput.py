"""The batch with most tokens a second: beside every batch there is."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError
from autoshard.graph import Mode
from autoshard.planner.family import Family, family_of
from autoshard.search import search
from autoshard.search.throughput import GAP, Asked, Busiest, busiest
from tests.serving.models import LLAMA

TOKENS = 48


@cache
def family(mode: Mode) -> Family:
    return family_of(LLAMA, seq_len=TOKENS, dtype=None, say=lambda text: None, mode=mode)


def cluster(devices: int, room: int) -> Cluster:
    """Devices that have ``room`` bytes beside their reserve."""
    found = Cluster.preset("h100", devices=devices)
    found = replace(found, reserve=None, reserve_bytes=0)
    return replace(found, device=replace(found.device, memory_bytes=room))


def found(mode: Mode, where: Cluster, most_s: float | None = None) -> Busiest:
    asked = Asked(graph_of=family(mode).whole, cluster=where, max_latency_s=most_s)
    return busiest(asked, lambda batch, seconds, fits: None)


@cache
def every_batch(mode: Mode, devices: int, room: int) -> dict[int, float]:
    """Seconds of each batch that fits, by the search of one batch."""
    where, out = cluster(devices, room), {}
    for batch in (*(b for b in (1, 2) if b < devices), *range(devices, 41, devices)):
        with suppress(InfeasibleError):
            best = search(family(mode).whole(batch), where, optimizer="none", style="fused").best
            out[batch] = best.step_time.total_s
    return out


CASES = [("decode", 2, 600_000), ("prefill", 4, 500_000)]


@pytest.mark.parametrize(("mode", "devices", "room"), CASES, ids=str)
def test_no_batch_gives_more(mode: Mode, devices: int, room: int) -> None:
    seconds = every_batch(mode, devices, room)
    assert len(seconds) > 3
    assert max(seconds) < 40  # memory ends it
    answer = found(mode, cluster(devices, room))
    assert answer.solved.items() <= seconds.items()
    assert max(answer.solved) == max(seconds)
    most = max(b / s for b, s in seconds.items())
    rate = answer.batch / seconds[answer.batch]
    assert rate <= most <= rate * (1 + answer.gap) * (1 + 1e-9)
    assert answer.gap <= GAP
    assert "parameters" in answer.why or "KV cache" in answer.why


@pytest.mark.parametrize(("mode", "devices", "room"), CASES, ids=str)
def test_no_batch_within_a_latency_gives_more(mode: Mode, devices: int, room: int) -> None:
    seconds = every_batch(mode, devices, room)
    bound = sorted(seconds.values())[len(seconds) // 2]
    answer = found(mode, cluster(devices, room), bound)
    allowed = {b: s for b, s in seconds.items() if s <= bound}
    assert answer.batch in allowed
    most = max(b / s for b, s in allowed.items())
    assert most <= answer.batch / seconds[answer.batch] * (1 + answer.gap) * (1 + 1e-9)
    assert "longer than" in answer.why


def test_optimize_plans_the_batch_that_was_found() -> None:
    where = cluster(2, 600_000)
    plan = autoshard.optimize(
        LLAMA,
        cluster=where,
        mode="decode",
        context=TOKENS,
        objective="throughput",
        progress=False,
    )
    answer = found("decode", where)
    assert plan.objective == "throughput"
    assert plan.global_batch == plan.tokens == answer.batch
    assert plan.predicted_step_s == pytest.approx(answer.solved[answer.batch])
    assert any(note.startswith("batch: ") for note in plan.assumptions)
    assert plan.captured(LLAMA).graph.fingerprint == plan.model.fingerprint


def test_one_sequence_that_is_too_slow() -> None:
    with pytest.raises(InfeasibleError, match=r"takes .* for one sequence, more than the 0.001 ms"):
        autoshard.optimize(
            LLAMA,
            cluster=cluster(2, 600_000),
            mode="decode",
            context=TOKENS,
            objective="throughput",
            max_latency_s=1e-6,
            progress=False,
        )


def test_one_sequence_that_does_not_fit() -> None:
    with pytest.raises(InfeasibleError, match=r"does not fit on 2 devices .*, with one sequence"):
        autoshard.optimize(
            LLAMA,
            cluster=cluster(2, 50_000),
            mode="decode",
            context=TOKENS,
            objective="throughput",
            progress=False,
        )
