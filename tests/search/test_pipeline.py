"""Schedules: closed forms, torch's own order, and laws."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from autoshard.errors import RequestError
from autoshard.plan import Schedule
from autoshard.search.bounds import ways
from autoshard.search.critical import critical
from autoshard.search.pipeline import ORDERS, Action, Chunk, Order, actions, duration, simulate

F, B, W = 1.0, 2.0, 0.9


def _equal(count: int) -> list[Chunk]:
    return [Chunk(F, B, W)] * count


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_bubble_is_stages_less_one(order: Any, stages: int, microbatches: int) -> None:
    seconds, _ = simulate(order, _equal(stages), stages, microbatches)
    assert seconds == pytest.approx((microbatches + stages - 1) * (F + B))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaving_divides_the_bubble(stages: int, virtual: int, rounds: int) -> None:
    m = stages * rounds
    seconds, _ = simulate("interleaved", _equal(stages * virtual), stages, m)
    assert seconds == pytest.approx(m * virtual * (F + B) + (stages - 1) * (F + B))


@given(
    st.integers(1, 8),
    st.integers(0, 20),
    *[st.floats(0.1, 3) for _ in range(3)],
)
@settings(max_examples=100, deadline=None)
def test_zero_bubble_fills_with_gradients_of_weights(
    stages: int, more: int, forward: float, back: float, weight: float
) -> None:
    m = stages + more
    chunk = Chunk(forward, back + weight, weight)
    seconds, _ = simulate("zero-bubble", [chunk] * stages, stages, m)
    waiting = (stages - 1) * max(forward + back - weight, forward, back)
    assert seconds == pytest.approx(m * (forward + back + weight) + waiting)


KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}


def _tasks(of_rank: list[Any]) -> list[Action]:
    """What torch plans for a rank, without waiting and without sums of gradients."""
    return [
        Action(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index)  # type: ignore[arg-type]
        for a in of_rank
        if a is not None and a.computation_type.name in KINDS
    ]


TORCH = {
    "gpipe": schedules.ScheduleGPipe._step_microbatches,
    "1f1b": schedules.Schedule1F1B._step_microbatches,
}


def _ran(order: str, rank: int, stages: int, m: int) -> list[Action]:
    """What torch's schedule asks of one stage that sends and receives nothing."""
    done: list[Action] = []
    stage = MagicMock(stage_index=rank)
    for name in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        getattr(stage, f"get_{name}_ops").return_value = []
    stage.forward_one_chunk = lambda i, *_, **__: done.append(Action("F", rank, i))
    stage.backward_one_chunk = lambda i, **_: done.append(Action("B", rank, i))
    schedule = MagicMock(_n_microbatches=m, _num_stages=stages, _stage=stage)
    schedule._check_inputs.return_value = ([()] * m, [{}] * m)
    TORCH[order](schedule)
    return done


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("more", [0, 1, 5, 13])
def test_plain_orders_are_those_of_torch(order: Any, stages: int, more: int) -> None:
    m = stages + more  # torch's 1F1B refuses fewer
    ours = actions(order, stages, 1, m)
    assert [list(tasks) for tasks in ours] == [_ran(order, r, stages, m) for r in range(stages)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_zero_bubble_order_is_that_of_torch(stages: int, rounds: int) -> None:
    m = stages * rounds
    fake = SimpleNamespace(
        n_local_stages=1,
        pp_group_size=stages,
        _n_microbatches=m,
        microbatches_per_round=stages,
    )
    of = schedules.ScheduleInterleavedZeroBubble._calculate_single_rank_operations
    ours = actions("zero-bubble", stages, 1, m)
    theirs = [_tasks(of(fake, rank)) for rank in range(stages)]  # type: ignore[arg-type]
    assert [list(rank) for rank in ours] == theirs


def _torch_order(stages: int, virtual: int, m: int) -> list[list[Action]]:
    fake = SimpleNamespace(
        n_local_stages=virtual,
        pp_group_size=stages,
        _n_microbatches=m,
        number_of_rounds=max(1, m // stages),
        microbatches_per_round=m // max(1, m // stages),
    )
    of = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
    return [_tasks(of(fake, rank)) for rank in range(stages)]  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [2, 4, 6, 8, 12])
def test_interleaved_order_is_that_of_torch(stages: int, virtual: int, microbatches: int) -> None:
    if microbatches % max(1, microbatches // stages):
        pytest.skip("no such schedule")
    ours = actions("interleaved", stages, virtual, microbatches)
    assert [list(rank) for rank in ours] == _torch_order(stages, virtual, microbatches)


@given(
    st.sampled_from([("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]),
    st.integers(2, 6),
    st.integers(1, 20),
    st.lists(st.tuples(*[st.floats(0, 3) for _ in range(2)]), min_size=18, max_size=18),
    st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=200, deadline=None)
def test_no_way_through_a_pipeline_is_longer_than_the_step(
    kind: tuple[Order, int],
    stages: int,
    m: int,
    seconds: list[tuple[float, float]],
    send_s: float,
) -> None:
    order, virtual = kind
    m = m * stages if order == "interleaved" else m
    chunks = [Chunk(f, b, send_s=send_s) for f, b in seconds[: stages * virtual]]
    total, _ = simulate(order, chunks, stages, m)
    schedule = Schedule(microbatches=m, stages=stages, virtual_stages=virtual, order=order)
    for way in ways(schedule):
        assert way.seconds(chunks) <= total * (1 + 1e-9)


ORDERS_AND_VIRTUAL = st.sampled_from(ORDERS).flatmap(
    lambda o: st.tuples(st.just(o), st.integers(1, 3) if o == "interleaved" else st.just(1))
)


@given(
    ORDERS_AND_VIRTUAL,
    st.integers(1, 5),
    st.integers(1, 4),
    st.lists(
        st.tuples(st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 1), st.floats(0, 0.5)),
        min_size=15,
        max_size=15,
    ),
)
@settings(max_examples=150, deadline=None)
def test_every_task_runs_once_in_order_and_no_rank_does_two_things(
    kind: Any, stages: int, rounds: int, seconds: list[tuple[float, float, float, float]]
) -> None:
    order, virtual = kind
    m = stages * rounds
    chunks = [Chunk(f, b + w * b, w * b, s) for f, b, w, s in seconds[: stages * virtual]]
    total, placed = simulate(order, chunks, stages, m)
    assert len({p.action for p in placed}) == len(placed)
    assert {(p.action.chunk, p.action.microbatch) for p in placed if p.action.task == "F"} == {
        (c, i) for c in range(len(chunks)) for i in range(m)
    }
    for rank in range(stages):
        own = [p for p in placed if p.rank == rank]
        for a, b in pairwise(own):
            assert b.start_s >= a.start_s + a.seconds - 1e-9
    ends = {p.action: p.start_s + p.seconds for p in placed}
    for p in placed:
        if p.action.task == "F" and p.action.chunk:
            before = Action("F", p.action.chunk - 1, p.action.microbatch)
            assert p.start_s >= ends[before] - 1e-9
    busiest = max(
        m * sum(c.forward_s + c.backward_s for c in chunks[rank::stages]) for rank in range(stages)
    )
    assert total >= busiest - 1e-9


@given(
    st.sampled_from(ORDERS),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.tuples(*[st.floats(0, 3)] * 4), min_size=15, max_size=15),
)
@settings(max_examples=100, deadline=None)
def test_an_action_starts_as_soon_as_its_rank_is_free_and_what_it_needs_is_there(
    order: Order, stages: int, virtual: int, rounds: int, seconds: list[tuple[float, ...]]
) -> None:
    virtual = virtual if order == "interleaved" else 1
    chunks = [Chunk(f, b + w, w, s) for f, b, w, s in seconds[: stages * virtual]]
    _, placed = simulate(order, chunks, stages, stages * rounds)
    ends = {(p.action.task, p.action.chunk, p.action.microbatch): p.start_s for p in placed}
    for p in placed:
        ends[p.action.task, p.action.chunk, p.action.microbatch] += p.seconds
    free = [0.0] * stages
    for p in placed:
        chunk, m = p.action.chunk, p.action.microbatch
        match p.action.task:
            case "F":
                ready = ends["F", chunk - 1, m] + chunks[chunk - 1].send_s if chunk else 0.0
            case "B" if chunk < len(chunks) - 1:
                ready = ends["B", chunk + 1, m] + chunks[chunk].send_s
            case task:
                ready = ends["F" if task == "B" else "B", chunk, m]
        assert p.start_s == max(free[p.rank], ready)
        free[p.rank] = p.start_s + p.seconds
    assert len(placed) == len(ends)


@given(st.integers(2, 5), st.integers(1, 3), st.integers(0, 14), st.floats(0.01, 1))
@settings(max_examples=60, deadline=None)
def test_slower_chunks_never_make_a_step_faster(
    stages: int, rounds: int, which: int, more: float
) -> None:
    chunks = _equal(stages)
    before, _ = simulate("1f1b", chunks, stages, stages * rounds)
    slow = [*chunks]
    slow[which % stages] = Chunk(F + more, B + more, W)
    assert simulate("1f1b", slow, stages, stages * rounds)[0] >= before


def test_what_does_not_divide_is_refused_with_what_would() -> None:
    with pytest.raises(RequestError, match="8, 10, 12"):
        actions("interleaved", 4, 2, 9 + 2)
    with pytest.raises(RequestError, match="interleaved"):
        actions("1f1b", 4, 2, 8)


@given(
    st.sampled_from(
        [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("gpipe", 1), ("zero-bubble", 1)]
    ),
    st.integers(2, 5),
    st.integers(1, 12),
    st.lists(st.floats(0.9, 1.1), min_size=15, max_size=15),
)
@settings(max_examples=40, deadline=None)
def test_long_steps_are_priced_without_every_action(
    kind: tuple[Order, int], stages: int, rounds: int, uneven: list[float]
) -> None:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("autoshard.search.pipeline.EXACT_TASKS", 0)
    order, virtual = kind
    weight = 0.9 * (order == "zero-bubble")
    equal = [Chunk(1.0, 2.0, weight)] * (stages * virtual)
    m = rounds * stages
    assert duration(order, equal, stages, m) == pytest.approx(
        simulate(order, equal, stages, m)[0], rel=1e-9
    )
    other = [Chunk(u, 2 * u, weight * u, 0.01) for u in uneven[: stages * virtual]]
    assert duration(order, other, stages, m) == pytest.approx(
        simulate(order, other, stages, m)[0], rel=0.06
    )
    monkeypatch.undo()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ORDERS),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.data(),
)
def test_the_longest_chain_is_as_long_as_its_step_and_bounds_all_others(
    order: Order, stages: int, virtual: int, rounds: int, data: st.DataObject
) -> None:
    count = stages * (virtual if order == "interleaved" else 1)

    def chunks() -> list[Chunk]:
        three = st.tuples(*[st.floats(0, 9)] * 3)
        seconds = data.draw(st.lists(three, min_size=count, max_size=count))
        send_s = data.draw(st.floats(0, 3)) if stages > 1 else 0.0
        weight = 1.0 if order == "zero-bubble" else 0.0
        return [Chunk(f, b + w, weight * w, send_s) for f, b, w in seconds]

    m = stages * rounds
    own, other = chunks(), chunks()
    if stages == 1:
        own, other = own[:1], other[:1]
    way = critical(order, own, stages, m)
    assert way.seconds(own) == pytest.approx(duration(order, own, stages, m), abs=1e-9)
    assert way.seconds(other) <= duration(order, other, stages, m) + 1e-9


def test_the_longest_chain_of_a_long_step_counts_what_is_not_simulated() -> None:
    cases = ("1f1b", 32, 0.0), ("interleaved", 8, 0.0), ("zero-bubble", 32, 0.9)
    for order, stages, w in cases:
        m, last = 1000, Chunk(1.5, 2.0, w, 0.1)
        uneven = [Chunk(1.0, 2.0, w, 0.1)] * 31 + [last]
        way = critical(order, uneven, stages, m)  # type: ignore[arg-type]
        seconds = duration(order, uneven, stages, m)  # type: ignore[arg-type]
        assert way.seconds(uneven) == pytest.approx(seconds)
