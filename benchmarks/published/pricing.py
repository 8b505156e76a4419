"""Rows of published runs priced by ``autoshard.estimate``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

import autoshard
from autoshard.analyzer import Captured
from autoshard.errors import AutoshardError
from autoshard.plan import Schedule
from autoshard.planner.capture import capture
from autoshard.planner.plan import Plan
from benchmarks.published.batches import ByBatch
from benchmarks.published.rows import Inexpressible, Request, request
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


Captures = dict[object, BySizes | ByBatch | None]
"""Models that were captured, by what tells them apart; None: not by its sizes."""

_KNOWN: Captures = {}
"""Those of this process: groups of rows have shapes in common."""


def captured(asked: Request, known: Captures) -> Captured:
    """The model of a request at its batch."""
    return _by_sizes(asked, known) or _by_batch(asked, known)


def _by_sizes(asked: Request, known: Captures) -> Captured | None:
    """From captures that all models of its shape share; None where numbers are no products."""
    if asked.shape is None:
        return None
    if asked.shape not in known:
        known[asked.shape] = BySizes(lambda sizes: capture(*asked.resized(sizes)), asked.sizes)
    found = known[asked.shape]
    if not isinstance(found, BySizes):
        return None
    try:
        return found.at(asked.sizes)
    except ValueError:
        known[asked.shape] = None
        return None


def _by_batch(asked: Request, known: Captures) -> Captured:
    """From captures of its own at two batches."""
    found = known.get(asked.key)
    if not isinstance(found, ByBatch):
        found = ByBatch(lambda batch: capture(asked.model, asked.inputs(batch)))
        known[asked.key] = found
    return found.at(asked.batch)


def plan_of(asked: Request, known: Captures) -> Plan:
    """The plan of a request: with the first kind of recomputation that fits, or the last."""
    model = captured(asked, known)
    for kind, blocks in asked.recompute:
        plan = autoshard.estimate(
            asked.model,
            cluster=asked.cluster,
            captured=model,
            progress=False,
            recompute=kind,
            recomputed_blocks=blocks,
            **asked.options,
        )
        if plan.memory.fits:
            break
    return plan


def price(row: Mapping[str, str], known: Captures) -> Priced:
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


def price_all(rows: Sequence[Mapping[str, str]]) -> list[Priced]:
    """All rows, in this process."""
    torch.set_num_threads(1)
    return [price(row, _KNOWN) for row in rows]


def _model(row: Mapping[str, str]) -> tuple[str, ...]:
    names = ("model_name", "hidden", "seq_len", "mean_seq_len", "precision")
    return tuple(row[n] for n in names)


def shared(rows: Sequence[Mapping[str, str]], processes: int) -> list[Priced]:
    """All rows, over ``processes``, in the order of ``rows``."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[_model(row)].append(i)
    order = sorted(groups.values(), key=len, reverse=True)
    if processes == 1:
        found = [price_all([rows[i] for i in group]) for group in order]
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(price_all, ([rows[i] for i in group] for group in order)))
    by_place = {
        i: p for group, ps in zip(order, found, strict=True) for i, p in zip(group, ps, strict=True)
    }
    return [by_place[i] for i in range(len(rows))]
