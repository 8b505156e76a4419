"""The fewest devices on which a model fits, or reaches a step time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, RequestError
from autoshard.planner.planning import Constraints, Request, optimize, resolve_pins
from autoshard.planner.progress import reporter
from autoshard.planner.request import resolve_cluster
from autoshard.render.units import seconds_text
from autoshard.search import Asked, Feasible, Prepared, binding
from autoshard.search.ladder import devices_at, first, place_of

if TYPE_CHECKING:
    from torch import nn

    from autoshard.analyzer import Captured
    from autoshard.planner.plan import Plan

MOST_DEVICES = 16_384
"""Devices up to which is searched where neither the request nor the links say less."""

PATIENCE = 2
"""Larger clusters in a row that are no faster before a step time counts as out of reach."""


def smallest(
    model: nn.Module | str | Path | Mapping[str, Any],
    example_inputs: object | None = None,
    *,
    step_time_s: float | None = None,
    cluster: Cluster | str | Mapping[str, Any] | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    strategy: str = "auto",
    constraints: Constraints = None,
    memory_limit_bytes: int | None = None,
    trials: int | None = None,
    seed: int = 0,
    captured: Captured | None = None,
    progress: bool | Callable[[str], None] | None = True,
) -> Plan:
    """The best plan on the fewest devices on which there is one.

    The batch is the same on any number of devices. Numbers that a cluster can have are tried: 1 to
    a node, then whole nodes. The plan's last assumption says why the next smaller number is not
    enough.

    Args:
        model: see :func:`autoshard.optimize`, as for all that is not explained here.
        example_inputs: see there.
        step_time_s: seconds that a step may take; None: any.
        cluster: whose kind of devices and links.
        devices: most devices; None: what the links allow, at most 16,384.
        global_batch: see there.
        seq_len: see there.
        dtype: see there.
        optimizer: see there.
        strategy: see there.
        constraints: see there.
        memory_limit_bytes: see there.
        trials: see there.
        seed: see there.
        captured: see there.
        progress: see there.

    Raises:
        RequestError: the request is wrong.
        InfeasibleError: no number of devices is enough; says how near the best one comes.
    """
    say = reporter(progress)
    if step_time_s is not None and not step_time_s > 0:
        raise RequestError(f"a step time is above 0 seconds, found {step_time_s!r}")
    whole, _ = resolve_cluster(cluster, devices)
    if whole.device.kind == "cpu":
        raise RequestError(
            f"the devices of {whole.name} share one machine, so more of them bring nothing; name "
            "a cluster (h100, a100-80, ...)"
        )
    request = Request.read(whole, None, optimizer, strategy, None, memory_limit_bytes, trials, say)
    captured = captured or request.capture(model, example_inputs, global_batch, seq_len, dtype)
    graph = captured.graph
    prepared, pins = Prepared(graph), resolve_pins(constraints, graph)
    plans: dict[int, Plan] = {}
    per_node = whole.devices_per_node
    most = devices or min(MOST_DEVICES, whole.across.devices or MOST_DEVICES)

    def feasible(count: int) -> Feasible:
        return Feasible(
            Asked(
                graph=graph,
                cluster=whole.with_devices(count),
                optimizer=optimizer,
                strategy=strategy,  # type: ignore[arg-type]  # checked by the request
                memory_limit=memory_limit_bytes,
                pins=pins,
                trials=trials,
                prepared=prepared,
            )
        )

    def planned(count: int) -> Plan:
        if count not in plans:
            plans[count] = optimize(
                model,
                cluster=whole.with_devices(count),
                seq_len=seq_len,
                optimizer=optimizer,
                strategy=strategy,
                constraints=constraints,
                memory_limit_bytes=memory_limit_bytes,
                trials=trials,
                seed=seed,
                captured=captured,
                suggest=False,
                progress=say,
            )
        return plans[count]

    def is_enough(place: int) -> bool:
        count = devices_at(place, per_node)
        say(f"trying {count} devices")
        if not feasible(count).fits():
            return False
        if step_time_s is None:
            return True
        seconds = planned(count).predicted_step_s
        if seconds > step_time_s and _is_slowing(plans):
            raise _OutOfReach
        return seconds <= step_time_s

    place: int | None
    try:
        place = first(1, place_of(most, per_node), is_enough)
    except _OutOfReach:
        place = None
    if place is None:
        raise _infeasible(graph.name, whole, most, step_time_s, plans, feasible)
    found = planned(devices_at(place, per_node))
    why = f"devices: {found.devices} are the fewest that {_goal(step_time_s)}"
    if place > 1:
        less = devices_at(place - 1, per_node)
        why += f"; on {less} " + (
            f"the best plan takes {seconds_text(plans[less].predicted_step_s)}"
            if less in plans
            else f"it does not fit: {binding(_needed(feasible(less)))}"
        )
    plan = found.model_copy(update={"assumptions": (*found.assumptions, why)})
    return plan.attach(captured)


class _OutOfReach(Exception):
    """More devices do not help."""


def _is_slowing(plans: Mapping[int, Plan]) -> bool:
    """Whether the largest clusters that were planned are no faster than a smaller one."""
    times = [plans[n].predicted_step_s for n in sorted(plans)]
    return len(times) > PATIENCE and min(times[:-PATIENCE]) <= min(times[-PATIENCE:])


def _goal(step_time_s: float | None) -> str:
    return "fit" if step_time_s is None else f"take at most {seconds_text(step_time_s)} a step"


def _needed(feasible: Feasible) -> Any:
    limit = feasible.asked.limit
    return feasible.least.memory.model_copy(update={"limit_bytes": limit})


def _infeasible(
    name: str,
    cluster: Cluster,
    most: int,
    step_time_s: float | None,
    plans: Mapping[int, Plan],
    feasible: Callable[[int], Feasible],
) -> InfeasibleError:
    if not plans:
        return InfeasibleError(
            f"{name} does not fit on up to {most} devices of {cluster.name}",
            binding=binding(_needed(feasible(most))),
        )
    best = min(plans.values(), key=lambda p: p.predicted_step_s)
    fastest = seconds_text(best.predicted_step_s)
    return InfeasibleError(
        f"{name} does not {_goal(step_time_s)} on any number of devices of {cluster.name} that "
        f"was tried, up to {max(plans)}",
        binding=f"the fastest is {fastest}, on {best.devices} devices: {best.label}",
        nearest=(f"step time {best.predicted_step_s:.4g} s",),
    )
