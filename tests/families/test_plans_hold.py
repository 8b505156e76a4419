"""Nine families, three meshes, forced and searched plans, on four real processes in float64.

Outputs, loss and every gradient equal one device's; the predicted and the issued collectives are
the same lists on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autoshard.analyzer import Captured, analyze
from autoshard.cluster import Cluster
from autoshard.runtime.processes import Pool
from autoshard.search import Configuration, Prepared, solve
from autoshard.validation import ValidationReport, validate_program
from tests.families.models import FAMILIES, example_inputs

AXES = ("data", "model")
MESHES = {"4x1": (4, 1), "1x4": (1, 4), "2x2": (2, 2)}
STRATEGIES = ("data", "fsdp", "tensor", "hybrid", "auto")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, timeout_s=120) as found:
        yield found


@pytest.fixture(scope="module")
def captured() -> dict[str, tuple[Captured, Prepared]]:
    return {}


def prepared(family: str, known: dict[str, tuple[Captured, Prepared]]) -> tuple[Captured, Prepared]:
    if family not in known:
        found = analyze(FAMILIES[family](), example_inputs(family), name=family)
        known[family] = found, Prepared(found.graph)
    return known[family]


def eager_to_share() -> Cluster:
    """Four slow devices on links that cost nothing: the search cuts whatever it can."""
    local = Cluster.preset("local", devices=4).to_json()
    local["device"]["peak_flops_per_second"] = {"float32": 1e6, "float64": 1e6}
    local["device"]["launch_s"] = 1e-12
    for tier in ("node", "fabric"):
        if local.get(tier):
            local[tier]["latency_s"] = 1e-12
            local[tier]["bytes_per_second"] = 1e15
    return Cluster.from_json(local)


def run(
    found: tuple[Captured, Prepared], mesh: str, strategy: str, cluster: Cluster, pool: Pool
) -> ValidationReport:
    model, ready = found
    sizes = MESHES[mesh]
    uses = Configuration(strategy, AXES, sizes).uses  # type: ignore[arg-type]
    solution = solve(model.graph, cluster, sizes, AXES, uses, prepared=ready)
    return validate_program(
        solution.program, model, dtype="float64", steps=0, compare_module=False, pool=pool
    )


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_computes_what_one_device_computes(
    family: str,
    mesh: str,
    strategy: str,
    pool: Pool,
    captured: dict[str, tuple[Captured, Prepared]],
) -> None:
    cluster = eager_to_share() if strategy == "auto" else Cluster.preset("local", devices=4)
    report = run(prepared(family, captured), mesh, strategy, cluster, pool)
    assert report.passed, str(report)
    assert report.worst.deviation <= 1e-9
    assert report.collectives.differences == 0
    assert report.collectives.predicted > 0, "nothing was sharded"
