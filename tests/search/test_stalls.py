"""Where backward stands still for gradients: bounds below every price, and close to the best."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest

from autoshard.candidates import Candidates
from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.plan import Schedule
from autoshard.planner.family import Family, family_of
from autoshard.search.folded import Folded
from autoshard.search.inner import Prepared
from autoshard.search.scheduled import Scheduled
from autoshard.search.space import Arrangement
from autoshard.search.stalls import Stalls
from autoshard.search.sums import Sums, Tied
from autoshard.search.whole import Problems
from tests.search.model_graphs import llama

BLOCKS = 8


@cache
def graph(batch: int) -> ModelGraph:
    return llama(3, batch, 1024, 2048, 16, 4, 8192, 2000)


@cache
def mixture() -> Family:
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "vocab_size": 1024,
    }
    return family_of(config, seq_len=1024, dtype="bfloat16", say=lambda text: None)


@cache
def experts(batch: int) -> ModelGraph:
    return mixture().few(batch)


def problem(
    *,
    pipeline: int = 1,
    context: int = 2,
    model: int = 4,
    expert: int = 1,
    recompute: str = "none",
    microbatches: int = 4,
) -> tuple[Folded, Schedule]:
    """Expert, context and model inside of nodes of 8 devices, data across two of them.

    Buckets are small, so that a small model's gradients fill them as a large one's do.
    """
    point = Arrangement(
        pipeline=pipeline,
        replica=1,
        data=16 // (expert * context * model),
        expert=expert,
        context=context,
        model=model,
        micro_batch=1,
        microbatches=microbatches,
        virtual_stages=1,
        recompute=recompute,
    )
    graphs = experts if expert > 1 else graph
    problems = Problems(graphs, BLOCKS, Cluster.preset("h100", 16 * pipeline))
    usual = problems.folded(point)
    prepared = Prepared(graphs(point.batch))
    candidates = Candidates(
        prepared.graph,
        usual.model.sizes,
        uses=usual.uses,
        rules=prepared.rules,
        proposals=prepared.proposals,
        batch=prepared.batch,
        tokens=prepared.tokens if context > 1 else None,
    )
    folded = Folded(usual.model, candidates, usual.axis_names, BLOCKS, bucket_bytes=1 << 20)
    return folded, point.schedule()


def choices(folded: Folded, sums: Sums, count: int, seed: int) -> list[Tied]:
    """The best choices where all seconds are off by factors drawn at random."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        spread = 0.1 + 2.0 * i / count
        drawn = [
            np.where(np.isinf(t), inf, np.where(np.isinf(t), 0.0, t) + 1e-5)
            * np.exp(rng.normal(0.0, spread, t.shape))
            for t in sums.seconds
        ]
        _, choice = folded.elimination.solve(drawn)
        out.append(folded.measure(sums, choice, frozenset()))
    return out


CASES = [
    {},
    {"recompute": "full"},
    {"pipeline": 2},
    {"context": 4, "model": 2},
    {"microbatches": 1},
    {"expert": 4, "context": 1, "model": 2, "microbatches": 1},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_choice_is_faster_than_its_stalls_say(case: dict[str, Any]) -> None:
    folded, schedule = problem(**case)
    run = Scheduled(folded, schedule, None)
    found = run.solve()
    base = run.sums(0.0, floor=True)
    stalls = Stalls(folded, schedule)
    drawn = [found.tied, *choices(folded, base, 15, 0)]
    kinds = {s for tied in drawn[::3] for s in stalls.of(tied.choice)[:2]}
    raised = free = 0
    for tied in drawn:
        price = folded.step(tied, schedule, None).step_time.total_s
        assert found.bound <= price * (1 + 1e-9)
        for stall in kinds:
            without = [
                folded.measure(only(base), tied.choice, tied.again).seconds
                for only in stalls.without(stall)
            ]
            if min(without) < inf:
                free += 1
                continue
            sums = stalls.longer(base, [stall], 1.0)
            bound = folded.measure(sums, tied.choice, tied.again).seconds
            assert bound <= price * (1 + 1e-9)
            raised += bound > tied.seconds
        mine = stalls.of(tied.choice)
        mine = [s for s in mine if (s.tier, s.through) == (mine[0].tier, mine[0].through)]
        ranges = sorted((stall.end, stall.first) for stall in mine)
        assert all(first <= end for (_, first), (end, _) in pairwise(ranges))  # none overlap
        bound = folded.measure(stalls.longer(base, mine, 1.0), tied.choice, tied.again).seconds
        assert bound <= price * (1 + 1e-9)
    assert raised > 5
    assert free > 5


@pytest.mark.parametrize("case", [{"recompute": "full"}, {"microbatches": 1}], ids=str)
def test_stalls_bring_the_bound_closer(case: dict[str, Any]) -> None:
    folded, schedule = problem(**case)
    run = Scheduled(folded, schedule, None)
    found = run.solve()
    assert found.step.late_s > 0.1 * found.step.step_time.total_s
    assert run._highest()[0] * 1.01 < found.bound < found.step.step_time.total_s


def test_gradients_on_other_tiers_are_not_waited_for() -> None:
    folded, schedule = problem(context=1, model=8)
    found = Scheduled(folded, schedule, None).solve()
    assert Stalls(folded, schedule).of(found.tied.choice) == []


@pytest.mark.parametrize("share", [0.7, 0.3])
def test_bounds_hold_within_a_memory_limit(share: float) -> None:
    folded, schedule = problem()
    free = Scheduled(folded, schedule, None).solve()
    need = free.step.memory.total_bytes
    least = Scheduled(folded, schedule, 1).solve().step.memory.total_bytes
    limit = int(least + share * (need - least))
    run = Scheduled(folded, schedule, limit)
    found = run.solve()
    assert found.fits
    base = run.sums(0.0, floor=True)
    own = Stalls(folded, schedule).of(found.tied.choice)
    assert own
    sums = Stalls(folded, schedule).longer(base, own[:1], 1.0)
    fitting = 0
    for per_byte in np.geomspace(run._price / 30, run._price * 30, 8):
        for tables in (base, sums):
            step = folded.step(folded.minimum(tables, per_byte)[1], schedule, limit)
            if step.memory.fits:
                fitting += 1
                assert found.bound <= step.step_time.total_s
    assert fitting > 1


def test_gradients_of_experts_hold_links_that_they_do_not_use() -> None:
    # Theirs go from node to node alone; those of attention, which follow, use both kinds of link.
    folded, schedule = problem(expert=4, context=1, model=2, microbatches=1)
    run = Scheduled(folded, schedule, None)
    found = run.solve()
    stalls = Stalls(folded, schedule)
    longest = stalls.of(found.tied.choice)[0]
    assert longest.tier != longest.through
    assert run._highest()[0] * 1.01 < found.bound <= found.step.step_time.total_s
