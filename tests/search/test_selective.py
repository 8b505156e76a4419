"""Recomputation of attention scores alone: what it leaves kept, in tables, bounds and steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest

from autoshard.errors import UnknownNameError
from autoshard.graph import ModelGraph
from autoshard.kernels import STYLES, Style
from autoshard.plan import Schedule
from autoshard.planner.family import Family
from autoshard.planner.whole_nearest import WholeAsked
from autoshard.search.demands import Demands
from autoshard.search.folded import Tied, Weights
from autoshard.search.problem import LEANEST
from autoshard.search.space import Arrangement, Range, arrangements
from autoshard.search.step import Measured, measure, recomputed
from autoshard.search.whole import Problems, search_whole
from autoshard.search.work import PRODUCTS
from autoshard.stretch import Growth
from tests.search.model_graphs import llama
from tests.search.test_whole import enumerated, reserved, small_mlp

BATCH, HEADS, TOKENS, LAYERS = 8, 8, 512, 3

SCORES_BYTES = 2 * BATCH * HEADS * TOKENS**2
"""Of one block, on one device."""


def graph(batch: int, kv_heads: int = HEADS, *, eager: bool = True) -> ModelGraph:
    return llama(LAYERS, batch, TOKENS, 512, HEADS, kv_heads, 1024, 2000, eager=eager)


@cache
def problems(devices: int, kv_heads: int = HEADS, style: Style = "eager") -> Problems:
    graphs = cache(partial(graph, kv_heads=kv_heads))
    return Problems(graphs, 6, reserved("h100", devices), style=style)


def point(recompute: str, data: int = 1, model: int = 1, context: int = 1) -> Arrangement:
    return Arrangement(
        pipeline=1,
        replica=1,
        data=data,
        context=context,
        model=model,
        micro_batch=BATCH // data,
        microbatches=1,
        virtual_stages=1,
        recompute=recompute,
    )


@pytest.mark.parametrize(
    ("build", "kinds"),
    [
        (graph, ("none", "selective", "pointwise", "full")),
        (partial(graph, eager=False), ("none", "pointwise", "full")),
        # Heads as wide as the sample is long: queries look like scores.
        (lambda batch: llama(3, batch, 64, 512, 8, 8), ("none", "pointwise", "full")),
        (small_mlp, ("none", "pointwise", "full")),
    ],
    ids=["spelled out", "fused", "square", "no attention"],
)
def test_kinds_are_offered_where_scores_are_tensors(
    build: Callable[[int], ModelGraph], kinds: tuple[str, ...]
) -> None:
    assert Family(Growth(build(2), build(4)), None).recomputation == kinds


def measured(a: Arrangement, price: float, style: Style = "eager") -> tuple[Tied, Measured]:
    """Strategies at a price of memory, and their segments."""
    inner = problems(a.devices, style=style)
    folded = inner.folded(a)
    every, none = (1.0,) * len(folded.parts), (0.0,) * len(folded.parts)
    timed = Weights(forward=every, backward=every, kept=every, update=none, late=none, stored=none)
    _, tied = folded.minimum(folded.sums(a.schedule(style), timed), price)
    return tied, measure(folded.model, folded.program(tied), a.schedule(style))


def test_scores_go_and_what_they_are_made_of_stays() -> None:
    parts = {}
    for kind in ("none", "selective"):
        _, found = measured(point(kind), 0.0)
        parts[kind] = [part for part in found.parts if part.is_block]
    for whole, part in zip(parts["none"], parts["selective"], strict=True):
        # The softmax alone keeps scores; queries and keys are read again.
        assert whole.kept - part.kept == part.working == SCORES_BYTES
        assert part.forward_s == whole.forward_s
        assert part.backward_s > whole.backward_s


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("price", [0.0, 1e-11, LEANEST])
@pytest.mark.parametrize(("data", "context", "model"), [(1, 1, 1), (4, 1, 1), (1, 1, 4), (2, 1, 2)])
def test_tables_keep_what_the_step_keeps(
    data: int, context: int, model: int, price: float, style: Style
) -> None:
    for kind in ("none", "selective", "pointwise"):
        a = point(kind, data, model, context)
        tied, found = measured(a, price, style)
        folded = problems(a.devices, style=style).folded(a)
        at = folded.is_block.index(True) + 1
        one = tuple(float(i == at) for i in range(len(folded.parts)))
        none = (0.0,) * len(folded.parts)
        held = Weights(forward=none, backward=none, kept=one, update=none, late=none, stored=none)
        sums = folded.sums(a.schedule(style), held)
        tables = folded.measure(sums, tied.choice, tied.again).num_bytes
        assert tables == pytest.approx(found.parts[at].kept + found.parts[at].gathered, rel=0.01)
        # And what comes back of one block while it is computed again.
        back = Weights(
            forward=none,
            backward=none,
            kept=none,
            update=none,
            late=none,
            stored=none,
            working=1.0,
        )
        sums = folded.sums(a.schedule(style), back)
        tables = folded.measure(sums, tied.choice, tied.again).num_bytes
        working = max(part.working for part in found.parts)
        assert 0.85 * working <= tables <= working * (1 + 1e-9)


CASES: list[tuple[int, int, Style, dict[str, Range]]] = [
    (2, HEADS, "eager", {}),
    (4, HEADS, "fused", {"pipeline": (1, 2), "context": (1, 1), "model": (1, 2)}),
    (4, 2, "eager", {"pipeline": (1, 1), "context": (1, 1), "model": (2, 2)}),
    (8, HEADS, "eager", {"pipeline": (2, 2), "data": (2, 2), "context": (1, 1)}),
]


@pytest.mark.parametrize(("devices", "kv_heads", "style", "axes"), CASES)
@pytest.mark.parametrize("share", [0.3])
def test_bounds_hold_and_the_search_finds_what_enumeration_finds(
    devices: int, kv_heads: int, style: Style, axes: dict[str, Range], share: float
) -> None:
    inner = problems(devices, kv_heads, style)
    kinds = ("none", "selective", "pointwise", "full")
    points = arrangements(inner.cluster, 8, 6, tokens=TOKENS, axes=axes, recompute=kinds)
    free = search_whole(points, inner).found.step.memory.total_bytes
    least = min(inner.scheduled(a).leanest_bytes() for a in points)
    limit = int(least + share * (free - least))
    enumerated(inner.under(limit), points)


def test_it_wins_where_scores_do_not_fit_and_all_else_does() -> None:
    inner = problems(2)
    kinds = ("none", "selective", "full")
    points = arrangements(inner.cluster, 8, 6, axes={"data": (2, 2)}, recompute=kinds)
    points = [a for a in points if a.micro_batch == 4]
    none, scores, full = (inner.solve(a).step for a in points if a.recomputed_blocks is None)
    assert none.memory.total_bytes > scores.memory.total_bytes > full.memory.total_bytes
    assert none.step_time.total_s < scores.step_time.total_s < full.step_time.total_s
    found = search_whole(points, inner.under(scores.memory.total_bytes))
    assert found.arrangement.recompute == "selective"
    assert found.arrangement.label.endswith("recompute selective")


def test_what_is_cheap_goes_and_products_stay() -> None:
    _, whole = measured(point("none"), 0.0)
    _, found = measured(point("pointwise"), 0.0)
    full = measured(point("full"), 0.0)[1]
    for none, cheap, all_ in zip(whole.parts, found.parts, full.parts, strict=True):
        if none.is_block:
            assert none.kept > cheap.kept > all_.kept
            assert none.backward_s < cheap.backward_s < all_.backward_s
    nodes = graph(BATCH)
    block = nodes.nodes[nodes.repeats[0].starts[1] :][: nodes.repeats[0].length]
    again = recomputed(block, Schedule(recompute="pointwise"))
    families = {n.family for n in block if n.name in again}
    assert families & PRODUCTS == {"aten.matmul"}  # of queries and keys
    assert {"aten.rms_norm", "aten.softmax", "aten.silu"} <= families


def test_it_is_looked_at_where_it_is_asked_for() -> None:
    def asked(*kinds: str) -> WholeAsked:
        return WholeAsked(
            family=Family(Growth(graph(2), graph(4)), None),
            cluster=reserved("h100", 2),
            global_batch=4,
            demands=Demands(recompute=kinds),
        )

    def kinds(found: WholeAsked) -> set[str]:
        return {a.recompute for a in found.points()}

    assert kinds(asked()) == {"none", "selective", "full"}
    assert kinds(asked("pointwise", "none")) == {"none", "pointwise"}
    with pytest.raises(UnknownNameError, match="pointwise"):
        asked("everything").points()
