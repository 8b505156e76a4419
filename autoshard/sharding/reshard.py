"""From one layout to another: the cheapest steps, and the bytes that each sends.

One table serves forward and backward, pricing and running::

    S -> R  all_gather     P -> R  all_reduce     P -> S  reduce_scatter    S(i) -> S(j)  all_to_all
    R -> S  slice          R -> P  mask           S -> P  embed                   (no message)

``mask`` keeps the value on coordinate 0 and zeros elsewhere; ``embed`` puts a shard among zeros.
Equal steps on several axes may be one step over the merged group. The steps of an edge are found
by Dijkstra over the joint states, not greedily: greedy was wrong often enough that
meta-pytorch/autoparallel replaced it (PR 462).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Literal, cast

from autoshard.sharding.collective import CollectiveOp, CollectiveSeconds
from autoshard.sharding.layout import (
    Cut,
    Layout,
    P,
    R,
    Shape,
    State,
    compatible,
    forward_half,
    gradient_half,
    local_shape,
)

StepKind = Literal[
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "mask", "embed"
]
MESSAGES: frozenset[str] = frozenset({"all_gather", "all_reduce", "reduce_scatter", "all_to_all"})


@dataclass(frozen=True, slots=True)
class Step:
    """One move of a value: ``axes`` (ascending indices) go from ``before`` to ``after``.

    ``before`` and ``after`` are whole layouts of one half (states R, P and cuts).
    """

    kind: StepKind
    axes: tuple[int, ...]
    before: Layout
    after: Layout

    @property
    def is_message(self) -> bool:
        """Whether the step sends anything."""
        return self.kind in MESSAGES


def _kind(source: State, target: State, mesh_size: int) -> StepKind | None:
    match source, target:
        case Cut(), Cut():
            if source.dim != target.dim and not (source.n % mesh_size or target.n % mesh_size):
                return "all_to_all"
            return None
        case Cut(), _:
            return "all_gather" if target is R else "embed"
        case _, Cut():
            return "slice" if source is R else "reduce_scatter"
        case _:
            return "mask" if source is R else "all_reduce"


def padded(n: int, parts: int) -> int:
    """``n`` rounded up to a whole number of equal parts."""
    return -(-n // parts) * parts


def step_bytes(
    step: Step, shape: Shape, itemsize: int, mesh: Shape, coordinate: Sequence[int]
) -> int:
    """Bytes of the message of ``step`` as ``Collective.num_bytes`` counts them; 0 without message.

    The axes of the step are padded to equal parts; the other axes count at ``coordinate``.
    """
    if step.kind == "all_gather":
        whole, cuts = step.after, step.before
    elif step.kind == "reduce_scatter":
        whole, cuts = step.before, step.after
    elif step.is_message:
        return prod(local_shape(shape, step.before, mesh, coordinate)) * itemsize
    else:
        return 0
    elements = prod(local_shape(shape, whole, mesh, coordinate))
    for axis in step.axes:
        cut = cuts[axis]
        assert isinstance(cut, Cut)
        elements = elements // cut.n * padded(cut.n, mesh[axis])
    return elements * itemsize


def path(
    shape: Shape,
    itemsize: int,
    source: Layout,
    target: Layout,
    mesh: Shape,
    seconds: CollectiveSeconds,
) -> tuple[float, tuple[Step, ...]]:
    """Cheapest steps from ``source`` to ``target`` (layouts of one half), and their seconds.

    Priced at coordinate 0, which holds the largest shards. Ties go to fewer steps, then to the
    steps found first, so that every process finds the same.
    """
    if source == target:
        return 0.0, ()
    axes = range(len(mesh))
    targets = [tuple(dict.fromkeys((target[a], R))) for a in axes]
    origin = (0,) * len(mesh)
    best: dict[Layout, tuple[float, int]] = {source: (0.0, 0)}
    came: dict[Layout, Step] = {}
    queue: list[tuple[float, int, int, Layout]] = [(0.0, 0, 0, source)]
    pushed = 0
    while queue:
        cost, length, _, layout = heapq.heappop(queue)
        if layout == target:
            break
        if (cost, length) > best[layout]:
            continue
        for step in _moves(layout, targets, mesh):
            if step.is_message:
                num_bytes = step_bytes(step, shape, itemsize, mesh, origin)
                price = seconds(cast(CollectiveOp, step.kind), step.axes, num_bytes)
            else:
                price = 0.0
            key = (cost + price, length + 1)
            if step.after not in best or key < best[step.after]:
                best[step.after] = key
                came[step.after] = step
                pushed += 1
                heapq.heappush(queue, (*key, pushed, step.after))
    steps: list[Step] = []
    layout = target
    while layout != source:
        steps.append(came[layout])
        layout = steps[-1].before
    return best[target][0], tuple(reversed(steps))


def _moves(layout: Layout, targets: Sequence[Sequence[State]], mesh: Shape) -> list[Step]:
    """Every step from ``layout``: single axes first, then equal steps on merged axes."""
    single: list[tuple[int, State, StepKind]] = []
    for axis, state in enumerate(layout):
        for target in targets[axis]:
            if target != state and (kind := _kind(state, target, mesh[axis])):
                single.append((axis, target, kind))
    out: list[Step] = []
    for size in range(1, len(mesh) + 1):
        for group in combinations(single, size):
            kinds = {kind for _, _, kind in group}
            if len(kinds) > 1 or len({axis for axis, _, _ in group}) < size:
                continue
            kind = group[0][2]
            if size > 1 and kind not in ("all_reduce", "all_gather", "reduce_scatter"):
                continue
            after = list(layout)
            for axis, target, _ in group:
                after[axis] = target
            if compatible(tuple(after)):
                out.append(Step(kind, tuple(a for a, _, _ in group), layout, tuple(after)))
    return out


@dataclass(frozen=True, slots=True)
class Reshard:
    """What an edge does: steps of the value forward, and of its gradient backward."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    forward_s: float
    backward_s: float

    @property
    def is_nothing(self) -> bool:
        """Whether neither direction has a step."""
        return not self.forward and not self.backward


