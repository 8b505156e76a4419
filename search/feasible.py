"""Whether anything fits, and in how few bytes, without pricing a whole space.

The answers are those of the search itself: a configuration fits where the first of its solves
does, which is found without the others, and the space is left at the first that fits. Two bounds
say no sooner: everything that is stored, cut over all devices; and the leanest sum of the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.plan import Memory
from autoshard.search.inner import InnerSearch, Prepared, inner_search
from autoshard.search.memory import optimizer_of
from autoshard.search.outer import (
    Configuration,
    Pins,
    Strategy,
    configurations,
    considered,
    pinned,
)
from autoshard.sharding.layout import Shape

DIGITS = 4
"""Significant digits of an answer in bytes."""

SURE = 1.02
"""Times the limit from which on the leanest sum of one strategy's tables speaks for others: exact
figures may be a little less than the sum, where two operators keep the same value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What decides whether something fits.

    Attributes:
        graph: what is computed.
        cluster: what it runs on.
        optimizer: see ``search.memory.OPTIMIZERS``.
        strategy: what is forced, or ``auto``.
        mesh: axis sizes that are forced; None: any.
        memory_limit: bytes of a device that may be used; None: all it has.
        pins: stored layouts that some parameters must have.
        trials: most configurations that are tried; None: all.
        prepared: rules and proposals of the graph.
    """

    graph: ModelGraph
    cluster: Cluster
    optimizer: str = "adamw"
    strategy: Strategy = "auto"
    mesh: Mapping[str, int] | None = None
    memory_limit: int | None = None
    pins: Pins = field(default_factory=dict)
    trials: int | None = None
    prepared: Prepared | None = None

    @property
    def limit(self) -> int:
        """Bytes of a device that may be used."""
        if self.memory_limit is not None:
            return self.memory_limit
        return self.cluster.device.memory_bytes

    @property
    def space(self) -> Sequence[Configuration]:
        """The configurations that a search would price, the freest first: they tend to fit."""
        cluster = self.cluster
        space = configurations(
            cluster.devices, self.strategy, self.mesh, devices_per_node=cluster.devices_per_node
        )
        return sorted(considered(space, self.trials), key=lambda c: c.strategy != "auto")


def stored_bytes(graph: ModelGraph, optimizer: str) -> int:
    """Parameters, gradients and the optimizer's state of the whole model, buffers included."""
    state = optimizer_of(optimizer)
    total = 0
    for node in graph.nodes:
        if node.op not in ("parameter", "buffer"):
            continue
        total += node.num_bytes
        if node.op == "parameter" and node.differentiable:
            elements = node.num_bytes // node.itemsize
            total += node.num_bytes + state.state_bytes(elements, node.dtype, node.itemsize)
    return total


def is_hopeless(asked: Asked) -> bool:
    """Whether what is stored is too much even where all of it is cut over all devices it may be."""
    room = max(0, asked.limit - asked.cluster.reserve_bytes)
    parts = 1 if asked.strategy == "data" else asked.cluster.devices
    return stored_bytes(asked.graph, asked.optimizer) > room * parts


@dataclass(frozen=True, slots=True)
class Least:
    """How little memory would do.

    Attributes:
        limit: bytes under which the search finds a plan.
        step: under so many bytes less it finds none.
        memory: of a plan that it finds.
    """

    limit: int
    step: int
    memory: Memory


class Feasible:
    """One request under any memory limit; tables are built once a configuration.

    A configuration fits where its leanest program does. Where that one does not, another may, whose
    exact figures are a little below its sum: only those near the limit are solved.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.prepared = asked.prepared or Prepared(asked.graph)
        self._inner: dict[tuple[Configuration, frozenset[str]], InnerSearch] = {}
        self._least: dict[Shape, float] = {}

    def demanding(self, **demands: Any) -> Feasible:
        """The same model on the same cluster with other demands; tables are shared.

        Args:
            demands: of :class:`Asked`: ``strategy``, ``mesh``, ``trials``, or some of its ``pins``.
        """
        other = Feasible(replace(self.asked, prepared=self.prepared, **demands))
        other._inner = self._inner
        return other

    def fits(self) -> bool:
        """Whether the search would find a plan."""
        return not is_hopeless(self.asked) and self._under(self.asked.limit) is not None

    @cached_property
    def least(self) -> Least:
        """How little memory would do."""
        first, *others = sorted(self.asked.space, key=self._bound)
        best = self._leanest(first)
        for configuration in others:
            if self._bound(configuration) > SURE * best.total_bytes:
                break
            best = min(best, self._leanest(configuration), key=lambda m: m.total_bytes)
        step = 10 ** max(0, len(str(best.total_bytes)) - DIGITS)
        high, less = -(-best.total_bytes // step), 1
        # The leanest program seldom takes more than the least.
        while (found := self._under((high - less) * step)) is not None:
            best, high, less = found, high - less, 2 * less
        low = high - less
        while high - low > 1:
            middle = (low + high) // 2
            found = self._under(middle * step)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return Least(high * step, step, best)

    def _under(self, limit: int) -> Memory | None:
        near = []
        for configuration in self.asked.space:
            if self._bound(configuration) > SURE * limit:
                continue
            least = self._leanest(configuration)
            if least.total_bytes <= limit:
                return least
            near.append((least.total_bytes, configuration))
        for _, configuration in sorted(near, key=lambda pair: pair[0]):
            found = self._search(configuration).closest(limit)[1].memory
            if found.fits:
                return found
        return None

    def _leanest(self, configuration: Configuration) -> Memory:
        return self._search(configuration).leanest()[1].memory

    def _bound(self, configuration: Configuration) -> float:
        """Bytes of the leanest sum of tables, here or where every operator decides for itself.

        Which of two axes is the nearer one changes no bytes.
        """
        shape = _shape(configuration)
        if shape not in self._least or configuration.strategy == "auto":
            least = self._search(configuration).least_bytes
            if configuration.strategy == "auto" and not self.asked.pins:
                self._least[shape] = least
            return least
        return self._least[shape]

    def _search(self, configuration: Configuration) -> InnerSearch:
        asked = self.asked
        key = configuration, frozenset(asked.pins)
        if key not in self._inner:
            self._inner[key] = inner_search(
                asked.graph,
                asked.cluster,
                configuration.sizes,
                configuration.axis_names,
                configuration.uses,
                optimizer=asked.optimizer,
                memory_limit=asked.limit,
                pins=pinned(configuration, asked.pins),
                prepared=self.prepared,
            )
        return self._inner[key]


def _shape(configuration: Configuration) -> Shape:
    return tuple(sorted(s for s in configuration.sizes if s > 1))
