"""The figures of a program: against its own list of messages, the tables, and hand counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.search import Solution, solve
from autoshard.search.cost import CostModel
from autoshard.search.inner import Prepared, program_of_assignment
from autoshard.search.memory import OPTIMIZERS, optimizer_of
from autoshard.search.price import price
from autoshard.search.walk import MemoryWalk
from tests.search.model_graphs import Builder, llama, mlp
from tests.search.problems import problem_of

GRAPHS = {"mlp": mlp(), "llama": llama(2), "tied": llama(2, tied=True)}
MESHES = [
    ((4,), ("data",), ("any",)),
    ((4,), ("data",), ("fsdp",)),
    ((4,), ("data",), ("data",)),
    ((2, 4), ("data", "model"), ("batch", "tensor")),
    ((2, 4), ("data", "model"), ("any", "any")),
]


def solved(name: str, mesh: tuple[object, ...], limit: int | None = None) -> Solution:
    sizes, names, uses = mesh
    cluster = Cluster.preset("h100", 4 if sizes == (4,) else 8)
    return solve(GRAPHS[name], cluster, sizes, names, uses, memory_limit=limit)  # type: ignore[arg-type]


def model_of(solution: Solution, optimizer: str = "adamw") -> CostModel:
    graph = solution.program.graph
    cluster = Cluster.preset("h100", 4 if solution.sizes == (4,) else 8)
    return CostModel(
        graph, cluster, solution.program.sizes, Prepared(graph).rules, optimizer_of(optimizer)
    )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_what_was_priced_is_what_the_program_issues(name: str, mesh: tuple[object, ...]) -> None:
    solution = solved(name, mesh)
    issued = solution.program.collectives((0,) * len(solution.program.sizes))
    count = Counter((c.op, c.axes, c.phase) for c in issued)
    size = Counter[object]()
    for c in issued:
        size[c.op, c.axes, c.phase] += c.num_bytes
    assert {(g.op, g.axes, g.phase): g.count for g in solution.collectives} == count
    assert {(g.op, g.axes, g.phase): g.total_bytes for g in solution.collectives} == size
    total = sum(g.seconds for g in solution.collectives)
    assert total == pytest.approx(solution.step_time.communication_s, rel=1e-9)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_parts_of_a_step_add_up(name: str, mesh: tuple[object, ...]) -> None:
    step = solved(name, mesh).step_time
    assert step.total_s == pytest.approx(step.forward_s + step.backward_s + step.optimizer_s)
    assert step.total_s == pytest.approx(
        step.compute_s + step.exposed_communication_s + step.optimizer_s
    )
    assert 0 <= step.exposed_communication_s <= step.communication_s * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_no_program_is_faster_than_its_bound(name: str, mesh: tuple[object, ...]) -> None:
    solution = solved(name, mesh)
    assert 0 < solution.lower_bound_s <= solution.step_time.total_s
    assert solution.gap >= 0


@pytest.mark.parametrize("sizes", [(4,), (2, 4)])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_tables_sum_to_the_simulated_time_with_gradients_hidden(
    name: str, sizes: tuple[int, ...]
) -> None:
    from autoshard.search.inner import solve as inner_solve

    model, problem = problem_of(GRAPHS[name], sizes)
    hidden, _ = problem.minimum(0.0, 0.0)
    solution = inner_solve(GRAPHS[name], model.cluster, sizes, ("data", "model")[: len(sizes)])
    priced = price(model, solution.program)
    assert hidden <= priced.blocking_s * (1 + 1e-9)
    assert priced.blocking_s <= priced.step_time.total_s * (1 + 1e-9)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_events_of_a_stream_do_not_overlap(mesh: tuple[object, ...]) -> None:
    solution = solved("llama", mesh)
    priced = price(model_of(solution), solution.program, timeline=True)
    for stream in ("compute", "communication"):
        bars = [e for e in priced.timeline if e.stream == stream]
        for one, two in pairwise(bars):
            assert one.start_s + one.seconds <= two.start_s + 1e-12
    end = max(e.start_s + e.seconds for e in priced.timeline)
    assert end == pytest.approx(priced.step_time.total_s)
    busy = sum(e.seconds for e in priced.timeline if e.stream == "communication")
    assert busy == pytest.approx(priced.step_time.communication_s)


def test_buckets_hide_behind_backward_and_messages_of_edges_do_not() -> None:
    data = solved("mlp", MESHES[2])
    priced = price(model_of(data), data.program, timeline=True)
    fused = [e for e in priced.timeline if e.name.startswith("fused")]
    assert len(fused) == len(data.program.buckets)
    tensor = solve(
        GRAPHS["mlp"], Cluster.preset("h100", 4), (4,), ("model",), ("tensor",)
    ).step_time
    assert tensor.exposed_communication_s == pytest.approx(tensor.communication_s)


def test_memory_of_data_parallelism_by_hand() -> None:
    graph = GRAPHS["llama"]
    elements = graph.parameter_count
    memory = solved("llama", MESHES[2]).memory
    assert memory.parameters_bytes == 2 * elements
    assert memory.gradients_bytes == 2 * elements
    assert memory.optimizer_bytes == 12 * elements  # two moments and a float32 copy of bfloat16
    assert memory.gathered_bytes == 0
    assert memory.reserve_bytes == Cluster.preset("h100").reserve_bytes


def test_memory_of_full_sharding_by_hand() -> None:
    graph = GRAPHS["llama"]
    whole, cut = solved("llama", MESHES[2]).memory, solved("llama", MESHES[1]).memory
    assert cut.optimizer_bytes == whole.optimizer_bytes / 4
    matrices = sum(n.num_bytes for n in graph.parameters.values() if n.name not in ("embed_w",))
    assert cut.gathered_bytes == matrices  # kept for backward: the embedding's is not needed


@pytest.mark.parametrize(
    ("optimizer", "half", "single"),
    [("adamw", 12, 8), ("adam", 12, 8), ("sgd", 0, 0), ("sgd-momentum", 4, 4)],
)
def test_what_an_optimizer_keeps(optimizer: str, half: int, single: int) -> None:
    assert OPTIMIZERS[optimizer].state_bytes(1, "bfloat16", 2) == half
    assert OPTIMIZERS[optimizer].state_bytes(1, "float32", 4) == single


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    b = Builder("float32")
    x = b.input("x", 8, 16, dtype="float32")
    w = b.parameter("w", 16, 16, trains=False)
    y = b.linear("first", x, 16, weight=w)
    y = b.linear("second", y, 16)
    loss = b.add("loss", "aten.sum.default", (y,), roles=("self",), shape=())
    graph = b.graph("frozen", loss, 8)
    memory = solve(graph, Cluster.preset("h100", 2), (2,), ("data",), ("data",)).memory
    assert memory.parameters_bytes == 2 * 16 * 16 * 4
    assert memory.gradients_bytes == 16 * 16 * 4
    assert memory.optimizer_bytes == 2 * 16 * 16 * 4


def test_the_fullest_moment_holds_the_gradient_of_the_logits() -> None:
    graph = llama(1, vocab=32000, width=64, hidden=64, seq=128)
    memory = solve(graph, Cluster.preset("h100", 1), (1,), ("data",)).memory
    logits = 8 * 128 * 32000 * 2
    assert memory.activations_bytes >= logits
    assert memory.temporary_bytes >= logits


@pytest.mark.parametrize("per_byte", [0.0, 1e-12, 1e-3])
@pytest.mark.parametrize("sizes", [(4,), (2, 4)])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_tables_sum_to_the_memory_at_the_turn(
    name: str, sizes: tuple[int, ...], per_byte: float
) -> None:
    model, problem = problem_of(GRAPHS[name], sizes)
    _, found = problem.minimum(1.0, per_byte)
    program = program_of_assignment(model, problem, found, ("data", "model")[: len(sizes)])
    walk = MemoryWalk(model, program)
    memory = walk.run(None)
    # The tables do not see outputs, nor what a slice holds fast of what was gathered for it: nobody
    # does that where time counts beside memory.
    assert found.num_bytes <= memory.allocated_bytes
    least = 0.6 if per_byte == 1e-3 else 0.95
    assert least * walk.turn_bytes <= found.num_bytes <= 1.02 * walk.turn_bytes
    assert price(model, program).blocking_s == pytest.approx(
        problem.measure(found.choice, 0.0, found.regather).seconds, rel=1e-9
    )


@pytest.mark.parametrize("name", GRAPHS)
def test_a_limit_is_respected_down_to_the_leanest(name: str) -> None:
    from autoshard.search.inner import inner_search

    graph: ModelGraph = GRAPHS[name]
    cluster = replace(Cluster.preset("h100", 4), reserve_bytes=0)
    free = solve(graph, cluster, (4,), ("data",)).memory.total_bytes
    search = inner_search(
        graph, cluster, (4,), ("data",), None, optimizer="adamw", memory_limit=None, pins=None
    )
    least = search.leanest()[1].memory.total_bytes
    assert least < free
    for share in (0.0, 0.1, 0.3, 0.6, 0.9, 1.0):
        limit = int(least + share * (free - least))
        found = solve(graph, cluster, (4,), ("data",), memory_limit=limit)
        assert found.fits
        assert found.memory.total_bytes <= limit
        assert found.lower_bound_s <= found.step_time.total_s
    assert not solve(graph, cluster, (4,), ("data",), memory_limit=least // 2).fits


def test_little_memory_gathers_again() -> None:
    graph = llama(2, batch=4, seq=16)
    cluster = replace(Cluster.preset("h100", 4), reserve_bytes=0)
    full = solve(graph, cluster, (4,), ("data",), ("fsdp",))
    assert not full.regather
    limit = full.memory.total_bytes - full.memory.gathered_bytes // 2
    lean = solve(graph, cluster, (4,), ("data",), ("fsdp",), memory_limit=limit)
    assert lean.fits
    assert lean.regather
    gathers = [c for c in lean.program.backward_collectives((0,)) if c.op == "all_gather"]
    assert len(gathers) >= len(lean.regather)
    kept = lean.memory.gathered_bytes
    assert 0 < kept < full.memory.gathered_bytes
    # No more than needed: not one of them could have been kept.
    edges = [lean.program.edges[key] for key in lean.regather]
    sizes = [graph.by_name[e.producer].num_bytes for e in edges]
    assert limit - lean.memory.total_bytes < min(sizes)
