"""What people demand: sizes of axes, tiers that axes keep to, recomputation, schedules, storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.cluster import Cluster
from autoshard.errors import MeshError, UnknownNameError
from autoshard.search.space import AXES, ORDERS, RECOMPUTE, Arrangement, Range, arrangements
from autoshard.search.stages import Ends
from autoshard.sharding.spec import PartitionSpec

MICRO_BATCH = "micro-batch"
"""Samples of a microbatch on one device along ``replica`` and ``data``."""

VIRTUAL = "virtual-stages"
"""Chunks of the model on each stage."""

SIZES = (*AXES, MICRO_BATCH, VIRTUAL)
"""What a range may be of: the axes, and the numbers of a schedule."""

RECOMPUTATION = "recomputation"
SCHEDULE = "schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What an arrangement must be like to be looked at.

    Attributes:
        sizes: least and most of some of :data:`SIZES`.
        within: axis -> name of the tier that it must not leave: neighbours along the axis lie
            inside one unit of that tier.
        recompute: kinds of recomputation; empty: any.
        schedules: orders of a pipeline's tasks; empty: any.
        pins: pattern of parameters' names -> how they are stored; see ``search.pins``.
    """

    sizes: Mapping[str, Range] = field(default_factory=dict)
    within: Mapping[str, str] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict)

    def points(
        self,
        cluster: Cluster,
        global_batch: int,
        blocks: int,
        tokens: int = 1,
        experts: int = 1,
        ends: Mapping[str, Ends] | None = None,
        kinds: tuple[str, ...] = RECOMPUTE,
    ) -> list[Arrangement]:
        """The arrangements that are as demanded, but for pins.

        Arguments are those of ``arrangements``; ``kinds`` are of recomputation.

        Raises:
            UnknownNameError: no such tier, axis, kind of recomputation or schedule.
            MeshError: there are none.
        """
        axes = {name: r for name, r in self.sizes.items() if name in AXES}
        every = arrangements(
            cluster,
            global_batch,
            blocks,
            tokens=tokens,
            experts=experts,
            axes=axes,
            ends=ends,
            recompute=kinds,
        )
        known = sorted({a.recompute for a in every})
        for kind in self.recompute:
            if kind not in known:
                raise UnknownNameError("recomputation", kind, known)
        for order in self.schedules:
            if order not in ORDERS:
                raise UnknownNameError("schedule", order, ORDERS)
        holds = self.met(cluster)
        found = [a for a in every if holds(a)]
        if not found:
            raise MeshError(
                f"none of {len(every):,} arrangements of {cluster.devices} devices for "
                f"{global_batch} samples of a step has {', '.join(self.words)}; leave one out"
            )
        return found

    def met(self, cluster: Cluster) -> Callable[[Arrangement], bool]:
        """Whether an arrangement is as demanded, but for pins.

        Raises:
            UnknownNameError: no such tier or axis.
        """
        units: dict[str, int | None] = {}
        names = {tier.name: tier.devices for tier in cluster.tiers}
        for axis, tier in self.within.items():
            if axis not in AXES:
                raise UnknownNameError("mesh axis", axis, AXES)
            if tier not in names:
                raise UnknownNameError(f"tier of {cluster.name}", tier, names)
            units[axis] = names[tier]

        def holds(a: Arrangement) -> bool:
            if self.recompute and a.recompute not in self.recompute:
                return False
            if self.schedules and a.pipeline > 1 and a.order not in self.schedules:
                return False  # without stages there is no order
            for name, (least, most) in self.sizes.items():
                size = size_of(a, name)
                if size < least or (most is not None and size > most):
                    return False
            return all(unit is None or unit % span_of(a, axis) == 0 for axis, unit in units.items())

        return holds

    @property
    def words(self) -> list[str]:
        """Each as it is written."""
        ranges = [
            f"{name}={least}"
            if most == least
            else " and ".join(
                [f"{name}>={least}"] * (least > 1) + [f"{name}<={most}"] * (most is not None)
            )
            for name, (least, most) in self.sizes.items()
        ]
        tiers = [f"{axis} within {tier}" for axis, tier in self.within.items()]
        kinds = [f"recompute {' or '.join(self.recompute)}"] if self.recompute else []
        orders = [f"schedule {' or '.join(self.schedules)}"] if self.schedules else []
        pins = [f"{pattern} stored as {spec}" for pattern, spec in self.pins.items()]
        return [*ranges, *tiers, *kinds, *orders, *pins]

    @property
    def names(self) -> list[str]:
        """Of each demand.

        A size, ``AXIS within``, :data:`RECOMPUTATION`, :data:`SCHEDULE`, or ``storage of PIN``.
        """
        return [
            *self.sizes,
            *(f"{axis} within" for axis in self.within),
            *([RECOMPUTATION] if self.recompute else []),
            *([SCHEDULE] if self.schedules else []),
            *(f"storage of {pattern}" for pattern in self.pins),
        ]

    def without(self, names: Sequence[str]) -> Demands:
        """All but those :attr:`names`."""
        return Demands(
            sizes={n: r for n, r in self.sizes.items() if n not in names},
            within={a: t for a, t in self.within.items() if f"{a} within" not in names},
            recompute=() if RECOMPUTATION in names else self.recompute,
            schedules=() if SCHEDULE in names else self.schedules,
            pins={p: spec for p, spec in self.pins.items() if f"storage of {p}" not in names},
        )

    def changed(self, **values: Any) -> Demands:
        """Others in place of some."""
        return replace(self, **values)


def size_of(a: Arrangement, name: str) -> int:
    """What an arrangement has of one of :data:`SIZES`."""
    return int(getattr(a, {MICRO_BATCH: "micro_batch", VIRTUAL: "virtual_stages"}.get(name, name)))


def span_of(a: Arrangement, axis: str) -> int:
    """Devices from the first to the last of a group along an axis, itself included.

    Axes lie on the devices as :data:`AXES` name them, the last one nearest.
    """
    span = 1
    for name in reversed(AXES):
        span *= size_of(a, name)
        if name == axis:
            break
    return span if size_of(a, axis) > 1 else 1