class Resharder:
    """Finds and remembers the steps of edges on one mesh with one price list.

    Args:
        mesh: axis sizes.
        seconds: price of one collective.
    """

    def __init__(self, mesh: Shape, seconds: CollectiveSeconds) -> None:
        self.mesh, self.seconds = mesh, seconds
        self._paths: dict[tuple[Shape, int, Layout, Layout], tuple[float, tuple[Step, ...]]] = {}
        self._edges: dict[tuple[Shape, int, Layout, Layout, bool, bool], Reshard] = {}

    def path(
        self, shape: Shape, itemsize: int, source: Layout, target: Layout
    ) -> tuple[float, tuple[Step, ...]]:
        """:func:`path`, remembered."""
        key = (shape, itemsize, source, target)
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = path(
                shape, itemsize, source, target, self.mesh, self.seconds
            )
        return found

    def edge(
        self,
        shape: Shape,
        itemsize: int,
        produced: Layout,
        taken: Layout,
        differentiable: bool,
        *,
        deferrable: bool = False,
    ) -> Reshard:
        """Steps from the pair that a producer gives to the pair that a consumer takes.

        ``deferrable``: a gradient that only needs sums takes one step over all their axes, also
        where several steps are cheaper by themselves: it will travel with others.

        Equal edges give the same object.
        """
        key = (shape, itemsize, produced, taken, differentiable, deferrable)
        found = self._edges.get(key)
        if found is None:
            found = self._edges[key] = self._edge(*key)
        return found

    def _edge(
        self,
        shape: Shape,
        itemsize: int,
        produced: Layout,
        taken: Layout,
        differentiable: bool,
        deferrable: bool,
    ) -> Reshard:
        forward_s, forward = self.path(shape, itemsize, forward_half(produced), forward_half(taken))
        if not differentiable:
            return Reshard(forward, (), forward_s, 0.0)
        source, target = gradient_half(taken), gradient_half(produced)
        moved = tuple(a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s != t)
        if (
            deferrable
            and not forward
            and moved
            and all(source[a] is P and target[a] is R for a in moved)
        ):
            step = Step("all_reduce", moved, source, target)
            origin = (0,) * len(self.mesh)
            num_bytes = step_bytes(step, shape, itemsize, self.mesh, origin)
            return Reshard((), (step,), 0.0, self.seconds("all_reduce", moved, num_bytes))
        backward_s, backward = self.path(shape, itemsize, source, target)
        return Reshard(forward, backward, forward_s, backward_s)
