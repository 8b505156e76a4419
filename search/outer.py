"""The outer search: which mesh, and what its axes are for.

A configuration is a strategy (``data``, ``fsdp``, ``tensor``, ``hybrid``, or ``auto``: every
operator decides for itself) and a factorization of the devices into data x model. An Optuna study
holds them: the usual answers are enqueued first, so the result is never predicted slower than any
of them; a space as small as this is then enumerated, unless fewer trials are asked for. Each trial
calls the exact inner search. A configuration is priced once, however often it is proposed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from autoshard.candidates import AxisUse
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, MeshError, RequestError, SpecError, UnknownNameError
from autoshard.graph import ModelGraph
from autoshard.kernels import Style
from autoshard.plan import Alternative, Memory, MeshDocument, StepTime
from autoshard.search.inner import Prepared, Solution, solve
from autoshard.sharding.layout import Cut, Layout, R, Shape, State, canonical, fits

if TYPE_CHECKING:
    from optuna import Study, Trial

Strategy = Literal["auto", "data", "fsdp", "tensor", "hybrid", "data+tensor", "fsdp+tensor"]
STRATEGIES: tuple[Strategy, ...] = ("data", "fsdp", "tensor", "hybrid", "auto")

AXES = ("data", "model")

EXHAUSTIVE = 200
"""Spaces up to this many configurations are enumerated."""

Pins = Mapping[str, Mapping[str, State]]
"""Parameter's dotted name -> its state on each axis by name; ``R`` on axes that are not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a search is.

    Attributes:
        done: configurations that were priced.
        total: how many will be.
        label: what was priced just now.
        best_label: the fastest so far that fits, or None.
        best_step_time_s: its time.
    """

    done: int
    total: int
    label: str
    best_label: str | None
    best_step_time_s: float | None


Progress = Callable[[Standing], None]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One point of the outer space."""

    strategy: Strategy
    axis_names: tuple[str, ...]
    sizes: Shape

    @property
    def text(self) -> str:
        """The mesh as a categorical value: ``4x2``."""
        return "x".join(map(str, self.sizes))

    @property
    def label(self) -> str:
        """``hybrid, data=4, model=2``."""
        mesh = ", ".join(
            f"{n}={s}" for n, s in zip(self.axis_names, self.sizes, strict=True) if s > 1
        )
        return f"{self.strategy}, {mesh}" if mesh else f"{self.strategy}, one device"

    @property
    def uses(self) -> tuple[AxisUse, ...]:
        """What each axis is for."""
        named: dict[str, AxisUse] = {"context": "context", "expert": "expert"}
        only: AxisUse = "any"
        if self.strategy in ("hybrid", "data+tensor", "fsdp+tensor"):
            named["model"] = "tensor"
            storage: dict[str, AxisUse] = {"data+tensor": "data", "fsdp+tensor": "fsdp"}
            only = storage.get(self.strategy, "batch")
        elif self.strategy != "auto":
            only = self.strategy  # type: ignore[assignment]  # named as what the axis is for
        return tuple(named.get(n, only) for n in self.axis_names)

    @property
    def mesh(self) -> MeshDocument:
        """The mesh as a plan has it."""
        return MeshDocument(axis_names=self.axis_names, sizes=self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: the fastest solution that fits.
        configuration: where it was found.
        alternatives: every other configuration that was priced, fastest first, and why it lost.
        priced: the best solution of every configuration that was priced.
        lower_bound_s: nothing in the space that was searched is faster.
        exhaustive: whether the whole space was priced.
        study: the Optuna study, with the figures as user attributes.
    """

    best: Solution
    configuration: Configuration
    alternatives: tuple[Alternative, ...]
    priced: Mapping[Configuration, Solution]
    lower_bound_s: float
    exhaustive: bool
    study: Study


def configurations(
    devices: int,
    strategy: Strategy = "auto",
    mesh: Mapping[str, int] | None = None,
    *,
    devices_per_node: int = 1,
) -> list[Configuration]:
    """The outer space, the usual answers first.

    Inside one node all places are alike, so there an ``auto`` mesh and its mirror image are one.

    Raises:
        UnknownNameError: no such strategy.
        MeshError: a mesh that does not have ``devices`` devices.
    """
    if strategy not in STRATEGIES:
        raise UnknownNameError("strategy", strategy, STRATEGIES)
    if mesh is not None:
        _check_mesh(mesh, devices)
        names, sizes = tuple(mesh), tuple(mesh.values())
        kinds: Iterable[Strategy] = (strategy,) if strategy != "auto" else STRATEGIES
        if strategy == "auto" and sum(s > 1 for s in sizes) < 2:
            kinds = ("data", "fsdp", "tensor", "auto")
        return [Configuration(k, names, sizes) for k in kinds]
    if devices == 1 and strategy == "auto":
        return [Configuration("auto", AXES, (1, 1))]
    out: list[Configuration] = []
    pairs = [(devices // m, m) for m in range(1, devices + 1) if devices % m == 0]
    inner = [p for p in pairs if p[0] > 1 and p[1] > 1]
    wanted = STRATEGIES if strategy == "auto" else (strategy,)
    for kind in wanted:
        if kind in ("data", "fsdp"):
            out.append(Configuration(kind, AXES, (devices, 1)))
        elif kind == "tensor":
            out.append(Configuration(kind, AXES, (1, devices)))
        elif kind == "hybrid":
            out += [Configuration(kind, AXES, p) for p in inner]
            if not inner and strategy == "hybrid":
                out.append(Configuration(kind, AXES, pairs[0]))
        else:
            out.append(Configuration(kind, AXES, (devices, 1)))
            alike = devices <= devices_per_node
            out += [Configuration(kind, AXES, p) for p in inner if p[0] >= p[1] or not alike]
    return out


def _check_mesh(mesh: Mapping[str, int], devices: int) -> None:
    for name, size in mesh.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MeshError(f"mesh axis {name!r} has size {size!r}; sizes are whole numbers from 1")
    if prod(mesh.values()) != devices:
        text = ", ".join(f"{n}={s}" for n, s in mesh.items()) or "without axes"
        raise MeshError(
            f"mesh {text} has {prod(mesh.values())} devices, the cluster has {devices}; "
            "their numbers must agree"
        )


def search(
    graph: ModelGraph,
    cluster: Cluster,
    devices: int | None = None,
    *,
    optimizer: str = "adamw",
    strategy: Strategy = "auto",
    mesh: Mapping[str, int] | None = None,
    memory_limit: int | None = None,
    pins: Pins | None = None,
    trials: int | None = None,
    seed: int = 0,
    storage: str | None = None,
    progress: Progress | None = None,
    style: Style = "eager",
) -> SearchResult:
    """The fastest way to shard ``graph`` over ``devices`` of ``cluster``.

    Args:
        graph: what is computed.
        cluster: what it runs on.
        devices: how many devices; default: all of the cluster.
        optimizer: see ``search.memory.OPTIMIZERS``.
        strategy: what to force, or ``auto``.
        mesh: axis sizes by name to force; default: all factorizations into data x model.
        memory_limit: bytes of a device that may be used; default: all it has.
        pins: stored layouts that some parameters must have.
        trials: at most so many configurations; default: all, or 100 where there are many.
        seed: of the sampler; the same seed gives the same plan.
        storage: URL of an Optuna storage; default: in memory.
        progress: is told of every configuration that was priced.
        style: how operators between products are run.

    Raises:
        InfeasibleError: nothing fits; names what binds.
    """
    if trials is not None and trials < 1:
        raise RequestError(f"trials must be at least 1, found {trials}")
    cluster = cluster if devices is None else cluster.with_devices(devices)
    limit = cluster.device.memory_bytes if memory_limit is None else memory_limit
    space = configurations(
        cluster.devices, strategy, mesh, devices_per_node=cluster.devices_per_node
    )
    run = _Outer(graph, cluster, optimizer, limit, pins or {}, style)
    study = run.study(space, trials, seed, storage, progress)
    fitting = {c: s for c, s in run.priced.items() if s.fits}
    if not fitting:
        raise _infeasible(run, strategy, mesh)
    best = min(fitting, key=lambda c: (fitting[c].step_time.total_s, space.index(c)))
    exhaustive = len(run.priced) == len(space)
    return SearchResult(
        best=fitting[best],
        configuration=best,
        alternatives=alternatives(run.priced, best),
        priced=run.priced,
        lower_bound_s=min(s.lower_bound_s for s in run.priced.values()),
        exhaustive=exhaustive,
        study=study,
    )


class _Outer:
    def __init__(
        self,
        graph: ModelGraph,
        cluster: Cluster,
        optimizer: str,
        limit: int,
        pins: Pins,
        style: Style,
    ) -> None:
        self.graph, self.cluster, self.optimizer = graph, cluster, optimizer
        self.style: Style = style
        self.limit, self.pins = limit, pins
        self.prepared = Prepared(graph)
        self.priced: dict[Configuration, Solution] = {}
        check_pins(graph, pins)

    def price(self, configuration: Configuration) -> Solution:
        """The inner search's answer, remembered."""
        if configuration not in self.priced:
            self.priced[configuration] = solve(
                self.graph,
                self.cluster,
                configuration.sizes,
                configuration.axis_names,
                configuration.uses,
                optimizer=self.optimizer,
                memory_limit=self.limit,
                pins=pinned(configuration, self.pins),
                prepared=self.prepared,
                style=self.style,
            )
        return self.priced[configuration]

    def study(
        self,
        space: Sequence[Configuration],
        trials: int | None,
        seed: int,
        storage: str | None,
        progress: Progress | None,
    ) -> Study:
        """Price the space, as an Optuna study."""
        import optuna

        first = considered(space, trials)
        total = len(first)
        place: dict[tuple[str, str], Configuration] = {(c.strategy, c.text): c for c in space}
        meshes: dict[str, list[str]] = {}
        for c in space:
            meshes.setdefault(c.strategy, []).append(c.text)
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            study = optuna.create_study(
                direction="minimize",
                sampler=optuna.samplers.TPESampler(seed=seed),
                storage=storage,
                study_name=self._name(space) if storage else None,
                load_if_exists=True,
            )
            for c in first:
                study.enqueue_trial({"strategy": c.strategy, f"mesh_{c.strategy}": c.text})
            attempts = 0
            while len(self.priced) < total and attempts < 4 * total:
                attempts += 1
                trial = study.ask()
                strategy = trial.suggest_categorical("strategy", list(meshes))
                text = trial.suggest_categorical(f"mesh_{strategy}", meshes[strategy])
                found = place[strategy, text]
                solution = self.price(found)
                _record(trial, found, solution)
                study.tell(trial, solution.step_time.total_s)
                if progress is not None:
                    progress(self.standing(total, found))
        finally:
            optuna.logging.set_verbosity(verbosity)
        return study

    def standing(self, total: int, found: Configuration) -> Standing:
        """How far the search is, now that ``found`` is priced."""
        fitting = {c: s.step_time.total_s for c, s in self.priced.items() if s.fits}
        best = min(fitting, key=lambda c: fitting[c], default=None)
        return Standing(
            done=len(self.priced),
            total=total,
            label=found.label,
            best_label=None if best is None else best.label,
            best_step_time_s=None if best is None else fitting[best],
        )

    def _name(self, space: Sequence[Configuration]) -> str:
        """Name in a storage: searches of the same space for the same thing share a study."""
        asked = [*(c.label for c in space), self.optimizer, str(self.limit), repr(self.pins)]
        asked += [self.style] if self.style != "eager" else []
        digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]
        where = f"{self.cluster.devices} {self.cluster.name}"
        return f"{self.graph.name} {self.graph.fingerprint} on {where}, {self.optimizer}, {digest}"


