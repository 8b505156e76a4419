"""What parameters cost at least in each microbatch: adding their gradients up, or messages.

Where a step has several microbatches, the gradients of a whole parameter are added to the sum of
those before. A parameter of w bytes that is whole along ``data`` and ``context`` takes w and as
much for its gradient; in parts it takes next to nothing and adds a part only, but each microbatch
gathers it for forward, again for backward where backward reads it or computes its product again,
and scatters its gradient. So each takes at least the less of the two.

What does not fit whole has no choice. Of one that is gathered twice, what was gathered may be kept:
that takes half of the bytes of a whole one, and saves the second gather. Beside the least of each
parameter, the dearest ones are whole until the room is used up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import inf

import numpy as np
from numpy.typing import NDArray

from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.plan import Schedule
from autoshard.search.kept import PARTLY
from autoshard.search.step import MASTER_BYTES, recomputed, segments
from autoshard.sharding.collective import MessageOp
from autoshard.sharding.layout import Shape

Numbers = NDArray[np.float64]
Prices = dict[tuple[int, Shape], tuple[float, float]]


class Storing:
    """The parameters of a model, by segment.

    Args:
        graph: of a few blocks, at any batch.
        cluster: all of its devices are used.
    """

    def __init__(self, graph: ModelGraph, cluster: Cluster) -> None:
        self.graph, self.cluster = graph, cluster
        self.parts = segments(graph)
        self._prices: Prices = {}
        self._sums: dict[tuple[tuple[int, ...], tuple[str, ...]], tuple[float, float]] = {}
        self._each: dict[tuple[object, ...], Numbers] = {}
        self._known: dict[str, Numbers] = {}
        sizes = [n.itemsize for n in graph.nodes if n.op == "parameter" and n.differentiable]
        largest = max(sizes, default=MASTER_BYTES)
        self._adding = (1 + 2 * MASTER_BYTES / largest) / cluster.copy_bytes_per_second
        """Least seconds a byte of a whole parameter, for adding its gradient to the sum."""

    def each(self, schedules: Sequence[Schedule], sizes: Shape) -> Numbers:
        """Least seconds of one microbatch for the parameters of each segment.

        Args:
            schedules: of a step, one for each kind of recomputation that blocks have.
            sizes: of a stage's axes replica, data, expert, context and model.
        """
        first, kinds = schedules[0], tuple(s.recompute for s in schedules)
        key = kinds, first.stages, first.microbatches > 1, sizes
        if key not in self._each:
            seconds_a_byte = self._least(first, sizes)[0] / (sizes[2] * sizes[4])
            rows = np.concatenate([self._rows(s).sum(axis=1) for s in schedules])
            self._each[key] = rows * seconds_a_byte
        return self._each[key]

    def stage(
        self, schedules: Sequence[Schedule], inside: Sequence[int], sizes: Shape, room: float
    ) -> float:
        """Seconds of one microbatch in a stage beside :meth:`each`, for want of memory.

        Args:
            schedules: of a step, one for each kind of recomputation that blocks have.
            inside: for each of these how often each segment of the graph is in the stage.
            sizes: see :meth:`each`.
            room: bytes that are left where everything is cut over all devices of the stage.

        Returns:
            Infinite where not even parts fit.
        """
        # As if ``expert`` cut all parameters: it cuts those of experts.
        replica, data, expert, context, model = sizes
        model *= expert
        schedule = schedules[0]
        once, twice = self._inside(schedules, inside)
        parts, both = data * context, once + twice
        left = room - 2 * both / (model * parts) * (1 - 1 / replica)
        if min(room, left) < 0:
            return inf
        if parts == 1:
            return 0.0
        # Bytes that a whole parameter takes more than its part, of weight and gradient.
        fits = left * model / (2 * (1 - 1 / parts))
        twice, fits = max(0.0, twice - fits), max(0.0, fits - twice)
        once = max(0.0, once - fits)
        gather, scatter = self._seconds_a_byte(schedule.stages, sizes)
        least, more = self._least(schedule, sizes)
        messages = (once + 2 * twice) * gather + (once + twice) * scatter
        forced = once * more + twice * min(2 * more, more + gather)
        return max(forced, messages - both * least) / model

    def _least(self, schedule: Schedule, sizes: Shape) -> tuple[float, float]:
        """Of a byte of a parameter: (its least seconds, how much more it takes in parts)."""
        parts = sizes[1] * sizes[3]
        adding = self._adding if schedule.microbatches > 1 else 0.0
        if parts == 1:
            return adding, 0.0
        in_parts = sum(self._seconds_a_byte(schedule.stages, sizes)) + adding / parts
        return min(adding, in_parts), max(0.0, in_parts - adding)

    def _inside(self, schedules: Sequence[Schedule], inside: Sequence[int]) -> tuple[float, float]:
        """Bytes of parameters of a stage that are gathered once, and twice."""
        key = tuple(inside), tuple(s.recompute for s in schedules)
        if key not in self._sums:
            once, twice = np.array(inside) @ np.concatenate([self._rows(s) for s in schedules])
            self._sums[key] = float(once), float(twice)
        return self._sums[key]

    def _rows(self, schedule: Schedule) -> Numbers:
        """Bytes of parameters that are gathered once, and twice, of each segment."""
        kind = schedule.recompute
        if kind not in self._known:
            rows = np.zeros((len(self.parts), 2))
            for row, s in zip(rows, self.parts, strict=True):
                nodes = self.graph.nodes[s.start : s.end]
                # Where a part of a block is computed again, the rest reads its weights as ever.
                whole = s.is_block and kind not in PARTLY
                again = recomputed(nodes, schedule) if whole else frozenset()
                for node in nodes:
                    if node.op == "parameter" and node.differentiable:
                        row[int(self._is_read_again(node.name, again))] += node.num_bytes
            self._known[kind] = rows
        return self._known[kind]

    def _is_read_again(self, name: str, again: frozenset[str]) -> bool:
        """Whether all that use a parameter do so in backward too."""
        for user, index in self.graph.uses[name]:
            node = self.graph.by_name[user]
            if user not in again and (again or node.roles[index] not in node.saved):
                return False
        return True

    def _seconds_a_byte(self, stages: int, sizes: Shape) -> tuple[float, float]:
        """Least seconds a byte of a gather along data and context, and of a scatter there."""
        key = stages, sizes
        if key not in self._prices:
            stage = self.cluster.part(stages)
            prices = stage.collective_seconds(sizes)

            def least(axes: tuple[int, ...], ops: tuple[MessageOp, ...]) -> float:
                return min(b for op in ops for _, b in prices.lines(op, axes))

            def ways(ops: tuple[MessageOp, ...]) -> Iterator[float]:
                axes = tuple(a for a in (1, 3) if sizes[a] > 1)
                yield least(axes, ops)
                if len(axes) > 1:
                    # One after the other: the first message is of a part.
                    for a, b in permutations(axes):
                        yield least((a,), ops) / sizes[b] + least((b,), ops)

            self._prices[key] = (
                min(ways(("all_gather", "all_reduce"))),
                min(ways(("reduce_scatter", "all_reduce"))),
            )
        return self._prices[key]
