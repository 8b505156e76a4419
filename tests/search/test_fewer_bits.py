"""Products in fewer bits, as tables, bounds, steps and the search of the whole space see them."""

from __future__ import annotations

from functools import cache, partial

import pytest

from autoshard.graph import ModelGraph
from autoshard.kernels import Products, Style
from autoshard.search.bounds import ways, weights
from autoshard.search.fewer_bits import in_fewer_bits, kept_shares
from autoshard.search.folded import Tied, Weights
from autoshard.search.problem import LEANEST
from autoshard.search.space import Arrangement, Range, arrangements
from autoshard.search.step import measure
from autoshard.search.whole import Problems, search_whole
from autoshard.search.work import PRODUCTS
from tests.search.model_graphs import llama
from tests.search.test_selective import point
from tests.search.test_whole import enumerated, reserved

FEW: tuple[Products, ...] = ("fp8", "mxfp8", "nvfp4")

TOKENS, BLOCKS = 512, 6


def graph(batch: int, *, eager: bool = False) -> ModelGraph:
    return llama(3, batch, TOKENS, 1024, 8, 4, 4096, 2000, eager=eager)


@cache
def problems(
    devices: int, products: Products, style: Style = "fused", *, eager: bool = False
) -> Problems:
    graphs = cache(partial(graph, eager=eager))
    cluster = reserved("gb200", devices)
    return Problems(graphs, BLOCKS, cluster, style=style, products=products)


def test_products_of_blocks_with_weights_run_in_fewer_bits_and_scores_and_head_do_not() -> None:
    found = graph(2, eager=True)
    low = in_fewer_bits(found, "fp8")
    products = {n.name for n in found.nodes if n.family in PRODUCTS}
    assert len(low) == 3 * 7  # q, k, v, o, gate, up, down
    assert len(products - low) == 3 * 2 + 1  # scores, their values; the head
    assert not in_fewer_bits(found, "tf32")  # of float32 alone
    assert not in_fewer_bits(found, "native")
    assert not kept_shares(found, "tf32")
    shares = kept_shares(found, "nvfp4")
    assert set(shares.values()) == {4.5 / 16}
    # Of each block what enters q, k and v; o; gate and up; down.
    assert len(shares) == 3 * 4
    # Attention of one kernel keeps its own result.
    assert len(kept_shares(graph(2), "nvfp4")) == 3 * 3


def tied(inner: Problems, a: Arrangement, price: float) -> Tied:
    """Strategies at a price of memory."""
    folded = inner.folded(a)
    every, none = (1.0,) * len(folded.parts), (0.0,) * len(folded.parts)
    timed = Weights(forward=every, backward=every, kept=every, update=none, late=none, stored=none)
    _, found = folded.minimum(folded.sums(inner.schedule(a), timed), price)
    return found


MESHES = [(1, 1, 1), (4, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2)]


@pytest.mark.parametrize("style", ["eager", "fused"])
@pytest.mark.parametrize("products", FEW)
@pytest.mark.parametrize(("data", "context", "model"), MESHES)
def test_tables_take_and_keep_what_the_step_does(
    data: int, context: int, model: int, products: Products, style: Style
) -> None:
    for kind in ("none", "selective", "full"):
        a = point(kind, data, model, context)
        inner = problems(a.devices, products, style, eager=style == "eager")
        folded, schedule = inner.folded(a), inner.schedule(a)
        assert schedule.products == products
        for price in (0.0, 1e-11, LEANEST):
            chosen = tied(inner, a, price)
            found = measure(folded.model, folded.program(chosen), schedule)
            at = folded.is_block.index(True) + 1
            one = tuple(float(i == at) for i in range(len(folded.parts)))
            none = (0.0,) * len(folded.parts)
            held = Weights(forward=one, backward=one, kept=one, update=none, late=none, stored=none)
            sums = folded.measure(folded.sums(schedule, held), chosen.choice, chosen.again)
            part = found.parts[at]
            assert sums.seconds == pytest.approx(part.forward_s + part.backward_s, rel=1e-6)
            assert sums.num_bytes == pytest.approx(part.kept + part.gathered, rel=0.01)


def test_a_step_has_the_seconds_of_its_tables() -> None:
    a = point("none", data=2, model=2)
    inner = problems(4, "fp8")
    folded, schedule = inner.folded(a), inner.schedule(a)
    counted = weights(
        folded.is_block, folded.stands_for, schedule, way=ways(schedule)[0], memory_rank=0
    )
    sums = folded.sums(schedule, counted)
    _, chosen = folded.minimum(sums)
    step = folded.step(chosen, schedule, None)
    told = folded.measure(sums, chosen.choice, chosen.again).seconds
    assert told == pytest.approx(step.step_time.total_s - step.late_s, rel=1e-6)


CASES: list[tuple[int, Products, Style, dict[str, Range], float]] = [
    (4, "fp8", "fused", {}, 1.0),
    (4, "mxfp8", "eager", {"pipeline": (1, 2), "context": (1, 1)}, 1.0),
    (4, "fp8", "eager", {"pipeline": (1, 2), "context": (1, 1), "model": (1, 2)}, 0.3),
    (8, "nvfp4", "fused", {"pipeline": (2, 2), "context": (1, 1), "data": (1, 2)}, 0.3),
]


@pytest.mark.parametrize(("devices", "products", "style", "axes", "share"), CASES)
def test_bounds_hold_and_the_search_finds_what_enumeration_finds(
    devices: int, products: Products, style: Style, axes: dict[str, Range], share: float
) -> None:
    inner = problems(devices, products, style)
    kinds = ("none", "full")
    points = arrangements(inner.cluster, 8, BLOCKS, tokens=TOKENS, axes=axes, recompute=kinds)
    free = search_whole(points, inner).found.step.memory.total_bytes
    least = min(inner.scheduled(a).leanest_bytes() for a in points)
    limit = int(least + share * (free - least))
    enumerated(inner.under(limit), points)


def test_another_plan_is_the_fastest_where_products_take_less() -> None:
    points = arrangements(reserved("gb200", 8), 8, BLOCKS, tokens=TOKENS)
    native, few = (search_whole(points, problems(8, p)) for p in ("native", "nvfp4"))
    assert few.found.step.step_time.compute_s < native.found.step.step_time.compute_s
    # The plan of the one is no faster run as the other.
    again = problems(8, "nvfp4").solve(native.arrangement)
    assert few.found.step.step_time.total_s <= again.step.step_time.total_s
