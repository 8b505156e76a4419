"""Pipeline schedules: what each rank does in which order, and how long a step takes.

A model is cut into ``stages * virtual`` chunks of consecutive blocks; chunk ``c`` lies on rank
``c % stages``. The orders are those of ``torch.distributed.pipelining``: GPipe (all forward, then
all backward), 1F1B, and interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, "depth first").
In the zero-bubble order (Qi et al. 2023, arXiv 2401.10241, ZB1P) the gradients of weights are a
task of their own that fills what would be waiting.

With equal chunks and free messages the waiting is in closed form; with t = forward + backward of a
whole stage, m microbatches, p stages, v chunks a rank::

    gpipe, 1f1b     (p - 1) t
    interleaved     (p - 1) t / v              (m a multiple of p)
    zero-bubble     (p - 1) max(F + B - W, F, B)     (B without W; m at least p)

The paper has F + B - W, for a W that takes no longer than F and B; the others were found by
simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autoshard.errors import RequestError

Order = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
ORDERS: tuple[Order, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")

EXACT_TASKS = 8192
"""Chunks times microbatches up to which every action of a step is simulated."""

FULL_ROUNDS = 3
"""Rounds of microbatches after which a pipeline is taken to be full."""

Task = Literal["F", "B", "W"]
TASKS: tuple[Task, ...] = ("F", "B", "W")


@dataclass(frozen=True, slots=True)
class Action:
    """One task of a rank: forward (F), backward (B) or gradients of weights (W) of a microbatch.

    In every order but ``zero-bubble`` a B includes its W.
    """

    task: Task
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Seconds of one microbatch in one chunk of the model.

    Attributes:
        forward_s: forward.
        backward_s: backward, gradients of weights included.
        weight_s: the part of it that only makes gradients of weights.
        send_s: of the result to the next chunk, and of its gradient back.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    send_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placed:
    """An action with its place in time."""

    rank: int
    action: Action
    start_s: float
    seconds: float


def check(order: Order, stages: int, virtual: int, microbatches: int) -> None:
    """Refuse what no schedule can do.

    Raises:
        RequestError: says which numbers do not fit, and which would.
    """
    if order not in ORDERS:
        raise RequestError(f"unknown schedule {order!r}; choose from {', '.join(ORDERS)}")
    if min(stages, virtual, microbatches) < 1:
        raise RequestError(
            f"stages, virtual stages and microbatches must be at least 1, found {stages}, "
            f"{virtual}, {microbatches}"
        )
    if virtual > 1 and order != "interleaved":
        raise RequestError(f"{virtual} virtual stages need the interleaved schedule, not {order!r}")
    rounds = max(1, microbatches // stages)
    if order == "interleaved" and microbatches % rounds:
        near = range(max(1, microbatches - stages), microbatches + stages + 1)
        fitting = [m for m in near if m % max(1, m // stages) == 0]
        raise RequestError(
            f"the interleaved schedule runs {microbatches} microbatches in {rounds} rounds of "
            f"{stages} stages, which must divide; {', '.join(map(str, fitting))} would"
        )


@lru_cache(maxsize=32)
def actions(
    order: Order, stages: int, virtual: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """For each rank what it does, in order.

    Raises:
        RequestError: see :func:`check`.
    """
    check(order, stages, virtual, microbatches)
    if order == "gpipe":
        forward = range(microbatches)
        return tuple(
            tuple(Action(task, rank, m) for task in ("F", "B") for m in forward)
            for rank in range(stages)
        )
    if order == "interleaved":
        return tuple(
            tuple(_interleaved(rank, stages, virtual, microbatches)) for rank in range(stages)
        )
    split = order == "zero-bubble"
    return tuple(
        tuple(_one_forward_one_backward(rank, stages, microbatches, split))
        for rank in range(stages)
    )


def _one_forward_one_backward(
    rank: int, stages: int, microbatches: int, split: bool
) -> list[Action]:
    """As many forwards ahead as there are stages from here to the end, then in turns.

    Where W is apart, rank r leaves r of them for the end: just what fills its wait.
    """
    warm = min(microbatches, stages - rank)
    out = [Action("F", rank, m) for m in range(warm)]
    ahead, weights = warm, 0
    for m in range(microbatches):
        out.append(Action("B", rank, m))
        if split and m >= rank:
            out.append(Action("W", rank, weights))
            weights += 1
        if ahead < microbatches:
            out.append(Action("F", rank, ahead))
            ahead += 1
    if split:
        out += [Action("W", rank, m) for m in range(weights, microbatches)]
    return out


def _interleaved(rank: int, stages: int, virtual: int, microbatches: int) -> list[Action]:
    rounds = max(1, microbatches // stages)
    in_round = microbatches // rounds
    total = virtual * microbatches
    warm = min(total, (virtual - 1) * in_round + 2 * (stages - 1 - rank))

    def task(kind: Task, step: int) -> Action:
        turn, place = divmod(step, in_round)
        local = turn % virtual
        if kind == "B":
            local = virtual - 1 - local
        return Action(kind, local * stages + rank, turn // virtual * in_round + place)

    out = [task("F", step) for step in range(warm)]
    for step in range(warm, total):
        out += [task("F", step), task("B", step - warm)]
    out += [task("B", step) for step in range(total - warm, total)]
    return out


@dataclass(frozen=True, slots=True)
class Listed:
    """Every action of a step, each after what it waits for.

    That does not depend on what any of them costs. Numbers are of actions in this order; -1: there
    is nothing to wait for.

    Attributes:
        actions: themselves.
        costs: number of each one's seconds: its place in ``TASKS`` x chunks.
        before: the one before it on its rank.
        needs: the one whose result it needs.
        sends: the chunk that sends it that result; -1: it is there.
    """

    actions: tuple[Action, ...]
    costs: tuple[int, ...]
    before: tuple[int, ...]
    needs: tuple[int, ...]
    sends: tuple[int, ...]


@lru_cache(maxsize=8)
def listed(order: Order, stages: int, virtual: int, microbatches: int) -> Listed:
    """The actions of all ranks in one list.

    Raises:
        RequestError: see :func:`check`.
    """
    todo = actions(order, stages, virtual, microbatches)
    count = stages * virtual
    place: dict[tuple[Task, int, int], int] = {}
    rows: list[tuple[Action, int, int, int, int]] = []
    latest, at = [-1] * stages, [0] * stages
    waiting = set(range(stages))
    while waiting:
        before = len(rows)
        for rank in sorted(waiting):
            while at[rank] < len(todo[rank]):
                action = todo[rank][at[rank]]
                needed, sends = _needed(action, count - 1)
                needs = -1 if needed is None else place.get(needed)
                if needs is None:
                    break
                task, chunk, m = action.task, action.chunk, action.microbatch
                rows.append((action, TASKS.index(task) * count + chunk, latest[rank], needs, sends))
                place[task, chunk, m] = latest[rank] = len(rows) - 1
                at[rank] += 1
            if at[rank] == len(todo[rank]):
                waiting.discard(rank)
        if waiting and len(rows) == before:
            raise RequestError(f"schedule {order!r} of {stages} stages waits for itself")
    return Listed(*zip(*rows, strict=True))


def times(
    order: Order, chunks: Sequence[Chunk], stages: int, microbatches: int
) -> tuple[list[float], list[float]]:
    """(start, end) of each action of :func:`listed`, in seconds from the beginning of the step.

    An action starts when its rank is free and what it needs has arrived. Messages do not keep a
    rank busy; they take ``send_s`` of the chunk that they leave.

    Raises:
        RequestError: see :func:`check`.
    """
    rows = listed(order, stages, len(chunks) // stages, microbatches)
    split = order == "zero-bubble"
    seconds = [_seconds(task, chunk, split) for task in TASKS for chunk in chunks]
    sent = [*(chunk.send_s for chunk in chunks), 0.0]
    starts, ends = [0.0] * len(rows.costs), [0.0] * (len(rows.costs) + 1)
    # The last end, which is number -1 too, stays what it is: the beginning of the step.
    for i, (cost, before, needs, sends) in enumerate(
        zip(rows.costs, rows.before, rows.needs, rows.sends, strict=True)
    ):
        free, ready = ends[before], ends[needs] + sent[sends]
        starts[i] = start = free if free > ready else ready
        ends[i] = start + seconds[cost]
    return starts, ends[:-1]


def simulate(
    order: Order, chunks: Sequence[Chunk], stages: int, microbatches: int
) -> tuple[float, list[Placed]]:
    """Seconds of a step and every action in time; see :func:`times`.

    Args:
        order: the schedule.
        chunks: of each chunk of the model, in order; a multiple of ``stages``.
        stages: ranks of the pipeline.
        microbatches: of one step.

    Raises:
        RequestError: see :func:`check`.
    """
    starts, ends = times(order, chunks, stages, microbatches)
    split = order == "zero-bubble"
    rows = listed(order, stages, len(chunks) // stages, microbatches)
    placed = [
        Placed(a.chunk % stages, a, start, _seconds(a.task, chunks[a.chunk], split))
        for a, start in zip(rows.actions, starts, strict=True)
    ]
    return max(ends), placed


def duration(order: Order, chunks: Sequence[Chunk], stages: int, microbatches: int) -> float:
    """Seconds of a step, as :func:`simulate` gives them, without every action.

    Once the pipeline is full each further microbatch takes as long as the slowest stage, so long
    steps are simulated for some rounds and the others added.

    Raises:
        RequestError: see :func:`check`.
    """
    short = simulated(order, len(chunks), stages, microbatches)
    if short == microbatches:
        return max(times(order, chunks, stages, microbatches)[1])
    check(order, stages, len(chunks) // stages, microbatches)
    slowest = max(
        sum(c.forward_s + c.backward_s for c in chunks[rank::stages]) for rank in range(stages)
    )
    return max(times(order, chunks, stages, short)[1]) + (microbatches - short) * slowest


def simulated(order: Order, chunks: int, stages: int, microbatches: int) -> int:
    """Of how many microbatches every action is simulated by :func:`duration`."""
    short = FULL_ROUNDS * stages + microbatches % stages
    if (
        chunks * microbatches <= EXACT_TASKS
        or order == "gpipe"
        or (order == "interleaved" and microbatches % stages)
    ):
        return microbatches
    return min(short, microbatches)


def _needed(action: Action, last: int) -> tuple[tuple[Task, int, int] | None, int]:
    """(what an action needs the result of, the chunk that sends it; -1: it is on the same rank)."""
    task, chunk, m = action.task, action.chunk, action.microbatch
    if task == "F":
        return (("F", chunk - 1, m), chunk - 1) if chunk else (None, -1)
    if task == "W" or chunk == last:
        return ("B" if task == "W" else "F", chunk, m), -1
    return ("B", chunk + 1, m), chunk


def _seconds(task: Task, chunk: Chunk, split: bool) -> float:
    if task == "F":
        return chunk.forward_s
    if task == "W":
        return chunk.weight_s
    return chunk.backward_s - chunk.weight_s if split else chunk.backward_s
