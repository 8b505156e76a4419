"""What the best plan would be if the cluster or the request were other than they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.answers import Outcome, WhatIfDocument
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, RequestError
from autoshard.planner.changes import Asked, changed
from autoshard.planner.planning import Request, optimize
from autoshard.planner.progress import reporter
from autoshard.planner.request import resolve_cluster
from autoshard.render import render_text, what_if_table
from autoshard.search import length_of

if TYPE_CHECKING:
    from torch import nn

    from autoshard.analyzer import Captured
    from autoshard.planner.plan import Plan


class WhatIf(WhatIfDocument):
    """See :class:`autoshard.answers.WhatIfDocument`."""

    def __str__(self) -> str:
        """As a table."""
        return render_text(what_if_table(self))

    def __rich__(self) -> Any:
        """As a table, for ``rich.print``."""
        return what_if_table(self)


def what_if(
    model: nn.Module | str | Path | Mapping[str, Any],
    changes: str | Sequence[str],
    example_inputs: object | None = None,
    *,
    cluster: Cluster | str | Mapping[str, Any] | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    captured: Captured | None = None,
    progress: bool | Callable[[str], None] | None = True,
    **options: Any,
) -> WhatIf:
    """The best plan as it is, and with each of some changes.

    Args:
        model: see :func:`autoshard.optimize`, as for all that is not explained here.
        changes: one, or several to compare. Each is one or more of
            ``link=2x`` (or of one tier: ``link.node=2x``), ``latency``, ``memory``,
            ``memory-bandwidth``, ``peak``, ``nodes=+1``, ``devices=16``, ``global-batch``,
            ``seq-len``, ``dtype``, ``optimizer``, ``strategy``, separated by commas; those of one
            text apply together.
        example_inputs: see there.
        cluster: see there.
        devices: see there.
        global_batch: see there; it stays as it is when the devices change.
        seq_len: see there.
        dtype: see there.
        captured: see there.
        progress: see there.
        options: anything else that :func:`autoshard.optimize` takes.

    Raises:
        RequestError: the request or a change is wrong; says what there is.
    """
    say = reporter(progress)
    found, _ = resolve_cluster(cluster, devices)
    request = Request.read(
        found,
        None,
        options.get("optimizer", "adamw"),
        options.get("strategy", "auto"),
        options.get("mesh"),
        options.get("memory_limit_bytes"),
        options.get("trials"),
        say,
    )
    captured = captured or request.capture(model, example_inputs, global_batch, seq_len, dtype)
    batch, length = captured.graph.batch, length_of(captured.graph)
    sizes = {"global_batch": batch, "seq_len": seq_len, "dtype": dtype}
    base = Asked(found, {**sizes, **options})
    texts = [changes] if isinstance(changes, str) else list(changes)
    # All are read before the first is planned.
    rows = [("", base), *((t, changed(t, base, batch, length)) for t in texts)]
    if example_inputs is not None and any(asked.rebuilds for _, asked in rows):
        raise RequestError("example_inputs fix the batch, the length and the dtype: leave them out")
    outcomes: list[Outcome] = []
    for text, asked in rows:
        say(f"planning {text or 'as it is'}")
        samples = asked.options["global_batch"]
        tokens = samples * (asked.options["seq_len"] or length or 1)
        outcome = _outcome(model, text, asked, None if asked.rebuilds else captured, say)
        first = outcomes[0] if outcomes else outcome
        gain = None
        if outcome.step_time_s and first.step_time_s:
            rate = first.step_time_s / (batch * (length or 1))
            gain = tokens / outcome.step_time_s * rate
        outcomes.append(outcome.model_copy(update={"gain": gain}))
    return WhatIf(model=captured.graph.name, cluster=found.name, outcomes=tuple(outcomes))


def _outcome(
    model: nn.Module | str | Path | Mapping[str, Any],
    text: str,
    asked: Asked,
    captured: Captured | None,
    say: Callable[[str], None],
) -> Outcome:
    options = dict(asked.options)
    limit = options.get("memory_limit_bytes") or asked.cluster.device.memory_bytes
    try:
        plan: Plan = optimize(
            model,
            cluster=asked.cluster,
            captured=captured,
            suggest=False,
            progress=say,
            **options,
        )
    except InfeasibleError as error:
        return Outcome(
            change=text,
            devices=asked.cluster.devices,
            limit_bytes=limit,
            binding=error.binding,
        )
    return Outcome(
        change=text,
        devices=asked.cluster.devices,
        label=plan.label,
        mesh=plan.mesh,
        step_time_s=plan.predicted_step_s,
        samples_per_second=plan.global_batch / plan.predicted_step_s,
        memory_bytes=plan.memory.total_bytes,
        limit_bytes=limit,
    )