def considered(space: Sequence[Configuration], trials: int | None) -> Sequence[Configuration]:
    """The configurations that are priced first, or alone where the space is small."""
    return space[: trials or (len(space) if len(space) <= EXHAUSTIVE else 100)]


def pinned(configuration: Configuration, pins: Pins) -> dict[str, Layout]:
    """The layouts that ``pins`` ask for on the axes larger than 1 of a configuration's mesh."""
    mesh = [
        (n, s) for n, s in zip(configuration.axis_names, configuration.sizes, strict=True) if s > 1
    ]
    out: dict[str, Layout] = {}
    for name, states in pins.items():
        row: list[State] = []
        for axis, size in mesh:
            state = states.get(axis, R)
            row.append(canonical(state, size) if isinstance(state, Cut) else state)
        out[name] = tuple(row)
    return out


def check_pins(graph: ModelGraph, pins: Pins) -> None:
    """Refuse layouts that their parameters cannot be stored in.

    Raises:
        UnknownNameError: no such parameter.
        SpecError: a layout that does not fit its shape, or a partial one.
    """
    for name, states in pins.items():
        _check_pin(graph, name, states)


def _check_pin(graph: ModelGraph, name: str, states: Mapping[str, State]) -> None:
    if name not in graph.parameters:
        raise UnknownNameError("parameter", name, graph.parameters)
    shape = graph.parameters[name].shape
    for axis, state in states.items():
        if isinstance(state, Cut) and not fits(state, shape):
            raise SpecError(
                f"parameter {name} of shape {list(shape)} cannot be {state!r} on axis {axis!r}: "
                f"(outer, n) = ({state.outer}, {state.n}) must divide an existing dim"
            )
        if not isinstance(state, Cut) and state is not R:
            raise SpecError(
                f"parameter {name} cannot be stored as {state!r} on axis {axis!r}; "
                "a stored value is R or cut"
            )


