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
from autoshard.kernels import Products, Style
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
    """

    def __init__(self, solution: Solution, cluster: Cluster, optimizer: str) -> None:
        self.solution = solution
        self._cluster, self._optimizer = cluster, optimizer
        self._models: dict[tuple[Style, Products], CostModel] = {}
        self._measured: dict[Schedule, Measured] = {}

    def scheduled(self, schedule: Schedule, limit: int) -> Solution:
        """The same strategies with the figures of a step of ``schedule``.

        Raises:
            RequestError: more stages than blocks, or a schedule that cannot be.
        """
        program = self._program
        measured = measured_step(self._measure, schedule)
        step = compose(self._model(schedule), program, schedule, measured, limit)
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

    def _model(self, schedule: Schedule) -> CostModel:
        key = schedule.style, schedule.products
        if key not in self._models:
            found = CostModel.of(self._program, self._cluster, self._optimizer, schedule)
            self._models[key] = found
        return self._models[key]

    def _measure(self, schedule: Schedule) -> Measured:
        """The segments of one microbatch, which know nothing of how many follow it."""
        alike = schedule.model_copy(
            update={"microbatches": 1, "blocks": None, "recomputed_blocks": None}
        )
        if alike not in self._measured:
            self._measured[alike] = measure(self._model(alike), self._program, alike)
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
        found = OnMesh(solution, cluster, optimizer)
        self._found.append((asked, found))
        return found
