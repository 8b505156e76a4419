"""Random legal plans on real processes beside one device; wrong rules, and processes that fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.analyzer import Captured, analyze
from autoshard.candidates import Candidates, Rules
from autoshard.cluster import Cluster
from autoshard.errors import RankError, RequestError, ValidationError
from autoshard.program import Program
from autoshard.runtime.processes import Pool
from autoshard.search import solve
from autoshard.sharding import registry
from autoshard.sharding.layout import RP, R
from autoshard.sharding.registry import OpCall
from autoshard.sharding.reshard import Resharder
from autoshard.sharding.rule import Rule
from autoshard.validation import ValidationReport, validate_program
from tests.validation.small import AXES, MODELS, captured, random_program, seconds

pytestmark = pytest.mark.multirank

CASES = [(name, sizes) for name in MODELS for sizes in ((4,), (2, 2))]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_a_random_plan_computes_what_one_device_computes(
    name: str, sizes: tuple[int, ...], pool: Pool
) -> None:
    seed = len(sizes)
    program = random_program(
        captured(name), sizes, seed, regather=name in ("llama", "looped"), bucket_bytes=1000
    )
    report = validate_program(program, captured(name), steps=0, compare_module=False, pool=pool)
    assert report.passed
    assert report.worst.deviation < 1e-9
    assert report.collectives.predicted == report.collectives.issued > 0
    assert report.collectives.differences == 0
    assert len([c for c in report.checks if c.kind == "gradient"]) == sum(
        n.differentiable for n in captured(name).graph.parameters.values()
    )


def test_an_operator_without_a_rule_gathers_its_weights_once(pool: Pool) -> None:
    """It keeps what it likes for backward, so its weights are not dropped and gathered again."""
    model = captured("recurrent")
    program = random_program(model, (4,), 20, regather=True)
    assert any("lstm" in family for family in program.rules.without)
    assert not program.regathered
    report = validate_program(program, model, steps=0, compare_module=False, pool=pool)
    assert report.passed, str(report)


def test_more_devices_than_samples_leave_some_without_any(pool: Pool) -> None:
    program = random_program(captured("llama"), (4,), 0, uses=("data",))
    report = validate_program(program, captured("llama"), steps=0, compare_module=False, pool=pool)
    assert report.passed


def test_the_report_has_time_memory_and_the_module_itself(pool: Pool) -> None:
    program = random_program(captured("looped"), (2, 2), 1)
    said: list[str] = []
    report = validate_program(
        program, captured("looped"), steps=1, pool=pool, progress=lambda text, _: said.append(text)
    )
    assert report.step_seconds is not None
    assert report.step_seconds > 0
    assert report.peak_bytes > sum(n.num_bytes for n in captured("looped").graph.inputs.values())
    assert report.capture.agrees
    assert not report.capture.skipped
    assert "passed: 4 processes, data=2, model=2, float64" in str(report)
    assert report.to_json()["passed"] is True
    assert (said[0], said[-1]) == ("drawing weights and inputs", "done")


def test_buffers_are_compared(pool: Pool) -> None:
    program = random_program(captured("convolutions"), (2, 2), 5)
    report = validate_program(
        program, captured("convolutions"), steps=0, compare_module=False, pool=pool
    )
    assert {c.name for c in report.checks if c.kind == "buffer"} == {
        "norm.running_mean",
        "norm.running_var",
    }


def test_a_plan_for_another_graph_is_refused() -> None:
    program = random_program(captured("looped"), (4,), 0)
    with pytest.raises(RequestError, match="for another graph"):
        validate_program(program, captured("perceptron"))


# ---- wrong rules ----------------------------------------------------------------------------


@contextmanager
def wrong_rule(family: str, change: Callable[[Rule], Rule]) -> Iterator[None]:
    registry.known_families()
    right = registry._RULES[family]

    def wrong(call: OpCall) -> Rule | None:
        rule = right(call)
        return None if rule is None else change(rule)

    registry._RULES[family] = wrong
    try:
        yield
    finally:
        registry._RULES[family] = right


def one_family(model: Captured, family: str, choice: str) -> Program:
    """Everything replicated, but for the operators of one family, which choose ``choice``."""
    graph, rules = model.graph, Rules(model.graph)
    candidates = Candidates(graph, (4,), passing="full", rules=rules)
    chosen = {}
    for node in graph.nodes:
        own = [s for s in candidates[node.name] if str(s.choices[0]).startswith(choice)]
        whole = next(s for s in candidates[node.name] if s.choices[0].passes == "R")
        chosen[node.name] = own[0] if node.family == family and own else whole
    return Program(graph, AXES[:1], (4,), chosen, Resharder((4,), seconds), rules=rules)


def whole_result(rule: Rule) -> Rule:
    return replace(rule, replicated=frozenset(rule.sizes))


def linear(rule: Rule) -> Rule:
    return replace(rule, linear=(frozenset({0}),))


WRONG: list[tuple[str, str, str, Callable[[Rule], Rule], str]] = [
    # model, family, choice, what is wrong with the rule, where it shows
    ("looped", "aten.embedding", "v:", whole_result, "its result is off"),
    # One device has all of the value and tanh(0) = 0: forward is right by accident.
    ("looped", "aten.tanh", "P:0", linear, "its gradient for operand 'self' is off"),
    ("perceptron", "aten.gelu", "P:0", linear, "its gradient for operand 'self' is off"),
]


@pytest.mark.parametrize(
    ("name", "family", "choice", "change", "said"), WRONG, ids=["look-up", "tanh", "gelu"]
)
def test_a_wrong_rule_is_named(
    name: str, family: str, choice: str, change: Callable[[Rule], Rule], said: str, pool: Pool
) -> None:
    with wrong_rule(family, change):
        program = one_family(captured(name), family, choice)
        with pytest.raises(ValidationError) as caught:
            validate_program(program, captured(name), steps=0, compare_module=False, pool=pool)
    text = str(caught.value)
    assert f"the first operator that differs is {family}" in text
    assert said in text
    assert "If you gave this operator a sharding_rule, it is wrong." in text
    assert isinstance(caught.value.report, ValidationReport)
    assert not caught.value.report.numbers_agree
    # Predicted and issued share the rule: only numbers tell that it is wrong.
    assert caught.value.report.collectives.differences == 0


def test_a_gradient_that_is_not_summed_is_named(pool: Pool) -> None:
    model = captured("perceptron")
    program = one_family(model, "aten.layer_norm", "a:")
    (norm,) = [n for n in model.graph.nodes if n.family == "aten.layer_norm"]
    right = program.strategies[norm.name]
    assert right.operands[1] == (RP,), "each device has the gradient of its own rows"
    wrong = replace(right, operands=(right.operands[0], (R,), *right.operands[2:]))
    program = Program(
        model.graph,
        program.axis_names,
        program.sizes,
        {**program.strategies, norm.name: wrong},
        program.resharder,
    )
    with pytest.raises(ValidationError) as caught:
        validate_program(program, model, steps=0, compare_module=False, pool=pool)
    text = str(caught.value)
    assert f"the first operator that differs is aten.layer_norm.default ({norm.name}" in text
    assert "its gradient for operand 'weight' is off" in text


# ---- processes that fail --------------------------------------------------------------------


def raise_on_two(rank: int) -> None:
    if rank == 2:
        raise ValueError("no luck here")


def die_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


FAILURES = [(raise_on_two, 2, "no luck here"), (die_on_one, 1, "killed by SIGKILL")]


@pytest.mark.parametrize(("fail", "rank", "said"), FAILURES, ids=["raises", "dies"])
def test_a_failing_process_ends_it_with_its_own_error(
    fail: Callable[[int], None], rank: int, said: str, pool: Pool
) -> None:
    program = random_program(captured("looped"), (4,), 0)
    model = captured("looped")
    validate_program(program, model, steps=0, compare_module=False, pool=pool)  # processes are up
    start = time.monotonic()
    with pytest.raises(RankError, match=said) as caught:
        validate_program(program, model, compare_module=False, pool=pool, before_step=fail)
    assert time.monotonic() - start < 15
    assert caught.value.rank == rank


class Masked(nn.Module):
    """Attention under a mask of truth values; ``deaf`` changes what a trace does not see."""

    def __init__(self, *, deaf: bool = False) -> None:
        super().__init__()
        self.into, self.deaf = nn.Linear(4, 4), deaf

    def forward(self, x: Tensor, mask: Tensor, flag: bool = False) -> Tensor:
        q = self.into(x)[:, None]
        seen = F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])
        if self.deaf and not torch.compiler.is_compiling():
            seen = seen * 2
        return seen.square().mean() if flag else seen.mean()


def plan_of(model: Captured) -> Program:
    solution = solve(model.graph, Cluster.preset("local", devices=4), (4,), ("data",), ("data",))
    return solution.program


def test_masks_are_the_callers_own(pool: Pool) -> None:
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[:, 0] = True
    inputs = {"x": torch.randn(4, 3, 4), "mask": mask, "flag": True}
    model = analyze(Masked(), inputs)
    assert torch.equal(model.draw_inputs(0)["mask"], mask)
    assert not torch.equal(model.draw_inputs(7)["x"], inputs["x"])
    report = validate_program(plan_of(model), model, steps=0, pool=pool)
    assert report.passed
    assert not report.capture.skipped, "flag=True goes along"


def test_values_that_do_not_suit_a_model(pool: Pool) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x.sqrt() * self.scale).mean()

    model = analyze(Root(), torch.rand(4, 3) + 1)
    assert validate_program(plan_of(model), model, steps=0, pool=pool).passed
    model = analyze(Root(), torch.empty(4, 3, device="meta"))
    with pytest.raises(ValidationError, match=r"the loss of Root is not finite.*example_inputs"):
        validate_program(plan_of(model), model, steps=0, pool=pool)


def test_a_graph_that_is_not_the_module_fails(pool: Pool) -> None:
    inputs = {"x": torch.randn(4, 3, 4), "mask": torch.ones(4, 3, dtype=torch.bool)}
    model = analyze(Masked(deaf=True), inputs)
    with pytest.raises(ValidationError, match="not what the module computes") as caught:
        validate_program(plan_of(model), model, steps=0, pool=pool)
    assert not caught.value.report.passed


def test_a_module_in_eval_mode_is_compared_in_eval_mode(pool: Pool) -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    module[1].eval()
    model = analyze(module, torch.randn(4, 4))
    report = validate_program(plan_of(model), model, steps=0, pool=pool)
    assert report.capture.checks
    assert report.capture.agrees
