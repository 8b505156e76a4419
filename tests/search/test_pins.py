"""Parameters that are stored as somebody says: held by every plan, and no proof is lost."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autoshard.errors import MeshError, RequestError, SpecError, UnknownNameError
from autoshard.planner.whole import read_pins
from autoshard.planner.whole_nearest import WholeAsked, explained_whole
from autoshard.search.demands import Demands
from autoshard.search.lean import Lean
from autoshard.search.pins import resolve, storable, stored
from autoshard.search.space import Arrangement
from autoshard.search.whole import Problems, search_whole
from autoshard.sharding.layout import Cut, R
from autoshard.sharding.spec import P, PartitionSpec
from autoshard.stretch import FEW
from tests.search.test_whole import MODELS, bounds, experts, mixture, reserved, space

CASES: list[tuple[str, str, int, int, dict[str, PartitionSpec]]] = [
    ("llama", "h100", 4, 8, {"down_*_w": P("data", "model"), "embed_w": P()}),
    ("wide", "v100", 4, 2, {"a?_?_w": P("data")}),
    ("experts", "h100", 2, 4, {"embed_tokens.weight": P(), "self_attn.*": P("model")}),
]
"""Model, cluster, devices, samples of a step, pins."""


@pytest.mark.parametrize(("model", "name", "devices", "batch", "patterns"), CASES)
def test_the_pinned_search_finds_what_enumeration_finds(
    model: str, name: str, devices: int, batch: int, patterns: dict[str, PartitionSpec]
) -> None:
    cluster, (few, blocks) = reserved(name, devices), MODELS[model]
    pins = resolve(patterns, few(2))
    holds = storable(pins, few(2))
    points = [a for a in space(model, cluster, batch) if holds(a.sizes)]
    result = search_whole(points, Problems(few, blocks, cluster, pins=pins))
    other = Problems(few, blocks, cluster, pins=pins)
    other.prepare(points)
    prices = []
    for a in points:
        solved = other.solve(a)
        assert_stored(pins, other, a)
        if solved.fits:
            price = solved.step.step_time.total_s
            prices.append(price)
            for bound in (*bounds(other, a), solved.bound):
                assert bound <= price * (1 + 1e-9), a.label
    assert result.found.step.step_time.total_s == min(prices)
    free = search_whole(space(model, cluster, batch), Problems(few, blocks, cluster))
    assert free.found.step.step_time.total_s <= min(prices)


def assert_stored(pins: Mapping[str, PartitionSpec], problems: Problems, a: Arrangement) -> None:
    """Every pinned parameter lies as its pin says."""
    folded = problems.folded(a)
    chosen = folded.strategies(problems.solve(a).tied.choice)
    for parameter, spec in pins.items():
        layout = chosen[folded.graph.parameters[parameter].name].result
        on = dict(zip(folded.axis_names, layout, strict=True))
        for axis in ("data", "model"):
            state = on.get(axis, R)
            cut = [state.dim] if isinstance(state, Cut) else []
            said = [dim for dim in range(len(spec)) if axis in spec.axes(dim)]
            assert cut == (said if axis in on else []), (a.label, parameter)


def test_pins_go_to_other_processes() -> None:
    pins = resolve({"self_attn.*": P("model")}, experts(2))
    problems = Problems(mixture().few, 4, reserved("h100", 2), pins=pins)
    assert pickle.loads(pickle.dumps(problems)).asked[3:] == problems.asked[3:]
    assert problems.under(10**9).pins == pins


def test_the_order_of_two_axes_on_a_dim_is_kept() -> None:
    names = ("data", "model")
    inner, outer = (Cut(0, 1, 2), Cut(0, 2, 32)), (Cut(0, 2, 32), Cut(0, 1, 2))
    first = stored({"w": P(("data", "model"))}, names)
    second = stored({"w": P(("model", "data"))}, names)
    assert (first("w", inner), first("w", outer)) == (True, False)
    assert (second("w", inner), second("w", outer)) == (False, True)
    assert first("another", outer)


def test_tokens_follow_the_data_axis() -> None:
    holds = stored({"w": P("data")}, ("data", "context"))
    assert holds("w", (Cut(0, 1, 2), Cut(0, 2, 32)))
    assert stored({"w": P("data")}, ("context",))("w", (R,))


DOWN = "o_proj.weight"

WRONG: list[tuple[dict[str, PartitionSpec], type[RequestError], str]] = [
    ({"self_attn.o_porj.weight": P()}, UnknownNameError, "parameter 'self_attn.o_porj.weight'"),
    ({DOWN: P("context")}, SpecError, "axis 'context'.*nothing can be chosen; name data and model"),
    ({DOWN: P("modle")}, SpecError, "modle.*nearest: model"),
    ({DOWN: P("model", "model")}, SpecError, "an axis twice"),
    ({DOWN: P(None, None, "model")}, SpecError, "names 3 dims.*has 2"),
    (
        {"layers.0.self_attn.o_proj.weight": P()},
        RequestError,
        r"but not that of other blocks.*write 'model\.layers\.\*\.self_attn\.o_proj\.weight'",
    ),
    ({DOWN: P(), "self_attn.*": P("model")}, RequestError, "leave one out"),
]


@pytest.mark.parametrize(("patterns", "error", "match"), WRONG)
def test_a_wrong_pin_says_what_is_wrong(
    patterns: dict[str, PartitionSpec], error: type[RequestError], match: str
) -> None:
    with pytest.raises(error, match=match):
        resolve(patterns, experts(2))


def test_pins_that_say_the_same_may_overlap() -> None:
    patterns = {DOWN: P("model", None), "model.layers.*.o_proj.weight": P("model")}
    assert len(resolve(patterns, experts(2))) == FEW


def asked(cluster: str, devices: int, **demands: Any) -> WholeAsked:
    return WholeAsked(
        family=mixture(),
        cluster=reserved(cluster, devices),
        global_batch=8,
        demands=Demands(**demands),
    )


def test_meshes_that_cannot_store_a_pin_are_left_out() -> None:
    # The router has a row for each of 4 experts.
    pins = {"gate.weight": P("model")}
    every, few = asked("h100", 8).points(), asked("h100", 8, pins=pins).points()
    assert few == [a for a in every if a.model <= 4]
    assert len(few) < len(every)
    eight = asked("h100", 8, sizes={"model": (8, 8)}, pins=pins)
    with pytest.raises(MeshError, match=r'can store gate.weight as P\("model"\); leave a pin out'):
        eight.points()


def test_a_pin_in_the_way_is_offered() -> None:
    sizes = {"data": (2, 2), "micro-batch": (1, 1)}
    free = asked("h100", 2, sizes=sizes, recompute=("full",))
    limit = int(Lean(free.points(), free.problems()).least[0].limit * 1.05)
    pinned = replace(free, limit=limit, demands=free.demands.changed(pins={"*": P()}))
    assert not search_whole(pinned.points(), pinned.problems()).found.fits
    error = explained_whole(pinned, pinned.problems(), None, lambda text: None)
    assert "any storage of *" in error.nearest
    assert "* stored as P()" in str(error)


def test_texts_are_read_as_specs() -> None:
    texts = ["a.weight=None,model", "b=data+tp", "c = whole", "d=dp"]
    assert read_pins(texts) == {
        "a.weight": P(None, "model"),
        "b": P(("data", "model")),
        "c": P(),
        "d": P("data"),
    }
    for text in ("a.weight", "=model", "a=", "a=model,"):
        with pytest.raises(RequestError, match="write it as mlp"):
            read_pins([text])
