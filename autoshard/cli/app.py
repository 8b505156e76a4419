"""The commands. Each reads its options, calls the planner, and shows or writes what it returns.

Nothing heavy is imported before a command runs: ``autoshard --help`` answers at once.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.cli.calibrate import calibrate
from autoshard.cli.export import export, import_
from autoshard.cli.options import given, writable
from autoshard.cli.output import Output, guarded
from autoshard.cli.report import report
from autoshard.cli.serve import keys, serve
from autoshard.cli.serving import Context, MaxLatency, Mode, ModeOption, Objective, ObjectiveOption
from autoshard.cli.sweep import results, sweep
from autoshard.cli.trace import trace
from autoshard.cli.visualize import visualize
from autoshard.errors import InfeasibleError, RequestError, ValidationError
from autoshard.quantities import parse_bytes, parse_seconds

app = typer.Typer(
    name="autoshard",
    help="Find how to shard a PyTorch model over a device mesh, and check that by running it.",
    epilog=(
        "Exit status: 0 done, 2 the request was wrong, 3 nothing fits, 4 validation failed, "
        "1 anything else."
    ),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Strategy(StrEnum):
    """What may be chosen from."""

    auto = "auto"
    data = "data"
    fsdp = "fsdp"
    tensor = "tensor"
    hybrid = "hybrid"


class Recompute(StrEnum):
    """What backward may compute again."""

    none = "none"
    selective = "selective"
    pointwise = "pointwise"
    full = "full"
    reentrant = "reentrant"


class Order(StrEnum):
    """The known pipeline schedules."""

    gpipe = "gpipe"
    one_forward_one_backward = "1f1b"
    interleaved = "interleaved"
    zero_bubble = "zero-bubble"


class Style(StrEnum):
    """How operators between products may be run."""

    eager = "eager"
    autocast = "autocast"
    fused = "fused"


class Products(StrEnum):
    """What products may run in."""

    native = "native"
    tf32 = "tf32"
    fp8 = "fp8"
    mxfp8 = "mxfp8"
    nvfp4 = "nvfp4"


class Overlapped(StrEnum):
    """Axes whose messages may run beside computing."""

    data = "data"
    context = "context"
    model = "model"


class Space(StrEnum):
    """The known spaces of a search."""

    plain = "plain"
    full = "full"


class Sampler(StrEnum):
    """The known samplers of the full space."""

    bound = "bound"
    tpe = "tpe"
    nsga = "nsga"
    gp = "gp"
    random = "random"


class Optimizer(StrEnum):
    """The optimizers whose state is known."""

    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"
    sgd_momentum = "sgd-momentum"


MODELS = "preset (llama-3-8b), a Hugging Face config.json, package.module:factory, or a graph.json."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=f"A {MODELS}", show_default=False)]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="Preset (h100, a100-80, local, ...) or cluster file; this machine if left out.",
    ),
]
Devices = Annotated[
    int | None, typer.Option("--devices", min=1, metavar="N", help="Number of devices.")
]
GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, metavar="B", help="Samples of one step, all devices."),
]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", min=1, metavar="S", help="Tokens of one sample.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="TYPE", help="bf16, fp16, fp32 or fp64; the model's own if left out."
    ),
]
OptimizerOption = Annotated[
    Optimizer, typer.Option("--optimizer", help="Optimizer whose state is kept.")
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="SIZES",
        help="Axis sizes, as data=4,model=8 (short: dp=4,tp=8); all are tried if left out.",
    ),
]
StrategyOption = Annotated[
    Strategy, typer.Option("--strategy", help="What to choose from; auto is everything.")
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="BYTES",
        help="Memory of a device that may be used, as 72GiB, 80GB or 17179869184.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the result there, as JSON.")
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")
]
NoColor = Annotated[
    bool, typer.Option("--no-color", help="No colours; setting NO_COLOR does the same.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same result.")]


def facade() -> Any:
    """The planner; imported when a command runs."""
    return importlib.import_module("autoshard.planner")


@contextmanager
def planner(server: str | None) -> Iterator[Callable[..., Any]]:
    """What plans: this process, or the service at ``server``."""
    if server is None:
        yield facade().optimize
        return
    with importlib.import_module("autoshard.client").Client(server) as client:
        yield client.plan


def _version(asked: bool) -> None:
    if asked:
        from autoshard import __version__

        typer.echo(f"autoshard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...


@app.command()
def plan(
    model: Model,
    cluster: ClusterOption = None,
    devices: Devices = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    optimizer: OptimizerOption = Optimizer.adamw,
    mesh: Mesh = None,
    strategy: StrategyOption = Strategy.auto,
    memory_limit: MemoryLimit = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, metavar="N", help="Most configurations that are priced."),
    ] = None,
    seed: Seed = 0,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            help="Keep the search's trials there (sqlite:///search.db); in memory if left out.",
        ),
    ] = None,
    space: Annotated[
        Space,
        typer.Option(
            "--space",
            help="plain: what the bundled runtime runs; full: also pipeline stages, replicas, "
            "experts, context, microbatches and recomputation, which are priced but not run.",
        ),
    ] = Space.plain,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            metavar="RANGE",
            help="A range of a size of the full space: model<=8, pipeline=4, micro-batch=2, "
            "virtual-stages=1; may be repeated.",
        ),
    ] = None,
    within: Annotated[
        list[str] | None,
        typer.Option(
            "--within",
            metavar="AXIS=TIER",
            help="A tier that an axis of the full space must not leave: model=node; may be "
            "repeated.",
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin",
            metavar="NAME=SPEC",
            help="How parameters are stored, in the full space: mlp.down_proj.weight=None,model "
            "(an entry a dim; data+model for both; or whole); * stands for any part of a name; may "
            "be repeated.",
        ),
    ] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            "--recompute",
            metavar="KIND",
            help="Recomputation in the full space: none, selective (attention scores, where "
            "they are tensors), pointwise (norms, activations and what else is cheap) or full; "
            "may be repeated; what is fastest if left out, of all but pointwise.",
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            "--schedule",
            metavar="ORDER",
            help="Schedule of a pipeline in the full space: 1f1b, interleaved or zero-bubble; may "
            "be repeated; what is fastest if left out.",
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FILE",
            help="Keep to a configuration of Megatron-LM (flags, or .yaml) or torchtitan (.toml, "
            ".py) in the full space, and search what it does not state.",
        ),
    ] = None,
    free: Annotated[
        list[str] | None,
        typer.Option(
            "--free",
            metavar="SIZE",
            help="Search a size that --keep states: model, micro-batch, recompute, ...; may be "
            "repeated.",
        ),
    ] = None,
    sampler: Annotated[
        Sampler,
        typer.Option(
            "--sampler",
            help="Of the full space, --measure or --front: bound has a proof (--measure: takes the "
            "best by prediction); the others are Optuna's own.",
        ),
    ] = Sampler.bound,
    kernels: Annotated[
        Style | None,
        typer.Option(
            "--kernels",
            help="How operators between products are run, in the full space (eager if left out) "
            "and in inference (fused).",
        ),
    ] = None,
    products: Annotated[
        Products,
        typer.Option(
            "--products",
            help="What products of blocks with their weights run in, in the full space (tf32: all "
            "products of float32).",
        ),
    ] = Products.native,
    overlap: Annotated[
        list[Overlapped] | None,
        typer.Option(
            "--overlap",
            help="Axis whose messages run beside computing, in the full space; may be repeated.",
        ),
    ] = None,
    measure: Annotated[
        int | None,
        typer.Option(
            "--measure",
            min=1,
            metavar="K",
            help="Run the best K plans on processes of this machine and take the fastest; with "
            "--sampler it proposes which.",
        ),
    ] = None,
    mode: ModeOption = Mode.train,
    context: Context = None,
    objective: ObjectiveOption = Objective.latency,
    max_latency: MaxLatency = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            envvar="AUTOSHARD_SERVER",
            help="Let this planning service do it; a key is read from AUTOSHARD_API_KEY.",
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="CHANGE",
            help="Compare with another cluster or request: link=2x, memory=0.5x,nodes=+1, "
            "devices=16, peak=2x, ...; may be repeated.",
        ),
    ] = None,
    why_not: Annotated[
        str | None,
        typer.Option(
            "--why-not",
            metavar="MESH",
            help="Compare the plan with another mesh, part by part: data=8, or with a strategy "
            "'fsdp, data=8'.",
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Compare the plan with the best of each kind that it is not: what each loses.",
        ),
    ] = False,
    front: Annotated[
        bool,
        typer.Option(
            "--front",
            help="Step time against memory: the plans than which none is both faster and smaller; "
            "--sampler nsga asks NSGA-II instead.",
        ),
    ] = False,
    smallest: Annotated[
        bool,
        typer.Option(
            "--smallest", help="On the fewest devices where it fits; --devices is the most."
        ),
    ] = False,
    step_time: Annotated[
        float | None,
        typer.Option(
            "--step-time",
            metavar="SECONDS",
            help="On the fewest devices where a step takes at most so long.",
        ),
    ] = None,
    out: Out = None,
    as_json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Find the fastest way to shard MODEL over a cluster."""
    output = Output(as_json=as_json, no_color=no_color)
    writable(out)
    asked = given(
        cluster=cluster,
        devices=devices,
        global_batch=global_batch,
        seq_len=seq_len,
        dtype=dtype,
        mesh=mesh,
        memory_limit_bytes=parse_bytes("--memory-limit", memory_limit),
        trials=trials,
        storage=storage,
        step_time_s=step_time,
        space=None if space is Space.plain else space.value,
        axes=axis or None,
        measure=measure,
        within=within or None,
        constraints=pin or None,
        recompute=recompute or None,
        schedule=schedule or None,
        keep=keep,
        free=free or None,
        sampler=None if sampler is Sampler.bound else sampler.value,
        kernels=None if kernels is None else kernels.value,
        products=None if products is Products.native else products.value,
        overlapped=[axis.value for axis in overlap] if overlap else None,
        mode=None if mode is Mode.train else mode.value,
        context=context,
        objective=None if objective is Objective.latency else objective.value,
        max_latency_s=parse_seconds("--max-latency", max_latency),
    )
    _check_questions(
        {
            "--server": server is not None,
            "--storage": storage is not None,
            "--what-if": bool(what_if),
            "--why-not": why_not is not None,
            "--explain": explain,
            "--front": front,
            "--measure": measure is not None,
            SMALLEST: smallest or step_time is not None,
            "--mesh": mesh is not None,
            FULL: space is Space.full,
            KEEP: keep is not None or bool(free),
            PLAIN: space is Space.plain,
            INFERENCE: mode is not Mode.train,
        }
    )
    asked |= {"optimizer": optimizer.value, "strategy": strategy.value, "seed": seed}
    with (
        _crew(space, explain) as workers,
        output.progress(f"planning {model}") as progress,
        planner(server) as optimize,
    ):
        answer = None
        if what_if:
            answer = facade().what_if(model, what_if, **asked, progress=progress)
        elif front:
            answer = facade().front(model, **asked, progress=progress)
        elif smallest or step_time is not None:
            found = facade().smallest(model, **asked, progress=progress)
        else:
            found = optimize(model, **asked, **workers, progress=progress)
        if why_not is not None:
            answer = found.why_not(why_not, progress=progress)
        elif explain:
            answer = found.why(progress=progress)
    if answer is not None:
        _show(output, answer.to_json, lambda: answer, out)
    else:
        _show_plan(output, found, out)


