"""The same laws on graphs that the analyzer captured from real models."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from autoshard.analyzer import analyze
from autoshard.assemble import strategies_of
from autoshard.candidates import Rules
from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.search import search, solve
from autoshard.search.inner import program_of_assignment
from autoshard.search.price import price
from autoshard.search.walk import MemoryWalk
from tests.search.problems import problem_of

MODELS = {
    "gpt2": {"batch": 8, "seq_len": 64},
    "t5-small": {"batch": 8, "seq_len": 32},
    "llama-3-8b": {"batch": 8, "seq_len": 512},
    "resnet-50": {"batch": 16},
}


@cache
def captured(name: str) -> ModelGraph:
    return analyze(name, **MODELS[name]).graph  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_folding_keeps_the_optimum(name: str) -> None:
    sizes = (2, 4) if name in ("gpt2", "llama-3-8b") else (4,)
    _, folded = problem_of(captured(name), sizes)
    _, whole = problem_of(captured(name), sizes, fold=False)
    for exposed, per_byte in ((1.0, 0.0), (0.0, 1e-12)):
        one = folded.minimum(exposed, per_byte)[0]
        assert one == pytest.approx(whole.minimum(exposed, per_byte)[0], rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_tables_program_and_simulation_agree(name: str) -> None:
    model, problem = problem_of(captured(name), (4,))
    for exposed, per_byte in ((1.0, 0.0), (0.0, 0.0), (1.0, 1e-3)):
        _, found = problem.minimum(exposed, per_byte)
        program = program_of_assignment(model, problem, found, ("data",))
        priced = price(model, program)
        additive = problem.measure(found.choice, 0.0, found.regather).seconds
        assert priced.blocking_s == pytest.approx(additive, rel=1e-9)
        walk = MemoryWalk(model, program)
        assert found.num_bytes <= walk.run(None).allocated_bytes
        assert 0.8 * walk.turn_bytes <= found.num_bytes <= 1.02 * walk.turn_bytes
        issued = program.collectives((0,))
        count = Counter((c.op, c.axes, c.phase) for c in issued)
        assert {(g.op, g.axes, g.phase): g.count for g in priced.collectives} == count
        assert sum(g.total_bytes for g in priced.collectives) == sum(c.num_bytes for c in issued)


@pytest.mark.parametrize("name", ["gpt2", "resnet-50"])
def test_no_usual_answer_is_faster(name: str) -> None:
    cluster = Cluster.preset("a100", 4)
    result = search(captured(name), cluster)
    for strategy in ("data", "fsdp", "tensor", "hybrid"):
        forced = search(captured(name), cluster, strategy=strategy)
        assert result.best.step_time.total_s <= forced.best.step_time.total_s


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_choices_give_the_strategies_back(name: str) -> None:
    graph = captured(name)
    solution = solve(graph, Cluster.preset("h100", 8), (2, 4), ("data", "model"))
    texts = {n: tuple(str(c) for c in s.choices) for n, s in solution.strategies.items()}
    again = strategies_of(graph, Rules(graph), (2, 4), texts)
    assert all(again[n].key == s.key for n, s in solution.strategies.items())
