"""Plans of inference on real processes: numbers, collectives, and the bytes of each category."""

from __future__ import annotations

import random

import pytest

import autoshard
from autoshard.analyzer import Captured
from autoshard.candidates import Candidates
from autoshard.graph import Mode
from autoshard.program import Program
from autoshard.runtime.processes import Pool, get_pool
from autoshard.sharding.reshard import Resharder
from autoshard.validation import ValidationReport, dry_run, validate_program
from tests.serving.models import LLAMA, TOKENS, captured
from tests.validation.small import AXES, seconds

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="session")
def pool() -> Pool:
    return get_pool(4)


def random_program(model: Captured, sizes: tuple[int, ...], seed: int) -> Program:
    """Every operator does what it may; a cache lies as what is written into it."""
    graph, rng = model.graph, random.Random(seed)
    candidates = Candidates(graph, sizes, passing="full")
    chosen = {n.name: rng.choice(candidates[n.name]) for n in graph.nodes}
    for node in graph.nodes:
        if not node.is_leaf:
            for index in candidates.rules[node.name].mutates:
                taken = chosen[node.name].operands[index]
                stored = candidates[node.operands[index]]
                chosen[node.operands[index]] = next(s for s in stored if s.result == taken)
    resharder = Resharder(sizes, seconds)
    names = AXES[: len(sizes)]
    return Program(graph, names, sizes, chosen, resharder, rules=candidates.rules)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_a_random_plan_computes_what_one_device_computes(
    name: str, mode: Mode, sizes: tuple[int, ...], pool: Pool
) -> None:
    model = captured(name, mode)
    program = random_program(model, sizes, len(name) + len(sizes))
    report = validate_program(program, model, steps=0, compare_module=False, pool=pool)
    assert report.passed, str(report)
    assert report.collectives.predicted == report.collectives.issued > 0
    assert {c.kind for c in report.checks} == {"loss", "output"}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_plan_is_validated_from_its_document(mode: Mode) -> None:
    plan = autoshard.optimize(
        LLAMA,
        cluster="local",
        devices=4,
        mesh="data=2,model=2",
        strategy="hybrid",
        global_batch=4,
        mode=mode,
        **({"context": TOKENS} if mode == "decode" else {"seq_len": TOKENS}),
    )
    again = autoshard.Plan.from_json(plan.to_json())
    assert again == plan
    report = again.validate(LLAMA, steps=1, progress=False)
    assert isinstance(report, ValidationReport)
    assert report.passed
    assert report.capture.checks
    assert report.memory is not None
    assert report.predicted_memory is not None
    found, said = report.memory, report.predicted_memory
    assert found.kv_cache_bytes == said.kv_cache_bytes > 0
    assert found.parameters_bytes == said.parameters_bytes
    assert found.gradients_bytes == found.optimizer_bytes == 0
    assert found.allocated_bytes == pytest.approx(said.allocated_bytes, rel=0.01)


def test_a_dry_run_of_many_devices() -> None:
    model = captured("llama", "decode")
    report = dry_run(random_program(model, (8, 2), 5))
    assert report.passed
    assert report.collectives.predicted > 0
