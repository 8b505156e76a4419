"""The space of arrangements: how devices, samples and blocks of a step are divided.

An arrangement says how many stages a pipeline has, how the devices of a stage lie on the axes
``replica`` x ``data`` x ``expert`` x ``context`` x ``model``, how many samples one microbatch has,
in what order a pipeline works (1F1B, interleaved, zero-bubble), and what backward computes again.
``expert`` cuts the batch and, of layers of experts, the experts; ``context`` cuts the tokens of
each sample. What it leaves to the inner search: how each operator uses the ``model`` axis, and
which parameters are stored in parts along ``data`` with ``context`` (FSDP) and ``model``.
Parameters are whole along ``replica``: shard inside a unit of the cluster, replicate across (HSDP);
but for experts they are whole along ``expert`` too. The optimizer's state and work are always
shared by all that hold a parameter whole (ZeRO 1): that costs nothing.

Of blocks whose backward computes again all may do so, or about a quarter, half or three quarters,
equally many on each stage. Stages of one chunk divide the blocks evenly, alone or with both ends as
a block each; or, where that makes the slowest faster, as what stands before and after the blocks
takes beside a block.

Left out, since another arrangement is as fast and takes no more memory: GPipe (1F1B), recomputing
what backward does not need, tokens cut where there are samples to cut (``context`` and the samples
of a microbatch have no common divisor: in its place more devices along ``data`` take fewer samples
each). Left out too: interleaved schedules whose microbatches do not come in whole rounds of the
stages (Megatron-LM does not take them), or whose chunks are uneven; and zero-bubble schedules of
several chunks a rank (ZB-V).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, prod

from autoshard.candidates import AxisUse
from autoshard.cluster import Cluster
from autoshard.errors import MeshError, RequestError, UnknownNameError
from autoshard.kernels import Products, Style
from autoshard.plan import MeshDocument, Schedule, blocks_text
from autoshard.search.ladder import divisors
from autoshard.search.stages import Ends, balanced, divides, slowest
from autoshard.sharding.layout import Shape

AXES = ("pipeline", "replica", "data", "expert", "context", "model")
ORDERS = ("1f1b", "interleaved", "zero-bubble")
"""Orders of a pipeline's tasks that are tried."""

USES: Mapping[str, AxisUse] = {
    "replica": "data",
    "data": "batch",
    "expert": "expert",
    "context": "tokens",
    "model": "tensor",
}

Range = tuple[int, int | None]
"""Least and most (None: any) size of an axis."""

RECOMPUTE = ("none", "full")
"""Kinds of recomputation that are tried."""

SHARES = (0.25, 0.5, 0.75)
"""Shares of the blocks that may be recomputed, beside none and all."""

