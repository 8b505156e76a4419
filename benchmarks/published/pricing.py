"""Rows of published runs priced by ``autoshard.estimate``."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from threading import Lock
from typing import TypeVar

import torch

import autoshard
from autoshard.analyzer import Captured
from autoshard.errors import AutoshardError
from autoshard.plan import Schedule
from autoshard.planner.capture import capture
from autoshard.planner.plan import Plan
from autoshard.search import Solved
from benchmarks.published.batches import ByBatch
from benchmarks.published.rows import Inexpressible, Request, likeness, request
from benchmarks.published.sizes import BySizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A row with its figures, or why there are none.

    Attributes:
        row: as the file has it.
        predicted_s: seconds of a step.
        parts: of them, in words.
        recompute: what was assumed to be recomputed, where the row does not say.
        reason: why it was not priced; empty where it was.
    """

    row: Mapping[str, str]
    predicted_s: float = 0.0
    parts: str = ""
    recompute: str = ""
    reason: str = ""

    @property
    def measured_s(self) -> float:
        """Published seconds of a step."""
        return float(self.row["step_time_s"])

    @property
    def error(self) -> float:
        """Relative error."""
        return self.predicted_s / self.measured_s - 1


@dataclass(slots=True)
class Known:
    """What rows have in common.

    Attributes:
        captures: of models, by what tells them apart; None: not by its sizes.
        graph: which model at which batch came last.
        captured: that model.
        solved: its solutions.
    """

    captures: dict[object, BySizes | ByBatch | None] = field(default_factory=dict)
    graph: object = None
    captured: Captured | None = None
    solved: Solved | None = None


_KNOWN = Known()
"""What is known in this process: runs of rows have models in common."""


def captured(asked: Request, known: Known) -> tuple[Captured, Solved]:
    """The model of a request at its batch, and the solutions of its graph."""
    graph = (asked.key, asked.batch)
    if known.graph != graph or known.captured is None or known.solved is None:
        found = _by_sizes(asked, known) or _by_batch(asked, known)
        known.graph, known.captured, known.solved = graph, found, Solved(found.graph)
    return known.captured, known.solved


def _by_sizes(asked: Request, known: Known) -> Captured | None:
    """From captures that all models of its shape share; None where numbers are no products."""
    if asked.shape is None:
        return None
    if asked.shape not in known.captures:
        by_sizes = BySizes(lambda sizes: capture(*asked.resized(sizes)), asked.sizes)
        known.captures[asked.shape] = by_sizes
    found = known.captures[asked.shape]
    if not isinstance(found, BySizes):
        return None
    try:
        return found.at(asked.sizes)
    except ValueError:
        known.captures[asked.shape] = None
        return None


def _by_batch(asked: Request, known: Known) -> Captured:
    """From captures of its own at two batches."""
    found = known.captures.get(asked.key)
    if not isinstance(found, ByBatch):
        found = ByBatch(lambda batch: capture(asked.model, asked.inputs(batch)))
        known.captures[asked.key] = found
    return found.at(asked.batch)


def plan_of(asked: Request, known: Known) -> Plan:
    """The plan of a request: with the first kind of recomputation that fits, or the last."""
    model, solved = captured(asked, known)
    for kind, blocks in asked.recompute:
        plan = autoshard.estimate(
            asked.model,
            cluster=asked.cluster,
            captured=model,
            solved=solved,
            progress=False,
            recompute=kind,
            recomputed_blocks=blocks,
            **asked.options,
        )
        if plan.memory.fits:
            break
    return plan


def price(row: Mapping[str, str], known: Known) -> Priced:
    """One row; what goes wrong with it is its reason."""
    try:
        asked = request(row)
        plan = plan_of(asked, known)
    except (Inexpressible, AutoshardError) as error:
        return Priced(row=row, reason=str(error).splitlines()[0])
    t = plan.step_time
    parts = (
        f"compute {t.compute_s:.3f}, optimizer {t.optimizer_s:.3f}, communication "
        f"{t.communication_s:.3f} ({t.exposed_communication_s:.3f} exposed)"
    )
    assumed = _assumed(plan.schedule) if len(asked.recompute) > 1 else ""
    return Priced(row=row, predicted_s=t.total_s, parts=parts, recompute=assumed)


def _assumed(schedule: Schedule) -> str:
    if schedule.recompute == "none":
        return "none"
    some = schedule.recomputed_blocks
    return "all" if some is None else f"{some} blocks"


Row = Mapping[str, str]
Found = TypeVar("Found")

RUN = 20
"""Rows that a process takes at a time."""


def price_all(rows: Sequence[Row]) -> list[Priced]:
    """All rows, in this process."""
    return [price(row, _KNOWN) for row in rows]


def shared(rows: Sequence[Row], processes: int) -> list[Priced]:
    """All rows, over ``processes``, in the order of ``rows``."""
    return spread(price_all, rows, processes)


def spread(
    work: Callable[[Sequence[Row]], list[Found]], rows: Sequence[Row], processes: int
) -> list[Found]:
    """What ``work`` finds of each row, over ``processes``, in the order of ``rows``.

    Rows whose models are alike follow one another, and each process begins at a place of its own,
    so that a model is captured in one of them; the first that is done takes from the end of
    another's.
    """
    order = sorted(range(len(rows)), key=lambda i: likeness(rows[i]))
    if processes == 1:
        _begin()
        parts = [(order, work([rows[i] for i in order]))]
    else:
        parts = _stolen(work, rows, order, processes)
    by_place = {i: p for run, found in parts for i, p in zip(run, found, strict=True)}
    return [by_place[i] for i in range(len(rows))]


def _stolen(
    work: Callable[[Sequence[Row]], list[Found]],
    rows: Sequence[Row],
    order: Sequence[int],
    processes: int,
) -> list[tuple[Sequence[int], list[Found]]]:
    runs = [order[i : i + RUN] for i in range(0, len(order), RUN)]
    queues = [
        deque(runs[len(runs) * k // processes : len(runs) * (k + 1) // processes])
        for k in range(processes)
    ]

    lock = Lock()

    def take(own: deque[Sequence[int]]) -> Sequence[int] | None:
        with lock:
            if own:
                return own.popleft()
            longest = max(queues, key=len)
            return longest.pop() if longest else None

    def drain(own: deque[Sequence[int]]) -> list[tuple[Sequence[int], list[Found]]]:
        out = []
        spawn = get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin) as pool:
            while (run := take(own)) is not None:
                out.append((run, pool.submit(work, [rows[i] for i in run]).result()))
        return out

    with ThreadPoolExecutor(processes) as threads:
        return [part for parts in threads.map(drain, queues) for part in parts]


def _begin() -> None:
    """A process does nothing beside its rows: one thread, and what is there already stays."""
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(50_000)