@app.command()
def estimate(
    model: Model,
    mesh: Annotated[
        str,
        typer.Option(
            "--mesh",
            metavar="SIZES",
            help="Axis sizes, as pipeline=2,data=4,model=8 (short: pp=2,dp=4,tp=8).",
            show_default=False,
        ),
    ],
    cluster: ClusterOption = None,
    devices: Devices = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    optimizer: OptimizerOption = Optimizer.adamw,
    strategy: StrategyOption = Strategy.auto,
    memory_limit: MemoryLimit = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            "--micro-batch",
            min=1,
            metavar="N",
            help="Samples that a device takes at a time; all of a step's if left out, 1 with a "
            "pipeline.",
        ),
    ] = None,
    recompute: Annotated[
        Recompute, typer.Option("--recompute", help="What backward computes again of each block.")
    ] = Recompute.none,
    schedule: Annotated[
        Order | None, typer.Option("--schedule", help="Order of a pipeline's tasks.")
    ] = None,
    virtual_stages: Annotated[
        int,
        typer.Option("--virtual-stages", min=1, metavar="N", help="Chunks of the model a stage."),
    ] = 1,
    kernels: Annotated[
        Style, typer.Option("--kernels", help="How operators between products are run.")
    ] = Style.eager,
    products: Annotated[
        Products,
        typer.Option("--products", help="What products of blocks with their weights run in."),
    ] = Products.native,
    overlap: Annotated[
        list[Overlapped] | None,
        typer.Option(
            "--overlap", help="Axis whose messages run beside computing; may be repeated."
        ),
    ] = None,
    shard_optimizer: Annotated[
        bool,
        typer.Option("--shard-optimizer", help="The data axis shares the optimizer (ZeRO 1)."),
    ] = False,
    out: Out = None,
    as_json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Say what MODEL costs on a given mesh: step time and memory.

    Ends with status 3 where that does not fit; the figures are shown all the same.
    """
    output = Output(as_json=as_json, no_color=no_color)
    writable(out)
    limit = parse_bytes("--memory-limit", memory_limit)
    with output.progress(f"estimating {model} on mesh {mesh}") as progress:
        found = facade().estimate(
            model,
            mesh=mesh,
            **given(
                cluster=cluster,
                devices=devices,
                global_batch=global_batch,
                seq_len=seq_len,
                dtype=dtype,
                memory_limit_bytes=limit,
                micro_batch=micro_batch,
                schedule=None if schedule is None else schedule.value,
                products=None if products is Products.native else products.value,
                overlapped=[axis.value for axis in overlap] if overlap else None,
            ),
            recompute=recompute.value,
            virtual_stages=virtual_stages,
            kernels=kernels.value,
            shard_optimizer=shard_optimizer,
            optimizer=optimizer.value,
            strategy=strategy.value,
            progress=progress,
        )
    _show_plan(output, found, out)
    if not found.memory.fits:
        output.say("does not fit: see the memory's limit above")
        raise typer.Exit(InfeasibleError.exit_status)


@app.command(short_help="Show the operators of MODEL, their rules and costs.")
def analyze(
    model: Model,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    out: Out = None,
    as_json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Show the operators of MODEL, their sharding rules, FLOPs and bytes."""
    output = Output(as_json=as_json, no_color=no_color)
    writable(out)
    with output.progress(f"analyzing {model}") as progress:
        captured = facade().analyze(
            model,
            **given(global_batch=global_batch, seq_len=seq_len, dtype=dtype),
            progress=progress,
        )
    graph = getattr(captured, "graph", captured)

    def table() -> Any:
        from autoshard.render import graph_table

        return graph_table(graph)

    _show(output, lambda: json.dumps(graph.to_json()), table, out)


