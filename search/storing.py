"""What it costs at least that parameters do not fit whole: gathers for each microbatch.

A parameter of w bytes that is whole along ``data`` and ``context`` takes w and as much for its
gradient; in parts it takes next to nothing, but each microbatch gathers it for forward, again for
backward where backward reads it or computes its product again, and scatters its gradient. Keeping
what was gathered takes half of what a whole one does and saves less than half of that time, so the
least time for the bytes that are left is that of whole parameters, the dearest ones first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import inf

from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.plan import Schedule
from autoshard.search.bounds import runs_of
from autoshard.search.step import recomputed, segments
from autoshard.sharding.collective import MessageOp
from autoshard.sharding.layout import Shape

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
        self.is_block = tuple(part.is_block for part in self.parts)
        self._prices: Prices = {}
        self._sums: dict[tuple[int, int, str], tuple[float, float]] = {}
        self._known: dict[str, list[tuple[float, float]]] = {}

    def first_stage(
        self,
        schedule: Schedule,
        stands_for: Sequence[int],
        sizes: Shape,
        room: float,
    ) -> float:
        """Seconds of one microbatch in the first stage; infinite where not even parts fit.

        Args:
            schedule: of a step.
            stands_for: for each segment of the whole model its number in the graph.
            sizes: of a stage's axes replica, data, expert, context and model.
            room: bytes that are left where everything is cut over all devices of the stage.
        """
        # As if ``expert`` cut all parameters: it cuts those of experts.
        replica, data, expert, context, model = sizes
        model *= expert
        once, twice = self._in_first_stage(schedule, stands_for)
        parts = data * context
        left = room - 2 * (once + twice) / (model * parts) * (1 - 1 / replica)
        if min(room, left) < 0:
            return inf
        if parts == 1:
            return 0.0
        # Bytes that a whole parameter takes more than its part, of weight and gradient.
        fits = left * model / (2 * (1 - 1 / parts))
        twice, fits = max(0.0, twice - fits), max(0.0, fits - twice)
        once = max(0.0, once - fits)
        gather, scatter = self._seconds_a_byte(schedule.stages, sizes)
        return ((once + 2 * twice) * gather + (once + twice) * scatter) / model

    def _in_first_stage(self, schedule: Schedule, stands_for: Sequence[int]) -> tuple[float, float]:
        """Bytes of parameters of the first stage that are gathered once, and twice."""
        key = schedule.stages, schedule.virtual_stages, schedule.recompute
        if key not in self._sums:
            rows, whole = self._rows(schedule), [self.is_block[i] for i in stands_for]
            own = [i for run in runs_of(whole, schedule)[:: schedule.stages] for i in run]
            once, twice = (sum(rows[stands_for[i]][n] for i in own) for n in (0, 1))
            self._sums[key] = once, twice
        return self._sums[key]

    def _rows(self, schedule: Schedule) -> list[tuple[float, float]]:
        """Bytes of parameters that are gathered once, and twice, of each segment."""
        kind = schedule.recompute
        if kind not in self._known:
            out = []
            for s in self.parts:
                nodes = self.graph.nodes[s.start : s.end]
                again = recomputed(nodes, schedule) if s.is_block else frozenset()
                row = [0.0, 0.0]
                for node in nodes:
                    if node.op == "parameter" and node.differentiable:
                        row[self._is_read_again(node.name, again)] += node.num_bytes
                out.append((row[0], row[1]))
            self._known[kind] = out
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
            stage = self.cluster.with_devices(self.cluster.devices // stages)
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
