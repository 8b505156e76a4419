"""Steps of several microbatches: against plain prices, closed forms, and laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.candidates import AxisUse
from autoshard.cluster import Cluster
from autoshard.errors import RequestError
from autoshard.kernels import Kernels
from autoshard.plan import Schedule
from autoshard.program import Program
from autoshard.search import Solution, solve
from autoshard.search.apart import halves, of_weights
from autoshard.search.cost import CostModel
from autoshard.search.inner import Prepared
from autoshard.search.memory import optimizer_of
from autoshard.search.price import price
from autoshard.search.stages import chunk_bounds
from autoshard.search.step import (
    Message,
    Part,
    Segment,
    buckets,
    compose,
    measure,
    price_step,
    recomputed,
    segments,
)
from tests.search.model_graphs import llama, mlp
from tests.search.test_stages import splits

GRAPH = llama(8)
CLUSTER = Cluster.preset("h100", 8)
MESHES = {
    "data": ((8,), ("data",), ("data",)),
    "fsdp": ((8,), ("data",), ("fsdp",)),
    "hybrid": ((2, 4), ("data", "model"), ("data", "tensor")),
}


@pytest.fixture(scope="module", params=MESHES)
def solved(request: pytest.FixtureRequest) -> tuple[CostModel, Solution]:
    sizes, names, uses = MESHES[request.param]
    solution = solve(GRAPH, CLUSTER, sizes, names, uses)  # type: ignore[arg-type]
    rules = Prepared(GRAPH).rules
    return CostModel(GRAPH, CLUSTER, solution.program.sizes, rules, optimizer_of("adamw")), solution


Solved = tuple[CostModel, Solution]


def test_one_microbatch_costs_what_the_search_says(solved: Solved) -> None:
    model, solution = solved
    plain = price(model, solution.program)
    step = price_step(model, solution.program, Schedule())
    assert step.step_time.total_s == pytest.approx(plain.step_time.total_s)
    assert step.step_time.compute_s == pytest.approx(plain.step_time.compute_s)
    # Gradients of several microbatches are there all the time, of one only at the end of backward.
    assert step.memory.parameters_bytes == plain.memory.parameters_bytes
    assert step.memory.optimizer_bytes == plain.memory.optimizer_bytes
    most = plain.memory.allocated_bytes + step.memory.gradients_bytes
    assert 0.99 * plain.memory.allocated_bytes <= step.memory.allocated_bytes <= most
    assert {(g.op, g.axes, g.phase) for g in step.collectives} == {
        (g.op, g.axes, g.phase) for g in plain.collectives
    }
    assert sum(g.total_bytes for g in step.collectives) == sum(
        g.total_bytes for g in plain.collectives
    )


def test_gradients_of_replicated_weights_travel_once_a_step(solved: Solved) -> None:
    model, solution = solved
    fused = sum(
        solution.program.bucket_collective(i, (0,) * len(solution.program.sizes)).num_bytes
        for i in range(len(solution.program.buckets))
    )
    one = price_step(model, solution.program, Schedule())
    four = price_step(model, solution.program, Schedule(microbatches=4))
    bytes_of = lambda s: sum(g.total_bytes for g in s.collectives)  # noqa: E731
    assert bytes_of(four) == 4 * (bytes_of(one) - fused) + fused


def test_more_microbatches_take_longer_but_never_as_long_as_steps_of_their_own(
    solved: Solved,
) -> None:
    model, solution = solved
    seconds = [
        price_step(model, solution.program, Schedule(microbatches=m)).step_time.total_s
        for m in (2, 3, 4)
    ]
    assert seconds == sorted(seconds)
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])


def test_recomputation_trades_time_for_memory(solved: Solved) -> None:
    model, solution = solved
    kinds = ("none", "full", "reentrant")
    steps = [
        price_step(model, solution.program, Schedule(recompute=k, microbatches=2)) for k in kinds
    ]
    time = [s.step_time.total_s for s in steps]
    assert time == sorted(time)
    assert time[0] < time[1] < time[2]
    assert steps[1].memory.activations_bytes < steps[0].memory.activations_bytes
    assert steps[1].memory.total_bytes < steps[0].memory.total_bytes


def test_full_recomputation_stops_where_nothing_more_is_needed() -> None:
    block = next(s for s in segments(GRAPH) if s.is_block)
    nodes = GRAPH.nodes[block.start : block.end]
    needed = recomputed(nodes, Schedule(recompute="full"))
    every = recomputed(nodes, Schedule(recompute="reentrant"))
    assert needed < every
    products = [n.name for n in nodes if n.family == "aten.linear"]
    # What the last product of a block makes goes on to the next block; backward of this one does
    # not read it.
    assert products[-1] not in needed
    assert set(products[:-1]) <= needed


def test_segments_cover_the_graph_once() -> None:
    parts = segments(GRAPH)
    assert parts[0].start == 0
    assert parts[-1].end == len(GRAPH.nodes)
    assert all(a.end == b.start for a, b in pairwise(parts))
    assert sum(p.is_block for p in parts) == 8


@given(
    st.lists(st.floats(0.1, 5), min_size=3, max_size=12),
    st.integers(1, 6),
)
@settings(max_examples=100, deadline=None)
def test_chunks_are_as_even_as_can_be(seconds: list[float], chunks: int) -> None:
    parts = [Segment(i, i + 1, 0 < i < len(seconds) - 1) for i in range(len(seconds))]
    blocks = sum(p.is_block for p in parts)
    if chunks > blocks and (blocks + 2) % chunks:
        with pytest.raises(RequestError, match="cannot fill"):
            chunk_bounds([p.is_block for p in parts], seconds, chunks)
        return
    bounds = chunk_bounds([p.is_block for p in parts], seconds, chunks)
    assert bounds == sorted(set(bounds))
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(parts), chunks + 1)
    if blocks % chunks and (blocks + 2) % chunks:
        worst = max(sum(seconds[a:b]) for a, b in pairwise(bounds))
        # What stands before and after the blocks goes with the first and the last one.
        joined = [sum(seconds[:2]), *seconds[2:-2], sum(seconds[-2:])]
        assert worst == pytest.approx(min(max(s) for s in splits(joined, chunks)))


def test_stages_share_memory_and_wait_for_each_other() -> None:
    sizes, names, uses = (2,), ("model",), ("tensor",)
    cluster = CLUSTER.with_devices(8)
    part = Cluster.preset("h100", 8).with_devices(8)
    solution = solve(GRAPH, _two(part), sizes, names, uses)  # type: ignore[arg-type]
    model = CostModel(
        GRAPH, _two(cluster), solution.program.sizes, Prepared(GRAPH).rules, optimizer_of("adamw")
    )
    one = price_step(model, solution.program, Schedule(microbatches=8))
    four = price_step(model, solution.program, Schedule(microbatches=8, stages=4))
    two = price_step(
        model,
        solution.program,
        Schedule(microbatches=8, stages=4, virtual_stages=2, order="interleaved"),
    )
    assert four.memory.parameters_bytes < one.memory.parameters_bytes
    assert (len(one.memory.stages), len(four.memory.stages)) == (0, 4)
    assert max(s.allocated_bytes for s in four.memory.stages) == four.memory.allocated_bytes
    stored = sum(s.parameters_bytes for s in four.memory.stages)
    assert stored == one.memory.parameters_bytes
    assert one.step_time.total_s / 4 < two.step_time.total_s
    assert two.step_time.total_s < one.step_time.total_s
    waiting = four.step_time.total_s - (
        four.step_time.compute_s
        + four.step_time.optimizer_s
        + four.step_time.exposed_communication_s
    )
    assert waiting > 0
    assert any(g.op == "send" for g in four.collectives)


def _two(cluster: Cluster) -> Cluster:
    from dataclasses import replace

    return replace(cluster, devices=2)


def test_sharing_the_optimizer_divides_what_is_not_cut_along_data_already(solved: Solved) -> None:
    model, solution = solved
    one = price_step(model, solution.program, Schedule(microbatches=2))
    shared = price_step(model, solution.program, Schedule(microbatches=2, optimizer_shards=8))
    if solution.uses == ("fsdp",):
        assert shared.memory.optimizer_bytes == one.memory.optimizer_bytes
        assert shared.step_time.optimizer_s == one.step_time.optimizer_s
    else:
        assert shared.memory.optimizer_bytes == one.memory.optimizer_bytes // 8
        assert shared.step_time.optimizer_s < one.step_time.optimizer_s


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("uses", [("data", "tensor"), ("fsdp", "any")])
def test_three_measured_blocks_stand_for_many(uses: tuple[AxisUse, ...], recompute: str) -> None:
    cluster, sizes, names = Cluster.preset("h100", 4), (2, 2), ("data", "model")
    schedule = Schedule(microbatches=3, recompute=recompute)  # type: ignore[arg-type]
    steps = []
    for layers in (9, 3):
        graph = llama(layers)
        prepared = Prepared(graph)
        model = CostModel(graph, cluster, sizes, prepared.rules, optimizer_of("adamw"))
        found = solve(graph, cluster, sizes, names, uses, prepared=prepared, bucket_bytes=2**20)
        measured = measure(model, found.program, schedule).with_blocks(9)
        steps.append(compose(model, found.program, schedule, measured))
    nine, three = steps
    for name, value in nine.step_time.model_dump().items():
        # Where two places for a message cost the same, blocks need not agree on one.
        near = 1e-9 if name in ("compute_s", "optimizer_s", "forward_s") else 2e-2
        assert getattr(three.step_time, name) == pytest.approx(value, rel=near), name
    assert three.memory == nine.memory
    many, few = (sum(g.seconds for g in s.collectives) for s in steps)
    assert few == pytest.approx(many, rel=2e-2)


def _on(name: str, uses: tuple[AxisUse, ...], sizes: tuple[int, ...]) -> tuple[CostModel, Program]:
    names = {1: ("data",), 2: ("data", "model")}[len(sizes)]
    cluster = Cluster.preset(name, prod(sizes))
    prepared = Prepared(GRAPH)
    found = solve(GRAPH, cluster, sizes, names, uses, prepared=prepared)
    program = found.program.regathering() if "fsdp" in uses else found.program
    model = CostModel(GRAPH, cluster, program.sizes, prepared.rules, optimizer_of("adamw"))
    return model, program


def test_prefetch_lies_between_the_longer_side_and_waiting() -> None:
    model, program = _on("v100-ethernet-25", ("fsdp",), (16,))
    plain = Schedule(microbatches=2)
    waiting = price_step(model, program, plain).step_time
    beside = price_step(
        model, program, plain.model_copy(update={"overlapped": ("data",)})
    ).step_time
    assert beside.total_s < waiting.total_s
    assert beside.compute_s == pytest.approx(waiting.compute_s)
    assert beside.communication_s == pytest.approx(waiting.communication_s)
    assert beside.total_s >= max(beside.compute_s, beside.communication_s)


def test_gradients_delay_messages_of_their_own_tier_alone() -> None:
    cluster = Cluster.preset("h100", 16)
    graph = llama(3, 16, 128, 512, 8, 4, 1024, 2000)
    model = CostModel(graph, cluster, (2, 8), Prepared(graph).rules, optimizer_of("adamw"))
    assert model.prices.tiers_of((0,)) == (1,)  # from node to node
    assert model.prices.tiers_of((1,)) == (0,)
    assert model.prices.tiers_of((0, 1)) == (0, 1)
    size = 10**9
    gradient = model.prices("all_reduce", (0,), size)

    def exposed(tiers: tuple[int, ...], seconds: float) -> float:
        waiting = Message(seconds, False, tiers)
        part = Part(True, backward=[(((0,), "bfloat16"), size), waiting], backward_s=seconds)
        return buckets([part], 1, model)[0]

    for seconds in (0.25 * gradient, 4 * gradient):
        assert exposed((1,), seconds) == pytest.approx(gradient)
        assert exposed((0, 1), seconds) == pytest.approx(gradient)
        assert exposed((0,), seconds) == pytest.approx(max(0.0, gradient - seconds))


@pytest.mark.parametrize("blocks", [1, 2, 40])
@pytest.mark.parametrize("computing", [0.0, 0.3, 0.9, 1.5, 4.0])
@pytest.mark.parametrize("full", [0.5, 1.7, 3.0, 1000.0])
def test_blocks_alike_send_gradients_as_blocks_that_are_looked_at_one_by_one(
    blocks: int, computing: float, full: float
) -> None:
    cluster = Cluster.preset("h100", 16)
    graph = llama(3, 16, 128, 512, 8, 4, 1024, 2000)
    model = CostModel(graph, cluster, (2, 8), Prepared(graph).rules, optimizer_of("adamw"))
    size = 10**9
    gradient = model.prices("all_reduce", (0,), size)

    def part(is_block: bool, share: float) -> Part:
        away, near = (Message(share * computing * gradient, False, (tier,)) for tier in (1, 0))
        ready = ((0,), "bfloat16"), round(share * size)
        seconds = 2 * away.seconds
        return Part(is_block, backward=[ready, away, near, ready], backward_s=seconds)

    first, block, last = part(False, 0.3), part(True, 1.0), part(False, 0.7)
    alike = buckets([first, *[block] * blocks, last], round(full * size), model)
    copies = [replace(block) for _ in range(blocks)]
    one_by_one = buckets([first, *copies, last], round(full * size), model)
    assert alike[0] == pytest.approx(one_by_one[0])
    assert alike[1] == one_by_one[1]
    assert sum(n for _, n, _ in alike[1]) == 2 * (blocks * size + round(0.3e9) + round(0.7e9))


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 2))
def test_sides_that_run_together_slow_each_other_but_are_never_slower_than_in_turn(
    computing: float, messages: float, contention: float
) -> None:
    both = Kernels(contention=contention).beside(computing, messages)
    assert max(computing, messages) <= both <= computing + messages + 1e-12


def test_overlap_is_of_the_axes_that_are_named() -> None:
    model, program = _on("h100", ("data", "tensor"), (2, 4))
    plain = Schedule(microbatches=2)
    seconds = [
        price_step(model, program, plain.model_copy(update={"overlapped": o})).step_time.total_s
        for o in ((), ("data",), ("model",))
    ]
    assert seconds[2] < seconds[0]
    assert seconds[2] < seconds[1] <= seconds[0]


def test_fewer_bits_make_products_of_blocks_faster_and_keep_less() -> None:
    _, program = _on("gb200", ("data",), (4,))
    steps = []
    for products in ("native", "fp8", "nvfp4"):
        schedule = Schedule(microbatches=2, products=products)  # type: ignore[arg-type]
        model = CostModel.of(program, Cluster.preset("gb200", 4), "adamw", schedule)
        steps.append(price_step(model, program, schedule))
    kept = [s.memory.activations_bytes for s in steps]
    assert kept == sorted(kept, reverse=True)
    assert kept[2] < kept[0]


def test_recomputing_some_blocks_lies_between_none_and_all() -> None:
    model, program = _on("h100", ("data",), (8,))
    steps = [
        price_step(model, program, Schedule(microbatches=2, recompute="full", recomputed_blocks=n))
        for n in (0, 2, 5, 8)
    ]
    none = price_step(model, program, Schedule(microbatches=2))
    whole = price_step(model, program, Schedule(microbatches=2, recompute="full"))
    time = [s.step_time.total_s for s in steps]
    kept = [s.memory.activations_bytes for s in steps]
    assert time == sorted(time)
    assert kept == sorted(kept, reverse=True)
    assert time[0] == pytest.approx(none.step_time.total_s)
    assert time[-1] == pytest.approx(whole.step_time.total_s)
    assert kept[-1] == whole.memory.activations_bytes


def test_a_model_of_few_blocks_is_priced_with_many() -> None:
    model, program = _on("h100", ("data",), (8,))
    eight = price_step(model, program, Schedule(microbatches=2)).step_time.compute_s
    many = [
        price_step(model, program, Schedule(microbatches=2, blocks=n)).step_time.compute_s
        for n in (9, 10, 20)
    ]
    assert many[1] - many[0] == pytest.approx(many[0] - eight)
    assert many[2] - many[1] == pytest.approx(10 * (many[0] - eight))
    with pytest.raises(RequestError, match="cannot stand for"):
        price_step(model, program, Schedule(microbatches=2, blocks=2))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_zero_bubble_splits_backward_and_all_else_stays(solved: Solved, recompute: str) -> None:
    model, solution = solved
    plain = Schedule(microbatches=8, stages=4, recompute=recompute)  # type: ignore[arg-type]
    split = plain.model_copy(update={"order": "zero-bubble"})
    whole = price_step(model, solution.program, plain)
    apart = price_step(model, solution.program, split, timeline=True)
    for one, two in zip(whole.chunks, apart.chunks, strict=True):
        assert two.forward_s == pytest.approx(one.forward_s)
        assert two.backward_s == pytest.approx(one.backward_s, rel=1e-3)
        assert one.weight_s == 0.0
        assert 0.15 * two.backward_s < two.weight_s < 0.8 * two.backward_s
    assert apart.step_time.total_s < whole.step_time.total_s
    assert [t.action.task for t in apart.timeline].count("W") == 4 * 8
    sent = [sorted((g.op, g.axes, g.total_bytes) for g in s.collectives) for s in (whole, apart)]
    assert sent[0] == sent[1]


def test_weights_wait_for_their_gradients_with_what_these_need(solved: Solved) -> None:
    model, solution = solved
    plain = Schedule(microbatches=8, stages=4)
    split = plain.model_copy(update={"order": "zero-bubble"})
    one, two = (price_step(model, solution.program, s).memory.stages for s in (plain, split))
    kept = price_step(model, solution.program, Schedule(microbatches=1, stages=4)).memory.stages
    for rank in range(4):
        # Rank r leaves r for later; operands and gradients of results are about what B needs.
        more = two[rank].activations_bytes - one[rank].activations_bytes
        assert 0.3 * rank * kept[rank].activations_bytes <= more
        assert more < (rank + 0.5) * 1.5 * kept[rank].activations_bytes
        assert two[rank].parameters_bytes == one[rank].parameters_bytes


def test_gradients_of_weights_by_hand() -> None:
    # Two layers without a loss of their own: x -> linear -> relu -> linear -> sum.
    graph = mlp(4, 8, 16, 3)
    weights = of_weights(graph)
    assert weights == {n.name for n in graph.nodes if n.op == "parameter"}
    linears = [n for n in graph.nodes if n.family == "aten.linear"]
    # The model's input wants no gradient, so the first product has nothing but W.
    assert halves(graph, linears[0], weights) == ((False, False), (False, True))
    assert halves(graph, linears[1], weights) == ((True, False), (False, True))