@app.command(short_help="Run a plan here and compare it with one device.")
def validate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PLAN", help=f"A plan.json, or a {MODELS}", show_default=False
        ),
    ],
    cluster: ClusterOption = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices", min=1, metavar="N", help="Number of processes; 4 for a model if left out."
        ),
    ] = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    mesh: Mesh = None,
    strategy: Annotated[
        Strategy | None,
        typer.Option("--strategy", help="What to choose from; auto if left out."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="TYPE", help="Floating dtype that numbers are compared in."
        ),
    ] = "float64",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of parameters and inputs.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, metavar="N", help="Steps whose time is measured."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=1, metavar="SECONDS", help="Longest silence of a process."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Start no processes: trace one rank, and compare its collectives alone.",
        ),
    ] = False,
    out: Out = None,
    as_json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Run a plan on processes of this machine and compare it with one device.

    Compared are outputs, loss and gradients, the predicted and the issued collectives, and
    predicted and measured step time and memory. Ends with status 4 where they differ.
    """
    output = Output(as_json=as_json, no_color=no_color)
    writable(out)
    failed: ValidationError | None = None
    with output.progress(f"validating {model}") as progress:
        try:
            report = facade().validate(
                model,
                **given(
                    cluster=cluster,
                    devices=devices,
                    global_batch=global_batch,
                    seq_len=seq_len,
                    mesh=mesh,
                    strategy=None if strategy is None else strategy.value,
                    steps=steps,
                    timeout_s=timeout,
                ),
                dtype=dtype,
                seed=seed,
                dry_run=dry_run,
                progress=progress,
            )
        except ValidationError as error:
            if error.report is None or as_json:
                raise
            failed, report = error, error.report

    def table() -> Any:
        from autoshard.render import validation_table

        return validation_table(report)

    _show(output, lambda: json.dumps(report.to_json()), table, out)
    if failed is not None:
        raise failed


app.command(short_help="Measure this machine, write a cluster file.")(calibrate)
app.command(short_help="Plan, price or measure many points.")(sweep)
app.command(short_help="Show or write the rows of a sweep.")(results)
app.command(short_help="Draw a trace of communication.")(visualize)
app.command(short_help="Write the predicted timeline of a plan.")(trace)
app.command(short_help="Write a plan or a sweep as one HTML page.")(report)
app.command(short_help="Write a plan as another tool's own files.")(export)
app.command("import", short_help="Price another tool's parallelism as a plan.")(import_)
app.command(short_help="Answer plan requests over HTTP, with a page.")(serve)
app.add_typer(keys)


SMALLEST = "--smallest (or --step-time)"
FULL = "--space full"
PLAIN = "--space plain"
KEEP = "--keep (or --free)"
INFERENCE = "--mode prefill (or decode)"

EXCLUDED = (
    ("--server", "--storage", "--storage is of a local search"),
    ("--server", "--what-if", "it is answered here"),
    ("--server", "--why-not", "it is answered here"),
    ("--server", "--explain", "it is answered here"),
    ("--what-if", "--why-not", "these are two questions"),
    ("--what-if", "--explain", "these are two questions"),
    ("--why-not", "--explain", "these are two questions"),
    ("--server", SMALLEST, "it is answered here"),
    (SMALLEST, "--what-if", "these are two questions"),
    (SMALLEST, "--mesh", "a mesh says how many devices there are"),
    (SMALLEST, "--storage", "it is no single search"),
    ("--server", "--front", "it is answered here"),
    ("--front", "--what-if", "these are two questions"),
    ("--front", "--why-not", "these are two questions"),
    ("--front", "--explain", "these are two questions"),
    ("--front", "--measure", "these are two questions"),
    ("--front", SMALLEST, "these are two questions"),
    ("--measure", "--server", "plans are run here"),
    ("--measure", "--what-if", "only the plan itself is run"),
    ("--measure", SMALLEST, "only one number of devices is run"),
    (FULL, "--measure", "plans of the full space cannot be run yet"),
    (FULL, "--server", "the service plans the plain space"),
    (FULL, "--what-if", "it asks of plans in the plain space"),
    (FULL, SMALLEST, "it asks of plans in the plain space"),
    (KEEP, PLAIN, "the plain space has no stages, microbatches or recomputation to keep"),
    (KEEP, "--front", "these are two questions"),
    (INFERENCE, "--server", "the service plans training"),
    (INFERENCE, "--what-if", "it asks of plans for training"),
    (INFERENCE, "--why-not", "it asks of plans for training"),
    (INFERENCE, SMALLEST, "it asks of plans for training"),
)
"""Options of ``plan`` that do not go together, and why."""


def _check_questions(present: dict[str, bool]) -> None:
    for one, other, why in EXCLUDED:
        if present[one] and present[other]:
            raise RequestError(f"{one} and {other} do not go together: {why}; leave out either")


@contextmanager
def _crew(space: Space, explain: bool) -> Iterator[dict[str, Any]]:
    """Processes that search the full space, begun before anything else is loaded.

    An explanation takes up tables that only this process has when it searches alone.
    """
    if space is not Space.full or explain:
        yield {}
        return
    crew = importlib.import_module("autoshard.planner.crew")
    workers = importlib.import_module("autoshard.workers")
    with crew.Crew(workers.cores()) as helpers:
        yield {"workers": helpers}


def _show_plan(output: Output, found: Any, out: Path | None) -> None:
    def table() -> Any:
        from autoshard.render import plan_table

        return plan_table(found)

    _show(output, found.to_json, table, out)


def _show(
    output: Output, document: Callable[[], str], table: Callable[[], Any], out: Path | None
) -> None:
    if out is not None:
        from autoshard.cli.options import write

        write(out, document())
    if output.as_json:
        output.document(document())
    else:
        output.table(table())
    if out is not None:
        output.say(f"written to {out}")


def run(arguments: Sequence[str]) -> int:
    """Run a command line; its exit status."""
    return guarded(app, list(arguments))
