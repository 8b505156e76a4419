"""``optimize`` and ``estimate``: analyze, search, and write down the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoshard.cluster import Cluster
from autoshard.errors import (
    InfeasibleError,
    InputError,
    RequestError,
    SpecError,
    UnknownNameError,
)
from autoshard.graph import Mode, ModelGraph
from autoshard.plan import Alternative, MeshDocument, ModelDocument, Schedule, TensorDocument
from autoshard.planner.capture import capture, source_of
from autoshard.planner.document import boundaries, idle_devices, label, tensor_document
from autoshard.planner.plan import Plan
from autoshard.planner.progress import Progress, reporter
from autoshard.planner.request import (
    CONTEXT,
    EXPERT,
    check_experts,
    check_sizes,
    check_strategy,
    resolve_cluster,
    resolve_dtype,
    resolve_mesh,
)
from autoshard.planner.schedule import (
    PIPELINE,
    Execution,
    check_products,
    schedule_of,
    without_pipeline,
)
from autoshard.planner.serving import Purpose, find_batch
from autoshard.search.memory import NONE, OPTIMIZERS, optimizer_of
from autoshard.sharding.layout import Layout, State
from autoshard.sharding.spec import PartitionSpec, ShardingSpec

if TYPE_CHECKING:
    from torch import nn

    from autoshard.analyzer import Captured
    from autoshard.candidates import AxisUse
    from autoshard.planner.crew import Crew
    from autoshard.planner.keep import Keeping
    from autoshard.planner.whole_nearest import WholeAsked
    from autoshard.search import Configuration, Solution, Solved, Standing

TIGHT = 0.03
"""Share of the memory below which a plan warns that little is to spare (assumed)."""

Validate = Literal["none", "dry-run", "run"]

Constraints = Mapping[str, ShardingSpec | PartitionSpec] | Sequence[str] | None
"""How parameters are stored; see :func:`optimize`."""


def optimize(
    model: nn.Module | str | Path | Mapping[str, Any],
    example_inputs: object | None = None,
    *,
    cluster: Cluster | str | Mapping[str, Any] | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    strategy: str = "auto",
    mesh: str | Mapping[str, int] | None = None,
    constraints: Constraints = None,
    memory_limit_bytes: int | None = None,
    trials: int | None = None,
    seed: int = 0,
    storage: str | None = None,
    space: str = "plain",
    axes: Sequence[str] | Mapping[str, int | tuple[int, int | None]] | None = None,
    within: Sequence[str] | Mapping[str, str] | None = None,
    recompute: str | Sequence[str] | None = None,
    schedule: str | Sequence[str] | None = None,
    keep: str | Path | None = None,
    free: Sequence[str] = (),
    sampler: str = "bound",
    kernels: str | None = None,
    products: str = "native",
    overlapped: str | Sequence[str] = (),
    mode: str = "train",
    context: int | None = None,
    objective: str = "latency",
    max_latency_s: float | None = None,
    validate: Validate = "none",
    measure: int | None = None,
    captured: Captured | None = None,
    suggest: bool = True,
    workers: int | Crew = 1,
    progress: bool | Callable[[str], None] | None = True,
    watch: Callable[[Standing], None] | None = None,
) -> Plan:
    """Find the fastest way to shard a model over a cluster.

    Args:
        model: any ``nn.Module`` (it is not changed, its weights are not copied), a preset, a
            Hugging Face ``config.json``, ``package.module:factory`` or a ``graph.json``.
        example_inputs: a tensor, a tuple or a dict of one *global* batch; None: from the model.
        cluster: preset, file, document or :class:`~autoshard.cluster.Cluster`; None: this machine.
        devices: how many devices; None: the preset's own number.
        global_batch: samples of one optimizer step over all devices.
        seq_len: tokens of a sample.
        dtype: floating dtype to train in; None: the model's own.
        optimizer: ``adamw``, ``adam``, ``sgd`` or ``sgd-momentum``: what its state needs.
        strategy: ``auto``, or one of ``data``, ``fsdp``, ``tensor``, ``hybrid`` to force it.
        mesh: axis sizes to force (``{"data": 4, "model": 2}``); None: all factorizations.
        constraints: parameter name -> ShardingSpec that it must be stored in. In the full space:
            pattern of names -> PartitionSpec over ``data`` and ``model``, or texts:
            ``["mlp.down_proj.weight=None,model"]``.
        memory_limit_bytes: of one device; None: what the cluster says.
        trials: most configurations that are priced; None: all, or 100 where there are many.
        seed: same seed, same plan.
        storage: URL of an Optuna storage that keeps the trials.
        space: ``plain``: what the bundled runtime runs, on data x model; ``full``: pipeline stages,
            replicas, experts, context, microbatches and recomputation too, which this version
            prices but cannot run.
        axes: ranges of sizes, in the full space: ``["model<=8", "pipeline=4"]``; also of
            ``micro-batch`` and ``virtual-stages``.
        within: tiers that axes must not leave, in the full space: ``["model=node"]``.
        recompute: ``none``, ``selective`` (attention scores, where they are tensors),
            ``pointwise`` (norms, activations and what else is cheap) or ``full``, or several, in
            the full space; None: what is fastest of all but ``pointwise``.
        schedule: of a pipeline, ``1f1b``, ``interleaved`` or ``zero-bubble``, or several, in the
            full space; None: what is fastest.
        keep: a configuration of Megatron-LM (flags, or ``.yaml``) or torchtitan (``.toml``, or a
            recipe's ``.py``), in the full space: what it states is kept, the rest is searched;
            batch, length and dtype are the file's where not given.
        free: sizes (or ``recompute``, ``schedule``) of ``keep`` that are searched all the same.
        sampler: of the full space, ``bound``, with a proof, or ``tpe``, ``nsga``, ``gp``,
            ``random``; with ``measure``, of what is run: ``bound`` stands for the best by
            prediction, the others propose all but the first.
        kernels: of the full space, and of inference: ``eager``, ``autocast`` or ``fused``; None:
            eager, or for inference fused, launched as one graph.
        products: of the full space: ``tf32`` for products of float32; ``fp8``, ``mxfp8`` or
            ``nvfp4`` for products of blocks with their weights; ``native``: the model's dtype.
        overlapped: of the full space: axes (``data``, ``context``, ``model``) whose messages run
            beside the computing of the block that they belong to; not in zero-bubble pipelines.
        mode: what a step is of: ``train``; or of inference ``prefill`` (whole prompts of
            ``seq_len`` tokens) or ``decode`` (one token more for each sequence).
        context: to decode: tokens that the new one attends to, itself included.
        objective: of inference: ``latency``, the shortest step of ``global_batch`` sequences (one
            if left out); or ``throughput``, the batch and the plan with most tokens a second.
        max_latency_s: longest step, where throughput is sought.
        validate: ``dry-run`` or ``run`` to check the plan before it is returned.
        measure: so many plans are run on processes of this machine, and the fastest is returned;
            ``plan.real_runs`` has them all. Of the plain space.
        captured: the model at this very batch, length and dtype, where it was captured before.
        suggest: whether to look, where nothing fits, for the nearest changes that do.
        workers: how many processes search the full space (with more than one, another captures the
            model), or a :class:`~autoshard.planner.crew.Crew`. The plan does not depend on it.
        progress: True: lines on stderr where it is a terminal; or called with each line.
        watch: told after each configuration how far the search is, and the fastest so far.

    Raises:
        RequestError: the request is wrong; says where and what would be right.
        InfeasibleError: nothing fits; names what binds and what would fit.
        ValidationError: the plan did not do what it said.
    """
    if validate not in ("none", "dry-run", "run"):
        raise RequestError(f"validate must be 'none', 'dry-run' or 'run', found {validate!r}")
    if isinstance(workers, int) and workers < 1:
        raise RequestError(f"workers must be 1 or more, found {workers}")
    say = reporter(progress)
    if mode != "train":
        optimizer = _no_training(
            optimizer,
            space,
            axes=axes,
            within=within,
            recompute=recompute,
            schedule=schedule,
            keep=keep,
            sampler=None if sampler == "bound" else sampler,
            measure=measure,
            products=None if products == "native" else products,
            overlapped=overlapped or None,
        )
    elif optimizer == NONE.name:
        raise UnknownNameError("optimizer", optimizer, OPTIMIZERS)
    request = Request.read(
        cluster, devices, optimizer, strategy, mesh, memory_limit_bytes, trials, say
    )
    purpose = Purpose.read(
        mode,
        seq_len=seq_len,
        context=context,
        objective=objective,
        max_latency_s=max_latency_s,
        kernels=kernels,
        global_batch=global_batch,
        mesh=request.forced,
    )
    if space == "full":
        from autoshard.planner.whole import asked_of
        from autoshard.search.sampler import SAMPLERS

        if sampler not in SAMPLERS:
            raise UnknownNameError("sampler", sampler, SAMPLERS)
        if validate != "none" or measure is not None:
            raise RequestError(
                "a plan of the full space cannot be run yet; leave validate and measure out"
            )
        kept = None
        if keep is not None:
            from autoshard.planner.keep import keeping

            kept = keeping(keep, free)
            global_batch = global_batch or kept.batch(request.cluster.devices)
            seq_len, dtype = seq_len or kept.kept.seq_len, dtype or kept.kept.dtype
        elif free:
            raise RequestError(f"free={list(free)!r} releases sizes of a file; name it: keep=...")
        from autoshard.planner.crew import crew_of

        with crew_of(workers) as crew:
            whole = asked_of(
                request,
                model,
                keeping=kept,
                example_inputs=example_inputs,
                constraints=constraints,
                axes=axes,
                within=within,
                recompute=recompute,
                schedule=schedule,
                global_batch=global_batch,
                seq_len=seq_len,
                dtype=resolve_dtype(dtype),
                limit=memory_limit_bytes,
                kernels=purpose.kernels,
                products=products,
                overlapped=overlapped,
                crew=crew,
            )
            return _full(
                request,
                whole,
                model,
                keeping=kept,
                suggest=suggest,
                global_batch=global_batch,
                seq_len=seq_len,
                dtype=dtype,
                sampler=sampler,
                trials=trials,
                seed=seed,
                storage=storage,
                crew=crew,
            )
    if mode == "train":
        check_plain(
            space,
            axes,
            within,
            recompute,
            schedule,
            "bound" if measure is not None else sampler,
            purpose.kernels,
            products,
            overlapped,
            keep or free,
        )
    check_sizes(measure=measure)
    plain_pins(constraints)
    notes: list[str] = []
    if purpose.objective == "throughput":
        busiest = find_batch(
            model,
            purpose,
            request.cluster,
            dtype=resolve_dtype(dtype),
            strategy=strategy,  # type: ignore[arg-type]  # checked by the request
            mesh=request.forced,
            memory_limit=memory_limit_bytes,
            pins=lambda graph: resolve_pins(constraints, graph),
            say=say,
        )
        global_batch = busiest.batch
        notes.append(busiest.note)
    captured = captured or request.capture(
        model, example_inputs, global_batch, purpose.tokens, dtype, purpose.mode
    )
    if captured.graph.mode != mode:
        raise RequestError(
            f"the graph {captured.graph.name} is of mode {captured.graph.mode!r}, asked for was "
            f"mode {mode!r}; choose that mode, or give the model itself"
        )
    check_experts(captured.graph, (request.forced or {}).get(EXPERT, 1))
    from autoshard.planner.measured import fastest_run
    from autoshard.search import Asked, alternatives, explained, search

    def told(standing: Standing) -> None:
        say(f"priced {standing.done}/{standing.total}: {standing.label}")
        if watch is not None:
            watch(standing)

    def regraph(batch: int, length: int | None) -> ModelGraph:
        return capture(
            model, batch=batch, seq_len=length or seq_len, dtype=resolve_dtype(dtype)
        ).graph

    say(f"searching strategies of {len(captured.graph.nodes)} operators")
    asked = Asked(
        graph=captured.graph,
        cluster=request.cluster,
        optimizer=optimizer,
        strategy=strategy,  # type: ignore[arg-type]  # checked by the request
        mesh=request.forced,
        memory_limit=memory_limit_bytes,
        pins=resolve_pins(constraints, captured.graph),
        trials=trials,
    )
    try:
        result = search(
            asked.graph,
            asked.cluster,
            optimizer=asked.optimizer,
            strategy=asked.strategy,
            mesh=asked.mesh,
            memory_limit=asked.memory_limit,
            pins=asked.pins,
            trials=asked.trials,
            seed=seed,
            storage=storage,
            progress=told,
            style=purpose.kernels,
        )
    except InfeasibleError as error:
        if not suggest:
            raise
        say("nothing fits; looking for changes that do")
        if mode != "train":
            raise InfeasibleError(
                str(error).splitlines()[0].replace(", none)", ")"), binding=error.binding
            ) from None
        found = explained(error, asked, regraph if example_inputs is None else None)
        if request.is_free and not constraints and example_inputs is None:
            from autoshard.planner.whole_nearest import with_full_space

            found = with_full_space(
                found,
                model,
                request.cluster,
                global_batch=captured.graph.batch,
                seq_len=seq_len,
                dtype=resolve_dtype(dtype),
                optimizer=optimizer,
                limit=memory_limit_bytes,
                say=say,
            )
        raise found from None

    def planned(configuration: Configuration) -> Plan:
        return _plan(
            result.priced[configuration],
            captured.graph,
            request,
            seed=seed,
            source=source_of(model),
            seq_len=seq_len,
            alternatives=alternatives(result.priced, configuration),
            lower_bound_s=result.lower_bound_s,
            schedule=Schedule(style=purpose.kernels),
            notes=notes,
            purpose=purpose,
        ).attach(captured)

    if measure is None:
        plan = planned(result.configuration)
    else:
        plan = fastest_run(
            result,
            planned,
            captured,
            measure,
            sampler=None if sampler == "bound" else sampler,
            seed=seed,
            storage=storage,
            say=say,
        )
    plan.remember(mesh=request.forced, constraints=constraints, trials=trials)
    if validate != "none":
        plan.validate(dry_run=validate == "dry-run", progress=say)
    return plan


def estimate(
    model: nn.Module | str | Path | Mapping[str, Any],
    example_inputs: object | None = None,
    *,
    mesh: str | Mapping[str, int],
    cluster: Cluster | str | Mapping[str, Any] | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    strategy: str = "auto",
    memory_limit_bytes: int | None = None,
    micro_batch: int | None = None,
    recompute: str = "none",
    schedule: str | None = None,
    virtual_stages: int = 1,
    kernels: str = "eager",
    shard_optimizer: bool = False,
    overlapped: Sequence[str] = (),
    products: str = "native",
    blocks: int | None = None,
    recomputed_blocks: int | None = None,
    stage_blocks: Sequence[int] | None = None,
    seed: int = 0,
    captured: Captured | None = None,
    solved: Solved | None = None,
    progress: bool | Callable[[str], None] | None = True,
) -> Plan:
    """What a model costs on one given mesh; arguments as :func:`optimize`, and how a step is run.

    The plan is returned even where it does not fit: see ``plan.memory.fits``. Beside those:

    Args:
        model: see :func:`optimize`.
        example_inputs: see there; of one microbatch.
        mesh: axis sizes; ``pipeline`` says how many stages, ``context`` how many devices share the
            tokens of a sample, ``expert`` how many the experts of a layer.
        cluster: see there.
        devices: see there.
        global_batch: samples of one step, all microbatches.
        seq_len: see there.
        dtype: see there.
        optimizer: see there.
        strategy: see there; ``data+tensor`` and ``fsdp+tensor`` are ``hybrid`` with parameters
            whole along the data axis, or cut.
        memory_limit_bytes: see there.
        seed: see there.
        progress: see there.
        micro_batch: samples that a device takes at a time; None: all of a step at once, or 1 with
            a pipeline.
        recompute: ``none``, ``selective`` (attention scores), ``pointwise`` (norms, activations and
            what else is cheap), ``full`` (what backward needs of each repeated block) or
            ``reentrant`` (all of it).
        schedule: ``gpipe``, ``1f1b``, ``interleaved`` or ``zero-bubble``; None: interleaved with
            virtual stages, else 1f1b.
        virtual_stages: chunks of the model on each stage.
        kernels: ``eager``, ``autocast`` or ``fused``: how operators between products are run.
        shard_optimizer: whether the data axis shares the optimizer's state and work (ZeRO 1).
        overlapped: axes (``data``, ``context``, ``model``) whose messages run beside the computing
            of the block that they belong to, as prefetched gathers of FSDP do.
        products: ``tf32`` for products of float32; ``fp8``, ``mxfp8`` or ``nvfp4`` for products of
            blocks with their weights; ``native``: the dtype of the operands.
        blocks: repeated blocks of the model, where it was given with fewer, 3 at least: the others
            are priced like the one in the middle.
        recomputed_blocks: how many blocks ``recompute`` is of, the first of each chunk; None:
            all.
        stage_blocks: how many blocks each stage of a pipeline has (with virtual stages: each chunk,
            in the order of the model); None: equally many where they divide.
        captured: the model, if at hand; of one microbatch.
        solved: of the graph of ``captured``, where several estimates are to share what they have
            in common.

    Raises:
        RequestError: the request is wrong; says where and what would be right.
    """
    say = reporter(progress)
    execution = Execution(
        micro_batch=micro_batch,
        virtual_stages=virtual_stages,
        order=schedule,
        recompute=recompute,
        kernels=kernels,
        shard_optimizer=shard_optimizer,
        overlapped=tuple(overlapped),
        products=products,
        blocks=blocks,
        recomputed_blocks=recomputed_blocks,
        stage_blocks=None if stage_blocks is None else tuple(stage_blocks),
    )
    check_sizes(micro_batch=micro_batch, virtual_stages=virtual_stages, global_batch=global_batch)
    whole, _ = resolve_cluster(cluster, devices)
    check_products(products, whole)
    sizes, stages = without_pipeline(mesh, whole.devices)
    request = Request.read(
        cluster, devices, optimizer, strategy, None, memory_limit_bytes, None, say
    ).on_stage(sizes, stages)
    assert request.mesh is not None
    axes = dict(zip(request.mesh.axis_names, request.mesh.sizes, strict=True))
    samples = axes["data"] * axes.get(EXPERT, 1)
    chosen, batch = schedule_of(execution, stages, samples, global_batch, axes.get(CONTEXT, 1))
    captured = captured or request.capture(model, example_inputs, batch, seq_len, dtype)
    check_experts(captured.graph, axes.get(EXPERT, 1))
    from autoshard.search import Configuration

    return price(
        request,
        captured,
        Configuration(strategy, tuple(axes), tuple(axes.values())).uses,  # type: ignore[arg-type]
        {},
        memory_limit_bytes=memory_limit_bytes,
        seed=seed,
        source=source_of(model),
        seq_len=seq_len,
        schedule=chosen,
        solved=solved,
    )


def price(
    request: Request,
    captured: Captured,
    uses: Sequence[AxisUse],
    pins: Mapping[str, Layout],
    *,
    memory_limit_bytes: int | None,
    seed: int,
    source: str | None,
    seq_len: int | None,
    schedule: Schedule | None = None,
    solved: Solved | None = None,
) -> Plan:
    """The fastest plan on the request's mesh with its axes used so, whether it fits or not.

    Args:
        request: names a mesh.
        captured: the model.
        uses: what each axis of the mesh may be used for.
        pins: parameter -> the layout over the axes larger than 1 that it must be stored in.
        memory_limit_bytes: of one device; None: what the cluster says.
        seed: noted in the plan.
        source: where the model comes from.
        seq_len: tokens of a sample.
        schedule: how a step is run; the model is then captured at one microbatch. None: at once.
        solved: of the graph of ``captured``; None: nothing is shared.

    Raises:
        RequestError: ``solved`` is of another graph.
    """
    from autoshard.search import Solved

    request.say(f"pricing {len(captured.graph.nodes)} operators")
    assert request.mesh is not None
    schedule = schedule or Schedule()
    limit = request.cluster.device.memory_bytes
    limit = limit if memory_limit_bytes is None else memory_limit_bytes
    solved = solved or Solved(captured.graph)
    if solved.graph is not captured.graph:
        raise RequestError("solved is of another graph than captured; give Solved(captured.graph)")
    found = solved.on(
        request.cluster,
        request.mesh.sizes,
        request.mesh.axis_names,
        uses,
        optimizer=request.optimizer,
        # What several microbatches, stages or recomputation keep is priced afterwards.
        memory_limit=limit if schedule.is_plain else None,
        pins=pins,
        style=schedule.style,
    )
    solution = found.solution if schedule.is_plain else found.scheduled(schedule, limit)
    return _plan(
        solution,
        captured.graph,
        request,
        seed=seed,
        source=source,
        seq_len=seq_len,
        alternatives=(),
        lower_bound_s=solution.lower_bound_s if schedule.is_plain else None,
        schedule=schedule,
    ).attach(captured)


def _no_training(optimizer: str, space: str, **others: object) -> str:
    """The optimizer of inference: none.

    Raises:
        RequestError: something of training was asked for.
    """
    for name, given in (
        (f"optimizer {optimizer!r}", optimizer not in ("adamw", NONE.name)),
        (f"space {space!r}", space != "plain"),
        *((name, value is not None and value != ()) for name, value in others.items()),
    ):
        if given:
            raise RequestError(f"{name} is of training; leave it out, or choose mode 'train'")
    return NONE.name


def _context(graph: ModelGraph) -> int | None:
    """To decode: the places of the longest cache."""
    if graph.mode != "decode":
        return None
    return max(n.shape[-2] for n in graph.inputs.values() if n.is_cache)


def check_plain(
    space: str,
    axes: object,
    within: object,
    recompute: object,
    schedule: object,
    sampler: str,
    kernels: str,
    products: str,
    overlapped: object,
    keep: object = None,
) -> None:
    """Refuse what only the full space has; arguments as of :func:`optimize`.

    Raises:
        UnknownNameError: no such space.
        RequestError: says which argument needs the full space.
    """
    from autoshard.planner.whole import SPACES

    if space not in SPACES:
        raise UnknownNameError("space", space, SPACES)
    for name, given in (
        ("axes", bool(axes)),
        ("within", bool(within)),
        ("recompute", bool(recompute)),
        ("schedule", bool(schedule)),
        ("sampler", sampler != "bound"),
        ("kernels", kernels != "eager"),
        ("products", products != "native"),
        ("overlapped", bool(overlapped)),
        ("keep", bool(keep)),
    ):
        if given:
            raise RequestError(f"{name} is of the full space; add space='full', or leave it out")


def _full(
    request: Request,
    asked: WholeAsked,
    model: nn.Module | str | Path | Mapping[str, Any],
    *,
    keeping: Keeping | None,
    suggest: bool,
    global_batch: int | None,
    seq_len: int | None,
    dtype: str | None,
    sampler: str,
    trials: int | None,
    seed: int,
    storage: str | None,
    crew: Crew | None,
) -> Plan:
    """The plan of the whole space; see :func:`optimize`."""
    from autoshard.planner.whole import search_space

    notes = []
    if global_batch is None:
        notes.append(
            f"global batch: none given, so {asked.global_batch} samples, 1 for each device"
        )
    found = search_space(
        asked,
        model,
        suggest=suggest,
        dtype=resolve_dtype(dtype),
        sampler=sampler,
        trials=trials,
        seed=seed,
        storage=storage,
        keeping=keeping,
        say=request.say,
        workers=None if crew is None else crew.searching,
    )
    if found.mixture is not None:
        notes.append(found.mixture)
    alternatives = found.result.alternatives
    if keeping is not None:
        request.say(f"pricing {keeping.name} as it is")
        said, own = keeping.beside(asked, found.solution.step_time)
        notes += said
        alternatives = (*own, *alternatives)
    return _plan(
        found.solution,
        found.graph,
        request,
        seed=seed,
        source=source_of(model),
        seq_len=seq_len,
        alternatives=alternatives,
        lower_bound_s=found.solution.lower_bound_s,
        schedule=found.schedule,
        notes=(*notes, found.note),
    ).found_in(found)


class Request:
    """What was asked for, checked before anything long is begun."""

    def __init__(
        self,
        cluster: Cluster,
        mesh: MeshDocument | None,
        optimizer: str,
        strategy: str,
        assumptions: tuple[str, ...],
        say: Progress,
        whole: Cluster | None = None,
    ) -> None:
        self.cluster, self.mesh, self.whole = cluster, mesh, whole or cluster
        self.optimizer, self.strategy = optimizer, strategy
        self.assumptions, self.say = assumptions, say

    @classmethod
    def read(
        cls,
        cluster: Cluster | str | Mapping[str, Any] | None,
        devices: int | None,
        optimizer: str,
        strategy: str,
        mesh: str | Mapping[str, int] | None,
        memory_limit_bytes: int | None,
        trials: int | None,
        say: Progress,
    ) -> Request:
        """Check what was asked for; see :func:`optimize`."""
        check_strategy(strategy)
        optimizer_of(optimizer)
        check_sizes(memory_limit_bytes=memory_limit_bytes, trials=trials)
        found, note = resolve_cluster(cluster, devices)
        return cls(
            found,
            resolve_mesh(mesh, found.devices),
            optimizer,
            strategy,
            () if note is None else (note,),
            say,
        )

    @property
    def is_free(self) -> bool:
        """Whether neither a strategy nor a mesh is forced."""
        return self.strategy == "auto" and self.mesh is None

    @property
    def forced(self) -> dict[str, int] | None:
        """The mesh that was asked for, as sizes by name."""
        if self.mesh is None:
            return None
        return dict(zip(self.mesh.axis_names, self.mesh.sizes, strict=True))

    def on_mesh(self, sizes: Mapping[str, int]) -> Request:
        """The same request on this mesh.

        Raises:
            MeshError: the sizes do not multiply to the devices.
        """
        mesh = resolve_mesh(sizes, self.cluster.devices)
        return Request(
            self.cluster, mesh, self.optimizer, self.strategy, self.assumptions, self.say
        )

    def on_stage(self, sizes: Mapping[str, int], stages: int) -> Request:
        """The request of one of ``stages`` stages, on the mesh of a stage.

        Raises:
            MeshError: the sizes do not multiply to the devices of a stage.
        """
        if stages == 1:
            return self.on_mesh(sizes)
        part = self.cluster.part(stages)
        mesh = resolve_mesh(sizes or {"data": part.devices}, part.devices)
        return Request(
            part, mesh, self.optimizer, self.strategy, self.assumptions, self.say, self.cluster
        )

    def capture(
        self,
        model: nn.Module | str | Path | Mapping[str, Any],
        example_inputs: object | None,
        global_batch: int | None,
        seq_len: int | None,
        dtype: str | None,
        mode: Mode = "train",
    ) -> Captured:
        """The model, captured at the batch that was asked for."""
        check_sizes(global_batch=global_batch, seq_len=seq_len)
        if example_inputs is not None and (global_batch is not None or seq_len is not None):
            raise InputError(
                "example_inputs fix the global batch and the length; leave out global_batch and "
                "seq_len, or example_inputs"
            )
        name = model if isinstance(model, str | Path) else type(model).__name__
        self.say(f"capturing {name}")
        return capture(
            model,
            example_inputs,
            batch=global_batch,
            seq_len=seq_len,
            dtype=resolve_dtype(dtype),
            devices=self.cluster.devices,
            progress=self.say,
            mode=mode,
        )


def plain_pins(constraints: Constraints) -> dict[str, ShardingSpec]:
    """Constraints of the plain space, which know their mesh.

    Raises:
        RequestError: texts, which are of the full space.
        SpecError: a spec without a mesh.
    """
    if constraints is not None and not isinstance(constraints, Mapping):
        raise RequestError(
            f"constraints as text ({', '.join(constraints)}) are of the full space; add "
            "space='full', or give a ShardingSpec by parameter"
        )
    out: dict[str, ShardingSpec] = {}
    for name, spec in (constraints or {}).items():
        if not isinstance(spec, ShardingSpec):
            raise SpecError(
                f"the constraint of {name} is {spec!r}; in the plain space give a ShardingSpec, "
                "with its mesh: ShardingSpec(mesh, PartitionSpec(...)); or add space='full'"
            )
        out[name] = spec
    return out


def resolve_pins(constraints: Constraints, graph: ModelGraph) -> dict[str, dict[str, State]]:
    """State of each constrained parameter on the axes that its spec names.

    Raises:
        UnknownNameError: no such parameter.
        SpecError: a spec that does not fit it.
        RequestError: constraints of the full space.
    """
    out: dict[str, dict[str, State]] = {}
    for name, spec in plain_pins(constraints).items():
        fqn = graph.aliases.get(name, name)
        if fqn not in graph.parameters:
            raise UnknownNameError("parameter", name, graph.parameters)
        shape = graph.parameters[fqn].shape
        spec.validate(shape, name=name)
        layout = spec.layout(shape)
        out[fqn] = dict(zip(spec.mesh.axis_names, layout, strict=True))
    return out


def _plan(
    solution: Solution,
    graph: ModelGraph,
    request: Request,
    *,
    seed: int,
    source: str | None,
    seq_len: int | None,
    alternatives: Sequence[Alternative],
    lower_bound_s: float | None,
    schedule: Schedule | None = None,
    notes: Sequence[str] = (),
    purpose: Purpose | None = None,
) -> Plan:
    program = solution.program
    schedule = schedule or Schedule()
    names, sizes = solution.axis_names, solution.sizes
    if schedule.stages > 1:
        names, sizes = (PIPELINE, *names), (schedule.stages, *sizes)
    mesh = MeshDocument(axis_names=names, sizes=sizes)

    def documents(names: Mapping[str, str]) -> dict[str, TensorDocument]:
        return {key: tensor_document(program, name) for key, name in names.items()}

    warnings = [*graph.warnings]
    for family in program.rules.without:
        warnings.append(
            f"operator {family} has no sharding rule: its operands are gathered and it is computed "
            f"on every device; give it one with autoshard.sharding_rule({family!r}, ...)"
        )
    limit, total = solution.memory.limit_bytes, solution.memory.total_bytes
    if limit is not None and 0 <= limit - total < TIGHT * limit:
        warnings.append(
            f"memory is tight: {(limit - total) / 2**20:,.0f} MiB to spare of "
            f"{limit / 2**30:.1f} GiB, less than {TIGHT:.0%}; the prediction may be off by more"
        )
    if idle := idle_devices(program):
        warnings.append(idle)
    return Plan(
        model=ModelDocument(
            name=graph.name,
            fingerprint=graph.fingerprint,
            parameter_count=graph.parameter_count,
            source=source,
        ),
        cluster=request.whole.to_json(),
        mesh=mesh,
        label=label(program, mesh),
        strategy=request.strategy,
        mode=graph.mode,
        objective="latency" if purpose is None else purpose.objective,
        global_batch=graph.batch * schedule.microbatches,
        seq_len=graph.inputs["input_ids"].shape[1] if graph.mode == "prefill" else seq_len,
        context=_context(graph),
        dtype=_dtype(graph),
        optimizer=request.optimizer,
        seed=seed,
        parameters=documents({f: n.name for f, n in graph.parameters.items()}),
        inputs=documents({p: n.name for p, n in graph.inputs.items()}),
        outputs=documents(dict(graph.outputs)),
        activations=documents({n: n for n in boundaries(graph)}),
        choices={
            n.name: tuple(str(c) for c in solution.strategies[n.name].choices)
            for n in graph.nodes
            if n.op != "constant"
        },
        regather=tuple(sorted(solution.regather)),
        bucket_bytes=program.bucket_bytes,
        schedule=schedule,
        step_time=solution.step_time,
        memory=solution.memory,
        collectives=solution.collectives,
        alternatives=tuple(alternatives),
        lower_bound_s=lower_bound_s,
        warnings=tuple(warnings),
        assumptions=(*request.assumptions, *graph.assumptions, *notes),
    )


def _dtype(graph: ModelGraph) -> str:
    """The dtype of most parameter elements."""
    counts: dict[str, int] = {}
    for node in graph.parameters.values():
        counts[node.dtype] = counts.get(node.dtype, 0) + node.num_bytes // node.itemsize
    with suppress(ValueError):
        return max(counts, key=lambda d: counts[d])
    return "float32"