def _record(trial: Trial, configuration: Configuration, solution: Solution) -> None:
    memory, step = solution.memory, solution.step_time
    trial.set_user_attr("label", configuration.label)
    trial.set_user_attr("mesh", solution.mesh)
    trial.set_user_attr("step_time", step.model_dump())
    trial.set_user_attr("memory", memory.model_dump())
    trial.set_user_attr("memory_bytes", memory.total_bytes)
    trial.set_user_attr("lower_bound_s", solution.lower_bound_s)
    if memory.limit_bytes is not None:
        over = (memory.total_bytes - memory.limit_bytes) / max(1, memory.limit_bytes)
        trial.set_constraint("memory over the limit", over)


def alternatives(
    priced: Mapping[Configuration, Solution], best: Configuration
) -> tuple[Alternative, ...]:
    """Every configuration but ``best``, the fastest that fits first, and why it lost to it."""
    order = sorted(
        (c for c in priced if c != best),
        key=lambda c: (not priced[c].fits, priced[c].step_time.total_s),
    )
    return tuple(
        Alternative(
            label=c.label,
            mesh=c.mesh,
            step_time_s=priced[c].step_time.total_s,
            memory_bytes=priced[c].memory.total_bytes,
            fits=priced[c].fits,
            why=why(priced[c].step_time, priced[c].memory, priced[best].step_time),
        )
        for c in order
    )


