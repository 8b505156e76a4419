"""The nearest changes with which something of the whole space fits; each is solved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import inf, prod
from typing import Any

from autoshard.cluster import Cluster
from autoshard.errors import (
    AutoshardError,
    InfeasibleError,
    MeshError,
    RequestError,
    UnknownNameError,
)
from autoshard.kernels import Products, Style
from autoshard.planner.family import Family, family_of
from autoshard.search import length_of
from autoshard.search.demands import MICRO_BATCH, RECOMPUTATION, Demands, size_of
from autoshard.search.feasible import SURE, stored_bytes
from autoshard.search.ladder import devices_at, divisors, first, place_of
from autoshard.search.lean import Lean
from autoshard.search.memory import OPTIMIZERS
from autoshard.search.outer import binding
from autoshard.search.pins import resolve, storable
from autoshard.search.space import Arrangement
from autoshard.search.whole import Problems

ASKED = "pointwise"
"""The kind of recomputation that is looked at only where it is asked for."""

MOST_TIMES = 64
"""Times the devices up to which more of them are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAsked:
    """What decides whether something of the whole space fits.

    Attributes:
        family: graphs of the model.
        cluster: all of its devices are used.
        global_batch: samples of a step.
        optimizer: see ``search.memory.OPTIMIZERS``.
        limit: bytes of a device that may be used; None: all it has.
        demands: what an arrangement must be like.
        style: how operators between products are run.
        products: what products of weights of blocks run in.
        overlapped: axes whose messages run beside computing, see ``Schedule.overlapped``.
        also: an arrangement that is looked at wherever it is as demanded; None: none.
        partial: what kept the search from looking at everything: a sampler without a proof, a
            number of trials; empty: nothing.
    """

    family: Family
    cluster: Cluster
    global_batch: int
    optimizer: str = "adamw"
    limit: int | None = None
    demands: Demands = field(default_factory=Demands)
    style: Style = "eager"
    products: Products = "native"
    overlapped: tuple[str, ...] = ()
    also: Arrangement | None = None
    partial: str = ""

    def problems(self) -> Problems:
        """The inner problems."""
        family = self.family
        return Problems(
            family.few,
            family.blocks,
            self.cluster,
            self.optimizer,
            self.limit,
            self.style,
            resolve(self.demands.pins, family.growth.one),
            overlapped=self.overlapped,
            products=self.products,
        )

    def points(self) -> list[Arrangement]:
        """The space.

        Raises:
            RequestError: what is demanded cannot be, or no arrangement is so; says what.
        """
        family, demands, kinds = self.family, self.demands, self.kinds
        found = demands.points(
            self.cluster,
            self.global_batch,
            family.blocks,
            family.tokens,
            family.experts,
            family.ends(self.cluster, self.style, kinds, self.products),
            kinds,
        )
        if (also := self._also()) is not None and also not in found:
            found.append(also)
        if self.overlapped and not demands.schedules:
            # Zero-bubble has no bound with messages beside computing.
            found = [a for a in found if not a.splits_backward]
        if not demands.pins:
            return found
        graph = family.growth.one
        holds = storable(resolve(demands.pins, graph), graph)
        kept = [a for a in found if holds(a.sizes)]
        if not kept:
            pins = ", ".join(f"{pattern} as {spec}" for pattern, spec in demands.pins.items())
            raise MeshError(
                f"none of {len(found):,} arrangements of {self.cluster.devices} devices can store "
                f"{pins}; leave a pin out, or name other axes"
            )
        return kept

    def _also(self) -> Arrangement | None:
        """What is looked at beside the space: of these devices, samples and tokens, as demanded."""
        a = self.also
        if a is None or prod((a.pipeline, *a.sizes)) != self.cluster.devices:
            return None
        if a.batch * a.microbatches != self.global_batch or a.recompute not in self.kinds:
            return None
        if self.family.tokens % a.context or self.family.experts % a.expert:
            return None
        return a if self.demands.met(self.cluster)(a) else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of recomputation that are looked at: what is demanded, else all but ``pointwise``.

        That one is asked for by name: few tools do it, and where it is almost as fast as none there
        are many arrangements that are almost the best.

        Raises:
            UnknownNameError: a kind that is none, or that makes no difference to the model.
        """
        every, asked = self.family.recomputation, self.demands.recompute
        for kind in asked:
            if kind not in every:
                raise UnknownNameError("recomputation", kind, every)
        return tuple(k for k in every if k in asked or not (asked or k == ASKED))

    @property
    def room(self) -> int:
        """Bytes of a device that tensors may take."""
        limit = self.cluster.device.memory_bytes if self.limit is None else self.limit
        return limit - self.cluster.reserve_bytes


def fits(asked: WholeAsked) -> bool:
    """Whether the search would find a plan; no request that cannot be has one."""
    try:
        return Lean(asked.points(), asked.problems()).fits()
    except AutoshardError:
        return False


def explained_whole(
    asked: WholeAsked,
    problems: Problems,
    regraph: Callable[[int], Family] | None,
    say: Callable[[str], None],
    *,
    suggest: bool = True,
) -> InfeasibleError:
    """The error of a search that found nothing: what binds at the least, and what would fit.

    Args:
        asked: what was asked for.
        problems: its inner problems.
        regraph: the family at another length of samples; None where it is fixed.
        say: told what is looked at.
        suggest: whether to look for changes.
    """
    family, cluster = asked.family, asked.cluster
    points = asked.points()
    lean = Lean(points, problems)
    name = family.growth.one.name
    demanded = f" with {', '.join(asked.demands.words)}" if asked.demands.words else ""
    head = (
        f"{name} (global batch {asked.global_batch}, {asked.optimizer}) does not fit on "
        f"{cluster.devices} devices of {cluster.name} in any of {len(points):,} arrangements"
        f"{demanded}"
    )
    if asked.partial and lean.fits():
        return InfeasibleError(
            f"{name} (global batch {asked.global_batch}, {asked.optimizer}): nothing that was "
            f"looked at fits on {cluster.devices} devices of {cluster.name}",
            binding=f"{asked.partial}, which left out what fits",
            nearest=["sampler bound and any number of trials"],
        )
    least, leanest = lean.least
    limit = asked.room + cluster.reserve_bytes
    return InfeasibleError(
        f"{head}; the leanest is {leanest.label}",
        binding=binding(least.memory.model_copy(update={"limit_bytes": limit})),
        nearest=_Nearest(asked, regraph, lean, say).changes() if suggest else (),
    )


class _Nearest:
    def __init__(
        self,
        asked: WholeAsked,
        regraph: Callable[[int], Family] | None,
        lean: Lean,
        say: Callable[[str], None],
    ) -> None:
        self.asked, self.regraph, self.lean, self.say = asked, regraph, lean, say

    def changes(self) -> Iterator[str]:
        """Each in words, the cheapest to make first."""
        for kind, look in (
            ("fewer demands", self._freedom),
            ("more devices", self._devices),
            ("a smaller batch", self._batch),
            ("shorter samples", self._length),
            ("other optimizers", self._optimizer),
            ("more memory", self._memory),
        ):
            self.say(f"nothing fits; trying {kind}")
            yield from look()

    # ---- what was demanded ------------------------------------------------------------------

    def _freedom(self) -> Iterator[str]:
        """The fewest demands without which something fits, and by how much they must give."""
        demands = self.asked.demands
        for count in range(1, len(demands.names) + 1):
            found = [
                chosen
                for chosen in combinations(demands.names, count)
                if fits(self._with(demands=demands.without(chosen)))
            ]
            for chosen in found:
                if count == 1:
                    yield from self._eased(chosen[0])
                else:
                    yield " and ".join(map(_free, chosen))
            if found:
                return

    def _eased(self, name: str) -> Iterator[str]:
        """How far a demand must give way."""
        demands = self.asked.demands
        points = self._with(demands=demands.without([name])).points()
        if name == RECOMPUTATION:
            there = {a.recompute for a in points}
            kinds = self.asked.family.recomputation
            for kind in (k for k in kinds if k in there and k not in demands.recompute):
                if fits(self._with(demands=demands.changed(recompute=(kind,)))):
                    yield f"recompute {kind}"
                    return
        elif name in demands.sizes:
            least, most = demands.sizes[name]
            sizes = sorted({size_of(a, name) for a in points})
            more = [s for s in sizes if most is not None and s > most]
            less = [s for s in reversed(sizes) if s < least]
            one_number = least == most
            found = False
            for sign, others in (("<=", more), (">=", less)):
                for size in others:
                    both = (least, size) if sign == "<=" else (size, most)
                    range_ = (size, size) if one_number else both
                    if fits(
                        self._with(demands=demands.changed(sizes={**demands.sizes, name: range_}))
                    ):
                        yield f"{name}{'=' if one_number else sign}{size}"
                        found = True
                        break
            if found:
                return
        yield _free(name)

    # ---- more of the cluster ----------------------------------------------------------------

    def _devices(self) -> Iterator[str]:
        """The fewest devices of all that a cluster can have and that are enough."""
        asked, cluster = self.asked, self.asked.cluster
        if cluster.device.kind == "cpu" or asked.room <= 0:
            return  # processes share one machine's memory
        per_node = cluster.devices_per_node
        most = cluster.devices * MOST_TIMES
        if cluster.across.devices is not None:
            most = min(most, cluster.across.devices)
        start = place_of(cluster.devices, per_node) + 1
        while devices_at(start, per_node) < self._enough:
            start += 1
        above = next((n for n in _doubling(cluster.devices, per_node, most) if self._on(n)), None)
        if above is None:
            return
        for place in range(start, place_of(above, per_node)):
            count = devices_at(place, per_node)
            if self._on(count):
                above = count
                break
        yield f"{above} devices"

    def _on(self, devices: int) -> bool:
        try:
            larger = self.asked.cluster.with_devices(devices)
        except (MeshError, RequestError):
            return False
        return fits(self._with(cluster=larger))

    # ---- less of the model ------------------------------------------------------------------

    @cached_property
    def _enough(self) -> float:
        """Devices below which what is stored is too much even where all of it is cut over all."""
        asked = self.asked
        if asked.room <= 0:
            return inf
        return stored_bytes(asked.family.whole(2), asked.optimizer) / (SURE * asked.room)

    def _batch(self) -> Iterator[str]:
        if self._enough > self.asked.cluster.devices:
            return
        for batch in divisors(self.asked.global_batch)[1:]:
            if fits(self._with(global_batch=batch)):
                yield f"global batch {batch}"
                return

    def _length(self) -> Iterator[str]:
        length = length_of(self.asked.family.growth.one)
        if self.regraph is None or length is None or self._enough > self.asked.cluster.devices:
            return
        regraph = self.regraph
        sizes = divisors(length)[1:]

        def holds(place: int) -> bool:
            try:
                family = regraph(sizes[place])
            except AutoshardError:
                return False
            if length_of(family.growth.one) != sizes[place]:
                return False
            return fits(self._with(family=family))

        found = first(0, len(sizes) - 1, holds)
        if found is not None:
            yield f"sequence length {sizes[found]}"

    def _optimizer(self) -> Iterator[str]:
        """The one with the most state that fits."""

        def state(name: str) -> int:
            return OPTIMIZERS[name].state_bytes(1, "bfloat16", 2)

        now = state(self.asked.optimizer)
        lighter = sorted((n for n in OPTIMIZERS if state(n) < now), key=state, reverse=True)
        for name in lighter:
            if fits(self._with(optimizer=name)):
                yield f"optimizer {name}"
                return

    def _memory(self) -> Iterator[str]:
        yield f"{self.lean.least[0].limit / 1e9:.12g} GB on each device"

    def _with(self, **values: Any) -> WholeAsked:
        return replace(self.asked, **values)


def _free(name: str) -> str:
    """Words for a demand that is dropped."""
    axis, _, within = name.partition(" ")
    return f"{axis} on any tier" if within == "within" else f"any {name}"


def _doubling(devices: int, per_node: int, most: int) -> Sequence[int]:
    """Numbers that grow by doubling, from the devices and from whole nodes."""
    out = set()
    for start in (devices, per_node):
        while (start := 2 * start) <= most:
            if start > devices:
                out.add(start)
    return sorted(out)


def in_full_space(asked: WholeAsked, say: Callable[[str], None]) -> Iterator[str]:
    """What would fit of the full space, for a request of the plain one: no stages, if that will do.

    With recomputation only where that allows larger microbatches; with stages only where neither
    helps.
    """
    say("nothing fits; trying microbatches, recomputation and stages")
    best = 0
    one_stage = asked.demands.changed(sizes={"pipeline": (1, 1)})
    for kind in asked.family.recomputation:
        try:
            points = replace(asked, demands=one_stage.changed(recompute=(kind,))).points()
        except AutoshardError:
            continue
        for size in sorted({a.micro_batch for a in points if a.micro_batch > best}, reverse=True):
            demands = Demands(
                sizes={"pipeline": (1, 1), MICRO_BATCH: (size, size)}, recompute=(kind,)
            )
            if fits(replace(asked, demands=demands)):
                best = size
                yield f"space full with {', '.join(demands.words)}"
                break
    if best:
        return
    for stages in sorted({a.pipeline for a in asked.points()} - {1}):
        demands = Demands(sizes={"pipeline": (stages, stages)})
        if fits(replace(asked, demands=demands)):
            yield f"space full with {', '.join(demands.words)}"
            return


def with_full_space(
    error: InfeasibleError,
    model: object,
    cluster: Cluster,
    *,
    global_batch: int,
    seq_len: int | None,
    dtype: str | None,
    optimizer: str,
    limit: int | None,
    say: Callable[[str], None],
) -> InfeasibleError:
    """The plain space's error with what would fit of the full one, ahead of more memory.

    As it was where the model has one batch only.
    """
    try:
        family = family_of(model, seq_len=seq_len, dtype=dtype, say=say)
    except AutoshardError:
        return error
    asked = WholeAsked(
        family=family,
        cluster=cluster,
        global_batch=global_batch,
        optimizer=optimizer,
        limit=limit,
    )
    *others, memory = error.nearest
    return InfeasibleError(
        str(error).splitlines()[0],
        binding=error.binding,
        nearest=[*others, *in_full_space(asked, say), memory],
    )
