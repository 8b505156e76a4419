"""Step time against memory: the plans than which none is both faster and smaller."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.answers import FrontDocument, FrontPoint
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, RequestError, UnknownNameError
from autoshard.planner.planning import Constraints, Request, resolve_pins
from autoshard.planner.progress import reporter
from autoshard.planner.request import check_sizes, resolve_dtype
from autoshard.render import front_table, render_text
from autoshard.search import Asked
from autoshard.search.front import FullSpace, PlainSpace, Point, Space, sampled, sweep
from autoshard.search.sampler import SAMPLERS

if TYPE_CHECKING:
    from torch import nn


SPACING = 0.02
"""Share of the memory that neighbours on the front differ by, at least."""


class Front(FrontDocument):
    """See :class:`autoshard.answers.FrontDocument`."""

    def __str__(self) -> str:
        """As a table."""
        return render_text(front_table(self))

    def __rich__(self) -> Any:
        """As a table, for ``rich.print``."""
        return front_table(self)


def front(
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
    sampler: str = "bound",
    kernels: str = "eager",
    products: str = "native",
    overlapped: str | Sequence[str] = (),
    spacing: float = SPACING,
    progress: bool | Callable[[str], None] | None = True,
) -> Front:
    """The front of step time and memory; arguments as :func:`autoshard.optimize`.

    Args:
        model: see there, as for all that is not explained here.
        example_inputs: see there.
        cluster: see there.
        devices: see there.
        global_batch: see there.
        seq_len: see there.
        dtype: see there.
        optimizer: see there.
        strategy: see there.
        mesh: see there.
        constraints: see there.
        memory_limit_bytes: see there; no point takes more.
        trials: of a sampler; None: 100.
        seed: of a sampler.
        storage: of a sampler.
        space: see there.
        axes: see there.
        within: see there.
        recompute: see there.
        schedule: see there.
        sampler: ``bound``: the limit of memory is swept, and each point is the search's own
            answer; or an Optuna study of two objectives: ``nsga`` (NSGA-II), ``tpe``, ``gp``,
            ``random``.
        kernels: see there.
        products: see there.
        overlapped: see there.
        spacing: share of a point's memory that the next one saves at least.
        progress: see there.

    Raises:
        RequestError: the request is wrong.
        InfeasibleError: nothing fits.
    """
    say = reporter(progress)
    if sampler not in SAMPLERS:
        raise UnknownNameError("sampler", sampler, SAMPLERS)
    if not 0 < spacing < 1:
        raise RequestError(f"spacing is a share between 0 and 1, found {spacing!r}")
    if sampler == "bound" and (storage is not None or trials is not None):
        raise RequestError("storage and trials of a front are a sampler's: name one, as nsga")
    check_sizes(trials=trials)
    request = Request.read(
        cluster, devices, optimizer, strategy, mesh, memory_limit_bytes, None, say
    )
    searched: Space
    if space == "full":
        from autoshard.planner.whole import asked_of

        asked = asked_of(
            request,
            model,
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
            kernels=kernels,
            products=products,
            overlapped=overlapped,
        )
        searched = FullSpace(asked.points(), asked.problems())
        name = asked.family.growth.one.name
    else:
        from autoshard.planner.planning import check_plain

        check_plain(
            space, axes, within, recompute, schedule, "bound", kernels, products, overlapped
        )
        captured = request.capture(model, example_inputs, global_batch, seq_len, dtype)
        searched = PlainSpace(
            Asked(
                graph=captured.graph,
                cluster=request.cluster,
                optimizer=optimizer,
                strategy=strategy,  # type: ignore[arg-type]  # checked by the request
                mesh=request.forced,
                memory_limit=memory_limit_bytes,
                pins=resolve_pins(constraints, captured.graph),
            )
        )
        name = captured.graph.name

    def told(limit: int) -> Point | None:
        say(f"the fastest within {limit / 1e9:,.4g} GB")
        return searched.best(limit)

    points = (
        sweep(told, searched.limit, spacing)
        if sampler == "bound"
        else sampled(
            searched,
            sampler=sampler,
            trials=trials,
            seed=seed,
            storage=storage,
            name=_study_name(name, request, searched),
        )
    )
    where = f"{request.cluster.devices} devices of {request.cluster.name}"
    if not points:
        raise InfeasibleError(
            f"{name} does not fit on {where}, or no trial found what does; autoshard plan without "
            "a front says what would fit"
        )
    return Front(
        model=name,
        cluster=where,
        limit_bytes=searched.limit,
        spacing=spacing if sampler == "bound" else None,
        points=tuple(
            FrontPoint(
                label=p.label,
                mesh=p.mesh,
                step_time_s=p.step_time.total_s,
                memory_bytes=p.memory.total_bytes,
            )
            for p in points
        ),
    )


def _study_name(name: str, request: Request, space: Space) -> str:
    asked = [str(key) for key in space.candidates] + [request.optimizer, str(space.limit)]
    asked.append(json.dumps(request.cluster.to_json()))
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]
    return f"{name} on {request.cluster.devices} {request.cluster.name}, front, {digest}"