def why(mine: StepTime, memory: Memory, other: StepTime) -> str:
    """Why a configuration lost against the ``other`` one, in words."""
    if not memory.fits:
        return f"does not fit: {binding(memory)}"
    return slower_by(mine, other)


def slower_by(mine: StepTime, other: StepTime) -> str:
    """How much slower ``mine`` is, and which part takes most of that, in words."""
    ratio = mine.total_s / other.total_s
    if ratio < 1.0005:
        return "as fast as the plan, to four digits"
    parts = {
        "messages that nothing hides": mine.exposed_communication_s - other.exposed_communication_s,
        "computing": mine.compute_s - other.compute_s,
        "the optimizer's update": mine.optimizer_s - other.optimizer_s,
        "waiting for other stages": mine.waiting_s - other.waiting_s,
    }
    most = max(parts, key=lambda k: parts[k])
    slower = f"{100 * (ratio - 1):.2g}% slower" if ratio < 1.1 else f"{ratio:.2f} times as slow"
    return f"{slower}: {_figure(parts[most] * 1e3)} ms more for {most}"


def _infeasible(run: _Outer, strategy: Strategy, mesh: Mapping[str, int] | None) -> InfeasibleError:
    closest = min(run.priced.values(), key=lambda s: s.memory.total_bytes)
    forced = f"strategy {strategy}" if strategy != "auto" else "any strategy"
    where = ", ".join(f"{n}={s}" for n, s in mesh.items()) if mesh else "any mesh"
    return InfeasibleError(
        f"{run.graph.name} (global batch {run.graph.batch}, {run.optimizer}) does not fit on "
        f"{run.cluster.devices} devices of {run.cluster.name} with {forced} on {where}",
        binding=binding(closest.memory),
    )


def _figure(value: float, digits: int = 3) -> str:
    """A number with few digits, and no exponent where it is large."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.{digits}g}"


def binding(memory: Memory) -> str:
    """What fills the memory and by how much it is over, in words."""
    categories = {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "KV cache": memory.kv_cache_bytes,
        "gathered parameters": memory.gathered_bytes,
        "temporaries": memory.temporary_bytes,
        "reserve": memory.reserve_bytes,
    }
    order = sorted(categories, key=lambda k: -categories[k])
    limit = memory.limit_bytes or 0
    over = memory.total_bytes - limit
    rest = ", ".join(f"{k} {_figure(categories[k] / 1e9)} GB" for k in order[1:4] if categories[k])
    return (
        f"{_fullest(memory)}{order[0]} {_figure(categories[order[0]] / 1e9)} GB (then {rest}); "
        f"{_figure(memory.total_bytes / 1e9, 4)} GB of {_figure(limit / 1e9, 4)} GB, "
        f"{_figure(over / 1e9)} GB too much{_other_stages(memory)}"
    )


def _fullest(memory: Memory) -> str:
    """Which stage the figures are of, where there are several."""
    sizes = [stage.allocated_bytes for stage in memory.stages]
    return f"on stage {sizes.index(max(sizes))} of {len(sizes)}: " if sizes else ""


def _other_stages(memory: Memory) -> str:
    """How many of the other stages are over the limit, and by how much the next one is."""
    limit = (memory.limit_bytes or 0) - memory.reserve_bytes
    over = sorted((stage.allocated_bytes - limit for stage in memory.stages), reverse=True)[1:]
    too_full = [size for size in over if size > 0]
    if not memory.stages:
        return ""
    if not too_full:
        return "; the other stages fit"
    return (
        f"; {len(too_full)} of the {len(over)} other stages too, by up to "
        f"{_figure(too_full[0] / 1e9)} GB"
    )
