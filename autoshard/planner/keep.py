"""A configuration of another tool, kept: what it states is demanded, the rest is searched.

The configuration as it is gets a price of its own, so that the gain is seen: its sizes, its
storage of parameters and of the optimizer's state, with the best use of the ``model`` axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoshard.candidates import AxisUse
from autoshard.errors import AutoshardError, MeshError, RequestError, UnknownNameError
from autoshard.imports import kept_megatron, kept_torchtitan
from autoshard.imports.kept import Kept
from autoshard.plan import Alternative, StepTime
from autoshard.planner.request import SHORT_AXES
from autoshard.planner.whole_nearest import WholeAsked
from autoshard.search.demands import SCHEDULE, SIZES, Demands
from autoshard.search.outer import why
from autoshard.search.pipeline import check
from autoshard.search.scheduled import Found, Scheduled
from autoshard.search.space import USES, Arrangement
from autoshard.search.stages import divides
from autoshard.search.whole import Problems

RECOMPUTE = "recompute"
SCHEDULES = ("1f1b", "interleaved")
"""Of a pipeline, what Megatron-LM has, and what torchtitan's are taken as."""

STORED: dict[str, dict[str, AxisUse]] = {
    "whole": {"data": "data", "context": "context"},
    "cut": {"data": "fsdp"},
}
"""What axes are used for where a tool stores parameters so, in place of the space's own uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The configuration as it is.

    Attributes:
        arrangement: its own.
        found: its price; it may not fit.
    """

    arrangement: Arrangement
    found: Found


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What is kept of a file.

    Attributes:
        name: of the file.
        kept: what it fixes.
        free: names of sizes (or ``recompute``, ``schedule``) that are searched all the same.
    """

    name: str
    kept: Kept
    free: frozenset[str] = frozenset()

    def batch(self, devices: int) -> int | None:
        """Samples of a step that the file asks for on so many devices; None: it does not say."""
        kept = self.kept
        if kept.global_batch is not None or kept.rank_batch is None:
            return kept.global_batch
        return kept.rank_batch * self.ranks(devices)

    def ranks(self, devices: int) -> int:
        """Data-parallel devices.

        Raises:
            MeshError: the sizes do not divide the devices.
        """
        ranks, rest = divmod(devices, self.kept.group)
        if rest:
            names = ("pipeline", "context", "model")
            words = " x ".join(f"{n}={self.kept.size(n)}" for n in names if self.kept.size(n) > 1)
            raise MeshError(
                f"{self.name} states {words}: {self.kept.group} devices, which do not divide "
                f"{devices}; give another number of devices, or free an axis"
            )
        return ranks

    def sizes(self, blocks: int) -> dict[str, int]:
        """The sizes that are kept.

        Raises:
            RequestError: chunks of so many blocks do not make up the model.
        """
        found = dict(self.kept.sizes)
        if self.kept.layers_per_chunk is not None:
            found["virtual-stages"] = self._chunks(blocks)
        if "pipeline" in self.free and "virtual-stages" in found:
            del found["virtual-stages"]  # it is of these stages
        return {name: size for name, size in found.items() if name not in self.free}

    def _chunks(self, blocks: int) -> int:
        per_chunk = self.kept.layers_per_chunk or 1
        each = self.kept.size("pipeline") * per_chunk
        for whole in (blocks, blocks + 2):  # alone, or with both ends as a block each
            if whole % each == 0:
                return whole // each
        raise RequestError(
            f"{self.name} states {self.kept.said['virtual-stages']}: {blocks} blocks are not made "
            f"up of {self.kept.size('pipeline')} stages of chunks of {per_chunk}"
        )

    def recompute(self, kinds: Sequence[str]) -> str | None:
        """The recomputation that is kept, of the model's own.

        That of attention scores is none where attention is one kernel, which stores no scores.
        """
        if RECOMPUTE in self.free or self.kept.recompute is None:
            return None
        return self.kept.recompute if self.kept.recompute in kinds else "none"

    def demands(
        self, asked: Demands, blocks: int, kinds: Sequence[str] = ("none", "full")
    ) -> Demands:
        """What is asked for, and what is kept; ``kinds`` of recomputation are the model's.

        Raises:
            RequestError: they contradict each other; names both.
        """
        sizes = dict(asked.sizes)
        for name, size in self.sizes(blocks).items():
            least, most = sizes.get(name, (1, None))
            if size < least or (most is not None and size > most):
                words = ", ".join(Demands(sizes={name: (least, most)}).words)
                raise self._contradicts(f"{name}={size}", name, words)
            sizes[name] = size, size
        kind = self.recompute(kinds)
        if kind is not None and asked.recompute and kind not in asked.recompute:
            words = f"recompute {' or '.join(asked.recompute)}"
            raise self._contradicts(f"recompute {kind}", RECOMPUTE, words)
        orders = () if SCHEDULE in self.free else SCHEDULES
        return asked.changed(
            sizes=sizes,
            recompute=asked.recompute if kind is None else (kind,),
            schedules=asked.schedules or orders,
        )

    def _contradicts(self, kept: str, name: str, asked: str) -> RequestError:
        return RequestError(
            f"{self.name} states {self.kept.said[name]} ({kept}), and asked for is {asked}; leave "
            f"out one of them: free={[name]!r} (--free {name}) releases the file's"
        )

    # ---- as it is -----------------------------------------------------------------------------

    def arrangement(self, asked: WholeAsked) -> Arrangement:
        """The file's own.

        Raises:
            RequestError: its sizes do not go with the devices, the batch or the blocks.
        """
        kept, blocks, devices = self.kept, asked.family.blocks, asked.cluster.devices
        ranks, micro = self.ranks(devices), kept.size("micro-batch")
        pipeline, expert = kept.size("pipeline"), kept.size("expert")
        data, rest = divmod(ranks, expert * kept.replicas)
        if rest:
            raise RequestError(
                f"{ranks} data-parallel devices are not {kept.replicas} replicas of {expert} "
                "expert-parallel ones"
            )
        microbatches, rest = divmod(asked.global_batch, ranks * micro)
        if rest:
            raise RequestError(
                f"{asked.global_batch} samples are not microbatches of {micro} on {ranks} devices"
            )
        virtual = (
            kept.size("virtual-stages") if kept.layers_per_chunk is None else self._chunks(blocks)
        )
        if not divides(blocks, pipeline * virtual):
            raise RequestError(f"{blocks} blocks are not {pipeline} stages of {virtual} chunks")
        found = Arrangement(
            pipeline=pipeline,
            replica=kept.replicas,
            data=data,
            expert=expert,
            context=kept.size("context"),
            model=kept.size("model"),
            micro_batch=micro,
            microbatches=microbatches,
            virtual_stages=virtual,
            order="interleaved" if virtual > 1 else "1f1b",
            recompute=kept.recompute or "none",
            recomputed_blocks=self._recomputed(blocks, pipeline * virtual),
        )
        if pipeline > 1:
            check(found.schedule().order, pipeline, virtual, microbatches)
        return found

    def _recomputed(self, blocks: int, chunks: int) -> int | None:
        """How many blocks are recomputed, where that is stated; None: all."""
        each = self.kept.recompute_per_chunk
        return None if each is None or each * chunks >= blocks else each * chunks

    def own(self, asked: WholeAsked) -> Own:
        """The configuration as it is, priced.

        Raises:
            AutoshardError: it cannot be; says why.
        """
        arrangement = self.arrangement(asked)
        problems = Problems(
            asked.family.few,
            asked.family.blocks,
            asked.cluster,
            asked.optimizer,
            asked.limit,
            asked.style,
            uses={**USES, **STORED[self.kept.parameters]},
            overlapped=asked.overlapped,
            products=asked.products,
        )
        schedule = problems.schedule(arrangement)
        if not self.kept.shares_optimizer:
            schedule = schedule.model_copy(update={"optimizer_shards": 1})
        solver = Scheduled(problems.folded(arrangement), schedule, problems.limit)
        # No flag of these tools has blocks differ in what operators do.
        return Own(arrangement=arrangement, found=solver.solve(alike=True))

    def beside(self, asked: WholeAsked, best: StepTime) -> tuple[list[str], list[Alternative]]:
        """What a plan says of the file: what was kept, and what it costs as it is."""
        kept = [words for name, words in self.kept.said.items() if name not in self.free]
        free = sorted(self.free.intersection(self.kept.said))
        notes = [
            f"kept of {self.name} ({self.kept.tool}): {', '.join(kept) or 'nothing'}"
            + (f"; searched all the same: {', '.join(free)}" if free else "")
        ]
        notes += [f"{self.name}: {note}" for note in self.kept.notes]
        if self.kept.optimizer not in (None, asked.optimizer):
            notes.append(f"{self.name}: optimizer {self.kept.optimizer}; planned {asked.optimizer}")
        try:
            own = self.own(asked)
        except AutoshardError as error:
            return [*notes, f"{self.name} as it is cannot be priced: {error}"], []
        step, memory = own.found.step.step_time, own.found.step.memory
        label = f"{self.name} as it is: {own.arrangement.label}"
        gain = step.total_s / best.total_s - 1.0
        verdict = (
            f"this plan makes {gain:+.1%} steps in the same time"
            if memory.fits
            else f"predicted to need {memory.total_bytes / 2**30:,.1f} GiB, more than there is"
        )
        notes.append(f"{label}: {step.total_s * 1e3:,.1f} ms; {verdict}")
        return notes, [
            Alternative(
                label=label,
                mesh=own.arrangement.mesh,
                step_time_s=step.total_s,
                memory_bytes=memory.total_bytes,
                fits=memory.fits,
                why=why(step, memory, best),
            )
        ]


def keeping(path: str | Path, free: Sequence[str]) -> Keeping:
    """What is kept of a file: ``.toml`` or ``.py`` of torchtitan, else Megatron-LM's arguments.

    Args:
        path: of the file; ``.yaml`` and ``.yml`` are Megatron-LM's too.
        free: names that are searched all the same.

    Raises:
        RequestError: it cannot be read, or states nothing.
        UnknownNameError: nothing of that name can be freed.
    """
    names = []
    for name in free:
        full = SHORT_AXES.get(name, name)
        if full not in (*SIZES, RECOMPUTE, SCHEDULE):
            raise UnknownNameError("size to free", name, (*SIZES, RECOMPUTE, SCHEDULE))
        names.append(full)
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise RequestError(f"cannot read {file}: {reason}") from error
    try:
        if file.suffix in (".toml", ".py"):
            kept = kept_torchtitan.kept(text, is_recipe=file.suffix == ".py")
        else:
            kept = kept_megatron.kept(text, is_yaml=file.suffix in (".yaml", ".yml"))
    except RequestError as error:
        raise RequestError(f"{file}: {error}") from error
    if not kept.said:
        raise RequestError(
            f"{file} states no size that could be kept; {kept.tool}'s would be read: for example "
            + (
                "[parallelism] tensor_parallel_degree = 8"
                if kept.tool == "torchtitan"
                else "--tensor-model-parallel-size 8"
            )
        )
    return Keeping(name=file.name, kept=kept, free=frozenset(names))
