"""From the body of ``POST /v1/sweeps`` to the requests of its points.

The points are made as ``autoshard sweep`` makes them of its file. Before that is done, all of it is
measured: a short body could stand for more points than there is memory. And whatever the file's
reader would open or import (paths, factories) is refused: it sees names of presets and documents.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any, cast

from autoshard.api.limits import check_around, checked_cluster, checked_model
from autoshard.api.presets import cluster_preset, model_preset
from autoshard.api.problems import Fault, Invalid, TooLarge, pointer
from autoshard.api.reading import validated
from autoshard.api.settings import Limits
from autoshard.api.store import Asked
from autoshard.api.sweeps.wire import TAGS, ConfigEntry, ModelEntry, SweepRequest
from autoshard.api.wire import (
    VERSION,
    ConfigModel,
    GraphModel,
    Kind,
    ModelSpec,
    PlanRequest,
    PresetCluster,
    PresetModel,
    Search,
    Workload,
    digest,
    dumped,
)
from autoshard.cluster import Cluster
from autoshard.errors import RequestError, UnknownNameError
from autoshard.planner.request import DTYPES, read_mesh
from autoshard.sweeps import Point, read_sweep
from autoshard.sweeps.config import PARAMETERS
from autoshard.sweeps.resolve import EVERY

VALUES_PER_POINT = 20
"""A body has no more values than so many for each point of the largest sweep."""

MOST_BYTES = 64 * 2**20
"""Memory for the requests of all points together: each holds its model's documents."""

MEASURING = {
    "measure": "a measured point runs on the processes of the machine that is asked, here the "
    "server's; leave it out, or call `autoshard sweep` on the machine in question",
    "steps": "belongs to 'measure', which the service does not do; leave it out",
}
SHORT_DTYPES = {long: short for short, long in DTYPES.items() if short != long}
_AT = re.compile(r"the sweep: (points|exclude)\[(\d+)\]:? ?")


@dataclass(frozen=True, slots=True)
class Reading:
    """A sweep that was read."""

    name: str
    description: str
    notes: tuple[str, ...]
    points: tuple[Asked, ...]


def read_body(value: Any, limits: Limits) -> Reading:
    """The points of a sweep, each with its request.

    Args:
        value: the body, as JSON has it.
        limits: of this service.

    Raises:
        Invalid: what cannot be taken, with pointers.
        TooLarge: its documents, once for each point.
    """
    _check_raw(value, limits)
    try:
        body = validated(SweepRequest, value)
    except Invalid as error:
        raise Invalid([_placed(fault, value) for fault in error.faults]) from error
    models: dict[str, ModelSpec] = {}
    document = _document(body, value, models, limits)
    _check_number(document, limits)
    try:
        sweep = read_sweep(document)
    except RequestError as error:
        text = str(error)
        found = _AT.match(text)
        at = pointer(found[1], int(found[2])) if found else ""
        text = text[found.end() :] if found else text.removeprefix("the sweep: ")
        raise Invalid([Fault(at, text)]) from error
    if len(sweep.points) > limits.sweep_points:
        raise _too_many(len(sweep.points), limits)
    _check_bytes(sweep.points, models)
    asked = tuple(_asked(point, models[point.model], limits) for point in sweep.points)
    return Reading(sweep.name, sweep.description, sweep.notes, asked)


# ---- before anything is built -------------------------------------------------------------------


