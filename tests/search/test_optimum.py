"""The eliminated optimum is the optimum: HiGHS, the unfolded problem and brute force agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.candidates import AxisUse
from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.search.eliminate import Elimination, Factor
from tests.search.model_graphs import llama, mlp
from tests.search.problems import problem_of
from tests.search.referee import optimum

GRAPHS = {
    "mlp": mlp(),
    "mlp-uneven": mlp(batch=6, width=96, hidden=200, layers=3),
    "llama": llama(1),
    "llama-tied": llama(2, tied=True),
    "llama-uneven": llama(1, batch=6, width=192, heads=6, kv_heads=2, vocab=501),
    "llama-wide": llama(1, batch=8, seq=2048, width=4096, heads=32, kv_heads=8, hidden=14336),
}
MESHES: list[tuple[tuple[int, ...], tuple[AxisUse, ...]]] = [
    ((2,), ("any",)),
    ((4,), ("any",)),
    ((8,), ("any",)),
    ((2, 4), ("batch", "tensor")),
]
CASES = [
    *product(GRAPHS, MESHES),
    ("mlp", ((2, 2), ("any", "any"))),
    ("mlp", ((2, 4), ("any", "any"))),
]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_elimination_has_the_optimum_of_the_mixed_integer_program(
    name: str, mesh: tuple[tuple[int, ...], Sequence[AxisUse]]
) -> None:
    _, problem = problem_of(GRAPHS[name], *mesh)
    value, found = problem.minimum(1.0, 0.0)
    assert found.seconds == pytest.approx(value, rel=1e-12)
    assert optimum(problem, 1.0) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("sizes", [(4,), (2, 4), (8, 8)])
@pytest.mark.parametrize(
    "graph",
    [
        mlp(layers=5),
        llama(5),
        llama(4, tied=True),
        llama(3, vocab=501, heads=6, kv_heads=3, width=192),
    ],
    ids=["mlp", "llama", "tied", "uneven"],
)
def test_folded_blocks_have_the_optimum_of_the_whole_graph(
    graph: ModelGraph, sizes: tuple[int, ...]
) -> None:
    _, folded = problem_of(graph, sizes)
    _, whole = problem_of(graph, sizes, fold=False)
    for exposed, per_byte in ((1.0, 0.0), (0.0, 0.0), (0.3, 1e-13), (1.0, 1e-11)):
        one, found = folded.minimum(exposed, per_byte)
        two, _ = whole.minimum(exposed, per_byte)
        assert one == pytest.approx(two, rel=1e-12)
        again = found.seconds + per_byte * found.num_bytes
        assert again == pytest.approx(one, rel=1e-9)
    assert folded.elimination.work <= whole.elimination.work


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (2, 4)])
@pytest.mark.parametrize(
    "graph", [mlp(), llama(1), llama(1, kv_heads=1)], ids=["mlp", "llama", "mqa"]
)
def test_fewer_ways_to_pass_partial_values_lose_nothing(
    graph: ModelGraph, sizes: tuple[int, ...]
) -> None:
    _, star = problem_of(graph, sizes)
    _, full = problem_of(graph, sizes, passing="full")
    for exposed in (0.0, 1.0):
        assert star.minimum(exposed, 0.0)[0] == pytest.approx(
            full.minimum(exposed, 0.0)[0], rel=1e-9
        )


def test_limits_are_bounded_by_the_mixed_integer_program() -> None:
    for graph, sizes in ((mlp(layers=1), (4,)), (llama(1), (4,))):
        _, problem = problem_of(graph, sizes)
        _, fast = problem.minimum(1.0, 0.0)
        _, lean = problem.minimum(1.0, 1e-3)
        for share in (0.25, 0.6):
            limit = lean.num_bytes + share * (fast.num_bytes - lean.num_bytes)
            answer = problem.solve(1.0, limit)
            best = optimum(problem, 1.0, limit)
            assert answer.fits
            assert answer.assignment.num_bytes <= limit
            assert answer.bound <= best * (1 + 1e-6)
            assert best <= answer.assignment.seconds * (1 + 1e-6)
            assert answer.assignment.seconds <= 1.1 * best


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_elimination_is_exact_on_random_tables(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    scopes = data.draw(
        st.lists(
            st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True), max_size=7
        )
    )
    factors: list[Factor] = [((v,), v) for v in range(count)]
    factors += [(tuple(s), count + i) for i, s in enumerate(scopes)]
    shapes = [tuple(sizes[v] for v in scope) for scope, _ in factors]
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    arrays = [rng.integers(0, 9, shape).astype(float) for shape in shapes]
    value, choice = Elimination(sizes, factors, shapes).solve(arrays)

    def total(at: Sequence[int]) -> float:
        return float(
            sum(a[tuple(at[v] for v in s)] for (s, _), a in zip(factors, arrays, strict=True))
        )

    assert value == min(total(at) for at in product(*(range(n) for n in sizes)))
    assert total(choice.tolist()) == value


def test_ties_go_to_the_first() -> None:
    factors: list[Factor] = [((0,), 0), ((1,), 0), ((0, 1), 1)]
    value, choice = Elimination([3, 3], factors, [(3,), (3, 3)]).solve(
        [np.zeros(3), np.zeros((3, 3))]
    )
    assert value == 0.0
    assert choice.tolist() == [0, 0]


def test_large_tables_are_minimised_in_slices() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.random((90, 80)), rng.random((90, 70)), rng.random((80, 70))]
    factors: list[Factor] = [((0, 1), 0), ((0, 2), 1), ((1, 2), 2)]
    value, choice = Elimination([90, 80, 70], factors, [a.shape for a in arrays]).solve(arrays)
    joined = arrays[0][:, :, None] + arrays[1][:, None, :] + arrays[2][None, :, :]
    assert value == pytest.approx(joined.min(), rel=1e-14)
    assert joined[tuple(choice)] == pytest.approx(value, rel=1e-14)


@settings(max_examples=25, deadline=None)
@given(latency=st.floats(1, 50), slowness=st.floats(1, 50), sizes=st.sampled_from([(4,), (2, 4)]))
def test_a_slower_cluster_never_has_a_better_optimum(
    latency: float, slowness: float, sizes: tuple[int, ...]
) -> None:
    from dataclasses import replace
    from math import prod

    fast = Cluster.preset("a100", prod(sizes))
    link = replace(
        fast.inside,
        latency_s=fast.inside.latency_s * latency,
        bytes_per_second=fast.inside.bytes_per_second / slowness,
    )
    slow = fast.with_tier(0, link)
    before = problem_of(mlp(), sizes, cluster=fast)[1].minimum(1.0, 0.0)[0]
    after = problem_of(mlp(), sizes, cluster=slow)[1].minimum(1.0, 0.0)[0]
    assert before <= after * (1 + 1e-12)