FASTER = 1e-3
"""Share of the slowest stage that an uneven split must save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """One point of the space; see the module's docstring.

    Attributes:
        pipeline: stages.
        replica: groups that each hold all parameters.
        data: devices that a group's batch is cut over.
        expert: devices that a group's batch and its experts are cut over.
        context: devices that the tokens of each sample are cut over.
        model: devices that share a token.
        micro_batch: samples of a microbatch on one device along replica, data and expert.
        microbatches: of one step.
        virtual_stages: chunks of the model on each stage.
        order: of a pipeline's tasks, one of ``ORDERS``.
        recompute: see :class:`autoshard.plan.Schedule`.
        stage_blocks: blocks of each stage, where they are uneven; None: even.
        recomputed_blocks: how many blocks ``recompute`` is of, the first of each chunk; None: all.
    """

    pipeline: int
    replica: int
    data: int
    expert: int = 1
    context: int = 1
    model: int
    micro_batch: int
    microbatches: int
    virtual_stages: int
    order: str = "1f1b"
    recompute: str
    stage_blocks: tuple[int, ...] | None = None
    recomputed_blocks: int | None = None

    def __post_init__(self) -> None:
        """Check that the order goes with the chunks, and that some blocks are some."""
        if self.recomputed_blocks == 0:
            raise RequestError("recomputed_blocks is 0; that is recompute 'none'")
        if (self.order == "interleaved") != (self.virtual_stages > 1):
            raise RequestError(
                f"{self.virtual_stages} chunks a stage do not go with the order {self.order!r}; "
                "several chunks are interleaved, one is not"
            )

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are a task of their own."""
        return self.order == "zero-bubble" and self.pipeline > 1

    @property
    def batch(self) -> int:
        """Samples of one microbatch over all devices of a stage."""
        return self.micro_batch * self.replica * self.data * self.expert

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of a stage's axes: those of ``AXES`` but the first."""
        return self.replica, self.data, self.expert, self.context, self.model

    @property
    def devices(self) -> int:
        """Devices of a stage."""
        return prod(self.sizes)

    @property
    def mesh(self) -> MeshDocument:
        """The mesh as a plan has it."""
        sizes = (self.pipeline, *self.sizes)
        pairs = [
            (n, s) for n, s in zip(AXES, sizes, strict=True) if s > 1 or n in ("data", "model")
        ]
        return MeshDocument(axis_names=tuple(n for n, _ in pairs), sizes=tuple(s for _, s in pairs))

    def schedule(self, style: Style = "eager", products: Products = "native") -> Schedule:
        """As a plan has it."""
        return Schedule(
            microbatches=self.microbatches,
            stages=self.pipeline,
            virtual_stages=self.virtual_stages,
            order=self.order,
            recompute=self.recompute,
            style=style,
            products=products,
            optimizer_shards=self.devices // self.model,
            stage_blocks=self.stage_blocks,
            recomputed_blocks=self.recomputed_blocks,
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of recomputation that blocks have."""
        return (self.recompute,) if self.recomputed_blocks is None else ("none", self.recompute)

    @property
    def params(self) -> dict[str, int | str]:
        """As an Optuna trial has it."""
        return {
            "pipeline": self.pipeline,
            "replica": self.replica,
            "data": self.data,
            "expert": self.expert,
            "context": self.context,
            "model": self.model,
            "micro_batch": self.micro_batch,
            "virtual_stages": self.virtual_stages,
            "order": self.order,
            "recompute": self.recompute,
            "split": "even" if self.stage_blocks is None else "uneven",
            "recomputed": "all" if self.recomputed_blocks is None else self.recomputed_blocks,
        }

    @property
    def label(self) -> str:
        """``pipeline=4 x 2, data=8, model=8, 16 microbatches of 1, recompute full``.

        Uneven stages as ``pipeline=4 of 9+9+8+6 blocks``, ``9x2`` for two such in a row.
        """
        sizes = zip(AXES, (self.pipeline, *self.sizes), strict=True)
        words = [f"{n}={s}" for n, s in sizes if s > 1] or ["one device"]
        if self.virtual_stages > 1:
            words[0] += f" x {self.virtual_stages}"
        if self.order == "zero-bubble":
            words[0] += " zero-bubble"
        if self.stage_blocks is not None:
            words[0] += f" of {blocks_text(self.stage_blocks)} blocks"
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches of {self.micro_batch}")
        if self.recompute != "none":
            some = self.recomputed_blocks
            blocks = "" if some is None else f" of {some} block{'s' * (some > 1)}"
            words.append(f"recompute {self.recompute}{blocks}")
        return ", ".join(words)


def active(sizes: Shape) -> tuple[tuple[str, ...], Shape]:
    """(names, sizes) of a stage's axes that are larger than 1, of all its sizes."""
    pairs = [(name, size) for name, size in zip(AXES[1:], sizes, strict=True) if size > 1]
    return tuple(name for name, _ in pairs), tuple(size for _, size in pairs)


def arrangements(
    cluster: Cluster,
    global_batch: int,
    blocks: int,
    *,
    tokens: int = 1,
    experts: int = 1,
    axes: Mapping[str, Range] | None = None,
    recompute: tuple[str, ...] = RECOMPUTE,
    orders: tuple[str, ...] = ORDERS,
    ends: Mapping[str, Ends] | None = None,
) -> list[Arrangement]:
    """Every arrangement of the cluster's devices for a step of ``global_batch`` samples.

    Args:
        cluster: all of its devices are used.
        global_batch: samples of one step.
        blocks: repeated blocks of the model; stages are made of them.
        tokens: of a sample, that ``context`` divides; 1: it has none.
        experts: of a layer, that ``expert`` divides; 1: it has none.
        axes: least and most size of some axes.
        recompute: kinds of recomputation that are tried; ``selective`` differs from
            ``none`` only where blocks make attention scores.
        orders: of a pipeline's tasks that are tried; without stages there is one.
        ends: what stands before and after the blocks, beside a block with each kind of
            recomputation; None: it is not known, and stages are even.

    Raises:
        UnknownNameError: no such axis.
        MeshError: nothing is left; says what the axes may be.
    """
    allowed, known = axes or {}, ends or {}
    for name in allowed:
        if name not in AXES:
            raise UnknownNameError("mesh axis", name, AXES)

    def may(name: str, size: int) -> bool:
        least, most = allowed.get(name, (1, None))
        return least <= size and (most is None or size <= most)

    def may_all(*sizes: int) -> bool:
        return all(may(n, s) for n, s in zip(AXES[1:], sizes, strict=True))

    out: list[Arrangement] = []
    for p in reversed(divisors(cluster.devices)):
        kinds = [
            (kind, some, _splits(p, blocks, _between(known, kind, some, blocks)))
            for kind in recompute
            for some in (_some(p, blocks) if kind == "full" else (None,))
            if blocks or kind == "none"
        ]
        if not may("pipeline", p) or not any(splits for _, _, splits in kinds):
            continue
        stage = cluster.devices // p
        for model, context, expert in _shares(stage, tokens, experts):
            share = model * context * expert
            for replica in _replicas(cluster, stage // share, share):
                data = stage // (share * replica)
                groups = data * replica * expert
                if global_batch % groups or not may_all(replica, data, expert, context, model):
                    continue
                each = global_batch // groups
                for micro in reversed(divisors(each)):
                    common = gcd(micro, context)
                    others = replica, data * common, expert, context // common, model
                    if common > 1 and may_all(*others):
                        continue
                    for virtual, order in _orders(p, each // micro, blocks):
                        if p > 1 and order not in orders:
                            continue
                        out += [
                            Arrangement(
                                pipeline=p,
                                replica=replica,
                                data=data,
                                expert=expert,
                                context=context,
                                model=model,
                                micro_batch=micro,
                                microbatches=each // micro,
                                virtual_stages=virtual,
                                order=order,
                                recompute=kind,
                                stage_blocks=split,
                                recomputed_blocks=some,
                            )
                            for kind, some, splits in kinds
                            for split in (splits if virtual == 1 else (None,))
                        ]
    if not out:
        stages = [
            p
            for p in reversed(divisors(cluster.devices))
            if any(_splits(p, blocks, known.get(kind)) for kind in recompute)
        ]
        raise MeshError(_nothing(cluster, global_batch, stages, allowed))
    return out


def _shares(stage: int, tokens: int, experts: int) -> list[tuple[int, int, int]]:
    """(model, context, expert) of a stage's devices."""
    return [
        (model, context, expert)
        for model in reversed(divisors(stage))
        for context in reversed(divisors(gcd(stage // model, tokens)))
        for expert in reversed(divisors(gcd(stage // (model * context), experts)))
    ]


def _replicas(cluster: Cluster, data: int, share: int) -> list[int]:
    """Groups of devices that hold all parameters: one, or one a unit of the cluster.

    ``share`` devices have all experts and the samples of one place along data; ``data`` such groups
    are side by side.
    """
    units = {cluster.devices_per_node, *(t.devices for t in cluster.tiers[:-1] if t.devices)}
    out = {1}
    for unit in units:
        inside = unit // share
        if unit % share == 0 and inside > 1 and data % inside == 0:
            out.add(data // inside)
    return sorted(out)


@cache
def _orders(stages: int, microbatches: int, blocks: int) -> tuple[tuple[int, str], ...]:
    """How many chunks each rank of a pipeline may have, and the order of its tasks."""
    if stages == 1:
        return ((1, "1f1b"),)
    most = range(2, blocks // stages + 1) if microbatches % stages == 0 else ()
    chunks = [n for n in most if divides(blocks, stages * n)]
    return ((1, "1f1b"), *((n, "interleaved") for n in chunks), (1, "zero-bubble"))


@cache
def _some(stages: int, blocks: int) -> tuple[int | None, ...]:
    """How many blocks may be recomputed; None: all."""
    each = blocks // stages
    per_stage = sorted({round(share * each) for share in SHARES} - {0, each}) if each else []
    return (None, *(n * stages for n in per_stage))


def _between(ends: Mapping[str, Ends], kind: str, some: int | None, blocks: int) -> Ends | None:
    """What stands before and after the blocks, where ``some`` of them are recomputed."""
    found, none = ends.get(kind), ends.get("none")
    if some is None or found is None or none is None:
        return found
    share = some / blocks
    before, after = (
        1 / ((1 - share) / a + share / b) if a and b else 0.0
        for a, b in zip(none, found, strict=True)
    )
    return before, after


@cache
def _splits(stages: int, blocks: int, ends: Ends | None) -> tuple[tuple[int, ...] | None, ...]:
    """How the blocks may be divided among stages of one chunk; None: evenly."""
    even = (None,) if divides(blocks, stages) else ()
    if ends is None or stages == 1:
        return even
    found = balanced(blocks, stages, ends)
    if found is None:
        return even
    most = slowest(blocks, stages, ends, found)
    if even and most >= slowest(blocks, stages, ends, None) * (1 - FASTER):
        return even
    return (*even, found)


def _nothing(
    cluster: Cluster, global_batch: int, stages: Sequence[int], allowed: Mapping[str, Range]
) -> str:
    asked = ", ".join(
        f"{name} from {least}" + ("" if most is None else f" to {most}")
        for name, (least, most) in allowed.items()
    )
    return (
        f"no arrangement of {cluster.devices} devices for {global_batch} samples of a step"
        + (f" has {asked}" if asked else "")
        + f"; data x replica must divide {global_batch}, and pipeline may be "
        + ", ".join(map(str, stages))
    )