def _sections(value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables of a body that hold parameters, with their pointers."""
    yield "", value
    if isinstance(found := value.get("parameters"), dict):
        yield "/parameters", found
    for name in ("points", "exclude"):
        tables = value.get(name)
        for index, table in enumerate(tables if isinstance(tables, list) else ()):
            if isinstance(table, dict):
                yield pointer(name, index), table


def _check_raw(value: Any, limits: Limits) -> None:
    """Refuse what would be costly to validate, and what is not done here."""
    if not isinstance(value, dict):
        return  # which validation says
    most = VALUES_PER_POINT * limits.sweep_points
    number = 0
    for at, table in _sections(value):
        for name in MEASURING:
            if name in table:
                raise Invalid([Fault(at + pointer(name), MEASURING[name])])
        for name, found in table.items():
            number += len(found) if isinstance(found, list) else 1
            if number > most:
                where = at + pointer(name[:100])
                raise Invalid([Fault(where, f"more than {most} values; far too many")])


def _placed(fault: Fault, value: Any) -> Fault:
    """The fault with a pointer into the body: one value is validated as a list of it."""
    parts: list[str | int] = []
    for text in fault.pointer.split("/")[1:]:
        part: str | int = text.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and text.isdigit() and int(text) < len(value):
            value = value[int(text)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        elif text in TAGS or text.isdigit():
            continue
        parts.append(part)
    return Fault(pointer(*parts), fault.detail)


def _document(
    body: SweepRequest, value: Any, models: dict[str, ModelSpec], limits: Limits
) -> dict[str, Any]:
    """The sweep as its file's reader takes it, with every document in it checked.

    Args:
        body: as it was validated.
        value: the same as it came.
        models: filled in: what is planned, by the names that rows have.
        limits: of this service.
    """
    out = _table(body, "", value, models, limits)
    shared = {**out, **_table(body.parameters, "/parameters", value, models, limits)}
    document = {
        "name": body.name,
        "description": body.description,
        **out,
        "parameters": {k: v for k, v in shared.items() if k not in out},
        "points": [
            _table(t, pointer("points", i), value, models, limits)
            for i, t in enumerate(body.points)
        ],
        "exclude": [
            {k: getattr(t, k) for k in PARAMETERS if getattr(t, k, None) is not None}
            for t in body.exclude
        ],
    }
    twice = [k for k in out if getattr(body.parameters, k) is not None]
    if twice:
        raise Invalid([Fault(pointer(twice[0]), "stands in 'parameters' too; leave one out")])
    one = "cluster" in shared and len(shared["cluster"]) == 1
    missing = [i for i, t in enumerate(document["points"]) if "cluster" not in t and not one]
    if "model" in shared and "cluster" not in shared:
        raise Invalid([Fault("/parameters", "no 'cluster'; give a preset or a document")])
    if missing:
        said = "no 'cluster', and 'parameters' has none or several; give one"
        raise Invalid([Fault(pointer("points", missing[0]), said)])
    return document


def _table(
    table: Any, at: str, value: Any, models: dict[str, ModelSpec], limits: Limits
) -> dict[str, Any]:
    """The parameters that a table gives, checked one by one."""
    out: dict[str, Any] = {}
    for name in PARAMETERS:
        values = getattr(table, name, None)
        if values is None:
            continue
        taken = []
        for index, found in enumerate(values):
            where = _placed(Fault(f"{at}/{name}/{index}", ""), value).pointer
            if name == "model":
                taken.append(_model(found, where, models, limits))
            elif name == "cluster":
                taken.append(_cluster(found, where, limits))
            else:
                _check_size(name, found, where, limits)
                taken.append(found)
        out[name] = taken
    return out


def _check_size(name: str, value: Any, at: str, limits: Limits) -> None:
    numbers = [value]
    most: int | None = getattr(limits, name, None)
    if name == "mesh":
        if value == EVERY:
            return
        try:
            numbers = list((read_mesh(value) if isinstance(value, str) else value).values())
        except RequestError as error:
            raise Invalid([Fault(at, str(error))]) from error
        most = limits.devices
    if most is not None and (over := [n for n in numbers if n > most]):
        raise Invalid([Fault(at, f"{over[0]}; at most {most} are taken here")])


def _model(
    entry: ModelEntry, at: str, models: dict[str, ModelSpec], limits: Limits
) -> str | dict[str, Any]:
    """The model as a sweep's file names it; a document by its digest, since points copy it."""
    spec: ModelSpec
    told: str | dict[str, Any]
    if isinstance(entry, str):
        try:
            model_preset(entry)
        except UnknownNameError as error:
            raise Invalid([Fault(at, str(error))]) from error
        name, spec, told = entry, PresetModel(preset=entry), entry
    else:
        if isinstance(entry, ConfigEntry):
            spec = checked_model(ConfigModel(config=entry.config), limits, at)
            own = entry.config.get("model_type")
        else:
            spec = checked_model(GraphModel(graph=entry.graph), limits, at)
            own = entry.graph.get("name")
        name = entry.name or str(own or "model")[:200]
        text = json.dumps(spec.model_dump(), sort_keys=True)
        told = {"name": name, "config": {"sha256": hashlib.sha256(text.encode()).hexdigest()}}
    if models.setdefault(name, spec) != spec:
        raise Invalid([Fault(at, f"two models are called {name!r}; give each its own 'name'")])
    return told


def _cluster(entry: str | dict[str, Any], at: str, limits: Limits) -> str | dict[str, Any]:
    if isinstance(entry, str):
        try:
            cluster_preset(entry)
        except UnknownNameError as error:
            raise Invalid([Fault(at, str(error))]) from error
    else:
        checked_cluster(entry, limits, at)
    return entry


def _check_number(document: dict[str, Any], limits: Limits) -> None:
    """Refuse more points than there may be, before they are made."""
    common = {**{k: v for k, v in document.items() if k in PARAMETERS}, **document["parameters"]}
    shared = {k: v for k, v in common.items() if len(v) == 1}
    grids = [common] if "model" in common else []
    grids += [{**shared, **table} for table in document["points"]]
    number = sum(map(_number, grids))
    if number > limits.sweep_points:
        raise _too_many(number, limits)
    excluded = sum(len(v) for table in document["exclude"] for v in table.values())
    if excluded > limits.sweep_points:  # each is compared with each point
        said = f"{excluded} values; at most {limits.sweep_points} are taken here"
        raise Invalid([Fault("/exclude", said)])


def _number(grid: dict[str, list[Any]]) -> int:
    """Points of a grid, with what is excluded; at most, where devices are left out."""
    number = 1
    for name, values in grid.items():
        if name not in ("devices", "mesh"):
            number *= len(values)
    devices = grid.get("devices") or [max(map(_devices, grid.get("cluster", ["local"])))]
    meshes = grid.get("mesh", [None])
    every = sum(1 for m in meshes if m == EVERY)
    return number * sum(len(meshes) - every + every * _divisors(d) for d in devices)


def _devices(cluster: str | dict[str, Any]) -> int:
    found = cluster_preset(cluster).devices if isinstance(cluster, str) else cluster["devices"]
    return int(found)


def _divisors(number: int) -> int:
    below: int = sum(2 for d in range(1, isqrt(number) + 1) if number % d == 0)
    return below - int(isqrt(number) ** 2 == number)


def _too_many(number: int, limits: Limits) -> Invalid:
    said = f"{number:,} points; at most {limits.sweep_points:,} are taken in one sweep; divide it"
    return Invalid([Fault("", said)])


def _check_bytes(points: tuple[Point, ...], models: dict[str, ModelSpec]) -> None:
    sizes = {name: len(spec.model_dump_json()) for name, spec in models.items()}
    total = sum(sizes[p.model] + len(json.dumps(p.cluster_document)) for p in points)
    if total > MOST_BYTES:
        raise TooLarge(
            f"the points of this sweep hold {total / 2**20:,.0f} MiB of documents, each point its "
            f"model's; at most {MOST_BYTES / 2**20:.0f} MiB are taken; ask for fewer points, or "
            "name presets"
        )


# ---- points -------------------------------------------------------------------------------------


def _asked(point: Point, model: ModelSpec, limits: Limits) -> Asked:
    cluster: PresetCluster | dict[str, Any] = PresetCluster(
        preset=point.cluster, devices=point.devices
    )
    if point.cluster_document is not None:
        cluster = point.cluster_document
        if cluster["devices"] != point.devices:
            cluster = Cluster.from_json(cluster).with_devices(point.devices).to_json()
    kind = cast(Kind, point.mode)
    request = PlanRequest(
        model=model,
        cluster=cluster,
        workload=Workload.model_validate(
            {
                "global_batch": point.global_batch,
                "seq_len": point.seq_len,
                "dtype": None if point.dtype is None else SHORT_DTYPES[point.dtype],
                "optimizer": point.optimizer,
            }
        ),
        search=Search.model_validate(
            {
                "strategy": point.strategy,
                "mesh": None if point.mesh is None else read_mesh(point.mesh),
                "memory_limit_bytes": point.memory_limit_bytes,
                "trials": point.trials if kind == "plan" else None,
                "seed": point.seed,
            }
        ),
    )
    try:
        check_around(request, limits)
    except Invalid as error:
        raise Invalid([Fault("", f"{point.text}: {error.faults[0].detail}")]) from error
    document = dumped(request)
    asked = {k: v for k, v in point.row().to_json().items() if v is not None and k != "status"}
    return Asked(kind=kind, request=document, digest=digest(kind, document, VERSION), asked=asked)
