"""``from_export``: another tool's document, priced as a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.cluster import Cluster
from autoshard.errors import RequestError, UnknownNameError
from autoshard.exports import read
from autoshard.exports.reading import listed
from autoshard.imports import FORMATS, Demand, Foreign, demand, huggingface, megatron
from autoshard.planner.capture import source_of
from autoshard.planner.plan import Plan
from autoshard.planner.planning import Request, price
from autoshard.planner.progress import reporter
from autoshard.planner.request import check_sizes, resolve_cluster

if TYPE_CHECKING:
    from torch import nn

    from autoshard.analyzer import Captured


def from_export(
    document: str | Path | Mapping[str, Any],
    format: str,
    model: nn.Module | str | Path | Mapping[str, Any],
    example_inputs: object | None = None,
    *,
    cluster: Cluster | str | Mapping[str, Any] | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    memory_limit_bytes: int | None = None,
    seed: int = 0,
    progress: bool | Callable[[str], None] | None = True,
) -> Plan:
    """What another tool's parallelism costs: the fastest plan that stores parameters as it does.

    Args:
        document: ``hf``: a ``DistributedConfig`` or a ``tp_plan``, as JSON or a dict;
            ``megatron``: flags. Text, or a file.
        format: ``hf`` or ``megatron``.
        model: as of :func:`autoshard.optimize`.
        example_inputs: of one global batch.
        cluster: what it is to run on.
        devices: how many; None: what the document says, else the cluster's own number.
        global_batch: samples of one step; None: what the document says.
        seq_len: tokens of a sample; None: what the document says.
        dtype: None: what the document says.
        optimizer: None: what the document says, else ``adamw``.
        memory_limit_bytes: of one device; None: what the cluster says.
        seed: noted in the plan.
        progress: see :func:`autoshard.optimize`.

    The plan is returned even where it does not fit; what is priced otherwise than the tool does it
    is among ``plan.warnings``.

    Raises:
        RequestError: the document cannot be read, or does not fit the model or the devices.
        ExportUnsupported: it asks for what this version does not plan; names each.
    """
    say = reporter(progress)
    check_sizes(devices=devices, global_batch=global_batch, seq_len=seq_len)
    foreign, found = _parse(document, format, cluster, devices)
    inputs_given = example_inputs is not None
    request = Request.read(
        found,
        None,
        optimizer or foreign.optimizer or "adamw",
        _strategy(foreign),
        None,
        memory_limit_bytes,
        None,
        say,
    )
    length = seq_len if seq_len is not None or inputs_given else foreign.seq_len
    captured = request.capture(
        model,
        example_inputs,
        global_batch if global_batch is not None or inputs_given else foreign.global_batch,
        length,
        dtype or foreign.dtype,
    )
    wanted = demand(_with_model_rules(foreign, captured), captured.graph)
    request = request.on_mesh(dict(zip(("data", "model"), wanted.sizes, strict=True)))
    plan = price(
        request,
        captured,
        wanted.uses,
        wanted.pins,
        memory_limit_bytes=memory_limit_bytes,
        seed=seed,
        source=source_of(model),
        seq_len=length,
    )
    notes = (*foreign.notes, *_unlike(plan, wanted, format))
    noted = plan.model_copy(update={"warnings": (*plan.warnings, *notes)})
    return noted.attach(captured)


def _parse(
    document: str | Path | Mapping[str, Any],
    format: str,
    cluster: Cluster | str | Mapping[str, Any] | None,
    devices: int | None,
) -> tuple[Foreign, Cluster]:
    """The document, and the cluster with as many devices as it says."""
    if format not in FORMATS:
        raise UnknownNameError("format", format, FORMATS)
    text = _text(document)
    if format == "hf":
        foreign = huggingface.parse(text, devices)
        count = devices if devices is not None else foreign.devices
        return foreign, resolve_cluster(cluster, count)[0]
    if not isinstance(text, str):
        raise RequestError("Megatron-LM's flags are text or a file")
    found, _ = resolve_cluster(cluster, devices)
    return megatron.parse(text, found.devices), found


def _text(document: str | Path | Mapping[str, Any]) -> str | Mapping[str, Any]:
    if isinstance(document, Mapping):
        return document
    if isinstance(document, str) and ("\n" in document or document.lstrip()[:1] in ("{", "-")):
        return document
    try:
        return Path(document).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {document}: {error.strerror}") from error


def _strategy(foreign: Foreign) -> str:
    if foreign.tensor > 1:
        return "hybrid" if foreign.devices > foreign.tensor else "tensor"
    return "fsdp" if foreign.shard > 1 else "data"


def _with_model_rules(foreign: Foreign, captured: Captured) -> Foreign:
    """The rules that the model brings itself, overridden by the document's."""
    from dataclasses import replace

    own = getattr(captured.module, "tp_plan", None)
    if not (foreign.model_rules and foreign.tensor > 1 and isinstance(own, dict)):
        return foreign
    rules = {rule: huggingface.cutting(rule, str(style)) for rule, style in own.items()}
    return replace(foreign, rules=rules | dict(foreign.rules))


def _unlike(plan: Plan, wanted: Demand, format: str) -> list[str]:
    """What is said where the fastest program uses a weight otherwise than the tool."""
    if not wanted.cuttings:
        return []
    used = {w.module: w.style for w in read(plan, plan.program()).weights}
    odd = [m for m, c in wanted.cuttings.items() if m in used and used[m] != c.style]
    if not odd:
        return []
    return [f"{format}: stored as it says, but computed otherwise, as is faster: {listed(odd)}"]
