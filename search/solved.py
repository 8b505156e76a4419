"""What estimates of one graph have in common, found once.

How a step is run (its microbatches, stages and schedule, what is recomputed) changes nothing in the
choice of strategies on a mesh, and of what a microbatch costs segment by segment only what belongs
to recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autoshard.candidates import AxisUse
from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.kernels import Style
from autoshard.plan import Schedule
from autoshard.program import Program
from autoshard.search.cost import CostModel
from autoshard.search.inner import Prepared, Solution, solve
from autoshard.search.step import Measured, compose, measure, measured_step
from autoshard.sharding.layout import Layout


class OnMesh:
    """The solution on one mesh, and steps of its strategies.

    Args:
        solution: found for devices of ``cluster``.
        cluster: of one stage.
        optimizer: by name.
        style: how operators between products are run.
    """

    def __init__(self, solution: Solution, cluster: Cluster, optimizer: str, style: Style) -> None:
        self.solution = solution
        self._cluster, self._optimizer, self._style = cluster, optimizer, style
        self._measured: dict[Schedule, Measured] = {}

    def scheduled(self, schedule: Schedule, limit: int) -> Solution:
        """The same strategies with the figures of a step of ``schedule``.

        Raises:
            RequestError: more stages than blocks, or a schedule that cannot be.
        """
        program = self._program
        measured = measured_step(self._measure, schedule)
        step = compose(self._model, program, schedule, measured, limit)
        return replace(
            self.solution,
            program=program,
            regather=program.regather,
            step_time=step.step_time,
            memory=step.memory,
            collectives=step.collectives,
        )

    @cached_property
    def _program(self) -> Program:
        if "fsdp" in self.solution.uses:
            # What is gathered lives as long as its block: a step of many parts keeps none of it.
            return self.solution.program.regathering()
        return self.solution.program

    @cached_property
    def _model(self) -> CostModel:
        return CostModel.of(self._program, self._cluster, self._optimizer, self._style)

    def _measure(self, schedule: Schedule) -> Measured:
        """The segments of one microbatch, which know nothing of how many follow it."""
        alike = schedule.model_copy(
            update={"microbatches": 1, "blocks": None, "recomputed_blocks": None}
        )
        if alike not in self._measured:
            self._measured[alike] = measure(self._model, self._program, alike)
        return self._measured[alike]


class Solved:
    """Solutions of one graph, by mesh and what else they hang on.

    Args:
        graph: what is computed.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self._found: list[tuple[tuple[object, ...], OnMesh]] = []

    @cached_property
    def _prepared(self) -> Prepared:
        return Prepared(self.graph)

    def on(
        self,
        cluster: Cluster,
        sizes: Sequence[int],
        axis_names: Sequence[str],
        uses: Sequence[AxisUse],
        *,
        optimizer: str,
        memory_limit: int | None,
        pins: Mapping[str, Layout],
        style: Style,
    ) -> OnMesh:
        """The solution on one mesh; arguments as of :func:`autoshard.search.inner.solve`."""
        asked = (
            cluster,
            tuple(sizes),
            tuple(axis_names),
            tuple(uses),
            optimizer,
            memory_limit,
            dict(pins),
            style,
        )
        for known, found in self._found:
            if known == asked:
                return found
        solution = solve(
            self.graph,
            cluster,
            sizes,
            axis_names,
            uses,
            optimizer=optimizer,
            memory_limit=memory_limit,
            pins=pins,
            prepared=self._prepared,
            style=style,
        )
        found = OnMesh(solution, cluster, optimizer, style)
        self._found.append((asked, found))
        return found
