"""One step of a trace file, as the picture needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autoshard.errors import RequestError
from autoshard.runtime.watch.records import Interval, merged, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective of one rank; times in seconds since the step began."""

    op: str
    axis: str
    num_bytes: int
    phase: str
    value: str
    start_s: float
    end_s: float
    blocked_s: float
    predicted_s: float | None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that take part."""
        return tuple(self.axis.split(" x "))


@dataclass(slots=True)
class RankView:
    """One rank in one step."""

    rank: int
    compute: list[Interval] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    @property
    def communication_s(self) -> float:
        """Seconds in which something was under way."""
        return total(merged((m.start_s, m.end_s) for m in self.messages))

    @property
    def hidden_s(self) -> float:
        """Seconds of it beside which the program went on."""
        return max(0.0, self.communication_s - sum(m.blocked_s for m in self.messages))

    @property
    def compute_s(self) -> float:
        """Seconds of compute."""
        return sum(end - start for start, end in self.compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One call of a function on all ranks.

    Attributes:
        step: its number.
        steps: how many the trace has.
        name: of the function.
        mesh: size of each axis.
        ranks: in order.
        wall_s: from the first event to the last.
    """

    step: int
    steps: int
    name: str
    mesh: Mapping[str, int]
    ranks: tuple[RankView, ...]
    wall_s: float

    @property
    def axis_sets(self) -> tuple[str, ...]:
        """Axes, and sets of axes, that carried a message; mesh axes first, in their order."""
        used = {m.axis for r in self.ranks for m in r.messages}
        single = [axis for axis in self.mesh if axis in used]
        return (*single, *sorted(used - set(single)))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The groups of ranks that talk over ``axis``."""
        names, sizes = list(self.mesh), list(self.mesh.values())
        along = {names.index(a) for a in axis.split(" x ")}
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(prod(sizes)):
            place = coordinate(rank, sizes)
            key = tuple(-1 if i in along else c for i, c in enumerate(place))
            found.setdefault(key, []).append(rank)
        return [tuple(group) for group in found.values()]


def coordinate(rank: int, sizes: list[int]) -> tuple[int, ...]:
    """Place of a rank on a mesh of ``sizes``, row-major."""
    out = []
    for size in reversed(sizes):
        out.append(rank % size)
        rank //= size
    return tuple(reversed(out))


def view_step(document: Mapping[str, Any], step: int | None = None) -> StepView:
    """One step of a trace that :func:`autoshard.runtime.watch.trace.load` read.

    Args:
        document: the trace.
        step: which one; None: the last one that communicated.

    Raises:
        RequestError: there is no such step.
    """
    calls = {call["step"]: call for call in document["autoshard"]["calls"]}
    events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    if step is None:
        talking = [e["args"]["step"] for e in events if e["cat"] == "comm"]
        step = max(talking, default=max(calls, default=0))
    if step not in calls:
        have = f"0 to {max(calls)}" if calls else "none"
        raise RequestError(f"the trace has no step {step}; its steps: {have}")
    mine = [e for e in events if e["args"]["step"] == step]
    origin = min((e["ts"] for e in mine), default=0.0)
    ranks: dict[int, RankView] = {}
    last = 0.0
    for event in mine:
        start = (event["ts"] - origin) * 1e-6
        end = start + event["dur"] * 1e-6
        last = max(last, end)
        view = ranks.setdefault(event["pid"], RankView(event["pid"]))
        args = event["args"]
        if event["cat"] == "compute":
            view.compute.append((start, end))
        elif event["cat"] == "phase":
            view.phases.append((event["name"], start, end))
        else:
            predicted = args.get("predicted_us")
            view.messages.append(
                Message(
                    op=args["op"],
                    axis=args["axis"],
                    num_bytes=args["bytes"],
                    phase=args["phase"],
                    value=args["value"],
                    start_s=(args["issued_us"] - origin) * 1e-6,
                    end_s=end,
                    blocked_s=args["blocked_us"] * 1e-6,
                    predicted_s=None if predicted is None else predicted * 1e-6,
                )
            )
    about = calls[step]
    return StepView(
        step=step,
        steps=len(calls),
        name=about["name"],
        mesh=about["mesh"],
        ranks=tuple(ranks[r] for r in sorted(ranks)),
        wall_s=last,
    )
