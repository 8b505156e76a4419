"""Where nothing fits: the nearest changes that do.

Each change is the least of its kind: with it the search finds a plan, with one step less it finds
none. A step is a device or a node, a divisor of the batch or of the length, an optimizer with more
state, the last digit of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from autoshard.errors import AutoshardError, InfeasibleError
from autoshard.graph import ModelGraph
from autoshard.search.feasible import Asked, Feasible, is_hopeless
from autoshard.search.inner import Prepared
from autoshard.search.ladder import devices_at, divisors, first, place_of
from autoshard.search.memory import OPTIMIZERS
from autoshard.search.outer import binding

Regraph = Callable[[int, int | None], ModelGraph]
"""The same model at another global batch and length of samples; None: as it is."""

MOST_TIMES = 64
"""Times the devices up to which more of them are tried."""

MOST_PINS = 4
"""Constraints up to which each is tried alone."""


def explained(error: InfeasibleError, asked: Asked, regraph: Regraph | None) -> InfeasibleError:
    """The error with what binds at the least, and the nearest changes that fit.

    Args:
        error: what the search raised.
        asked: what it was asked for.
        regraph: rebuilds the model; None where its inputs are fixed.
    """
    asked = replace(asked, prepared=asked.prepared or Prepared(asked.graph))
    feasible = Feasible(asked)
    least = feasible.least
    memory = least.memory.model_copy(update={"limit_bytes": asked.limit})
    return InfeasibleError(
        str(error).splitlines()[0],
        binding=binding(memory),
        nearest=_Nearest(feasible, regraph).changes(),
    )


def fits(feasible: Feasible) -> bool:
    """Whether the search would find a plan; no request that cannot be has one."""
    try:
        return feasible.fits()
    except AutoshardError:
        return False


class _Nearest:
    def __init__(self, feasible: Feasible, regraph: Regraph | None) -> None:
        self.feasible, self.regraph = feasible, regraph
        self.asked = feasible.asked

    def changes(self) -> Iterator[str]:
        """Each in words, the cheapest to make first."""
        yield from self._freedom()
        yield from self._devices()
        yield from self._batch()
        yield from self._length()
        yield from self._optimizer()
        yield f"{self.feasible.least.limit / 1e9:.12g} GB on each device"

    # ---- what was forced --------------------------------------------------------------------

    def _freedom(self) -> Iterator[str]:
        """The fewest demands without which something fits."""
        asked = self.asked
        demands: dict[str, Mapping[str, Any]] = {}
        if asked.strategy != "auto":
            demands["strategy auto"] = {"strategy": "auto"}
        if asked.mesh is not None:
            demands["any mesh"] = {"mesh": None}
        if asked.pins:
            demands["no constraints"] = {"pins": {}}
        if asked.trials is not None:
            demands["any number of trials"] = {"trials": None}
        for count in range(1, len(demands) + 1):
            found = [
                chosen
                for chosen in combinations(demands, count)
                if fits(self._demanding(*(demands[c] for c in chosen)))
            ]
            for chosen in found:
                if chosen == ("no constraints",):
                    yield from self._constraints()
                elif chosen == ("strategy auto", "any mesh"):
                    yield "strategy auto on any mesh"
                else:
                    yield " and ".join(chosen)
            if found:
                return

    def _constraints(self) -> Iterator[str]:
        """Single constraints that are in the way; all of them where no single one is."""
        pins = self.asked.pins
        single = []
        if len(pins) <= MOST_PINS:
            for name in pins:
                rest = {n: p for n, p in pins.items() if n != name}
                if not rest or fits(self._demanding({"pins": rest})):
                    single.append(f"no constraint on {name}")
        yield from single or ["no constraints"]

    def _demanding(self, *changes: Mapping[str, Any]) -> Feasible:
        values: dict[str, Any] = {}
        for change in changes:
            values |= change
        return self.feasible.demanding(**values)

    # ---- more of the cluster ----------------------------------------------------------------

    def _devices(self) -> Iterator[str]:
        asked, cluster = self.asked, self.asked.cluster
        if cluster.device.kind == "cpu":
            return  # processes share one machine's memory
        if asked.mesh is not None and fits(self._demanding({"mesh": None})):
            return
        per_node = cluster.devices_per_node
        most = cluster.devices * MOST_TIMES
        if cluster.across.devices is not None:
            most = min(most, cluster.across.devices)

        def holds(place: int) -> bool:
            larger = cluster.with_devices(devices_at(place, per_node))
            return fits(Feasible(replace(asked, cluster=larger, mesh=None)))

        low, high = place_of(cluster.devices, per_node) + 1, place_of(most, per_node)
        found = first(low, high, holds)
        if found is not None:
            on = " on any mesh" if asked.mesh is not None else ""
            yield f"{devices_at(found, per_node)} devices{on}"

    # ---- less of the model ------------------------------------------------------------------

    def _batch(self) -> Iterator[str]:
        batch = self.asked.graph.batch
        found = self._rebuilt(divisors(batch)[1:], lambda b: (b, None), batch_of)
        if found is not None:
            yield f"global batch {found}"

    def _length(self) -> Iterator[str]:
        batch, length = self.asked.graph.batch, length_of(self.asked.graph)
        if length is not None:
            found = self._rebuilt(divisors(length)[1:], lambda s: (batch, s), length_of)
            if found is not None:
                yield f"sequence length {found}"

    def _rebuilt(
        self,
        sizes: Sequence[int],
        arguments: Callable[[int], tuple[int, int | None]],
        measured: Callable[[ModelGraph], int | None],
    ) -> int | None:
        """The largest size at which the rebuilt model fits."""
        if self.regraph is None or not sizes or is_hopeless(self.asked):
            return None
        regraph = self.regraph

        def holds(place: int) -> bool:
            try:
                graph = regraph(*arguments(sizes[place]))
            except AutoshardError:
                return False
            if measured(graph) != sizes[place]:
                return False  # a stored graph stays as it is
            return fits(Feasible(replace(self.asked, graph=graph, prepared=None)))

        found = first(0, len(sizes) - 1, holds)
        return None if found is None else sizes[found]

    def _optimizer(self) -> Iterator[str]:
        """The one with the most state that fits."""

        def state(name: str) -> int:
            return OPTIMIZERS[name].state_bytes(1, "bfloat16", 2)

        now = state(self.asked.optimizer)
        lighter = sorted((n for n in OPTIMIZERS if state(n) < now), key=state, reverse=True)
        for name in lighter:
            if fits(Feasible(replace(self.asked, optimizer=name))):
                yield f"optimizer {name}"
                return


def batch_of(graph: ModelGraph) -> int:
    """Samples of the graph."""
    return graph.batch


def length_of(graph: ModelGraph) -> int | None:
    """Tokens of a sample: the second dim of inputs of whole numbers that have two; else None."""
    for node in graph.inputs.values():
        if node.dtype.startswith("int") and len(node.shape) == 2 and node.shape[0] == graph.batch:
            return node.shape[1]
    return None
