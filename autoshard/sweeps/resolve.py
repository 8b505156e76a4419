"""From the values of a sweep's file to points: names checked, files read, meshes spelled out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

from autoshard.cluster import Cluster
from autoshard.errors import MeshError, RequestError, UnknownNameError
from autoshard.planner.request import (
    SHORT_AXES,
    check_sizes,
    check_strategy,
    read_mesh,
    resolve_cluster,
    resolve_dtype,
    resolve_mesh,
)
from autoshard.search.memory import optimizer_of
from autoshard.sweeps.points import Point, file_digest

EVERY = "every"
"""A mesh that stands for every factorization of the devices into data x model."""

GRAPH_KIND = "autoshard.graph"


class Resolver:
    """Makes points of values; reads each file once.

    Args:
        folder: where relative paths begin.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, dict[str, Any]] = {}

    def points(self, values: Mapping[str, Any], where: str) -> list[Point]:
        """The point of one value for each parameter; several where the mesh is ``every``.

        Raises:
            RequestError: a value that cannot be; the message begins with ``where``.
        """
        given = {k: v for k, v in values.items() if v is not None}
        try:
            return self._points(given)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error

    def _points(self, given: dict[str, Any]) -> list[Point]:
        if "model" not in given:
            raise RequestError("no model is named, and [parameters] has none or several")
        numbers = {
            k: given[k]
            for k in ("global_batch", "seq_len", "steps", "memory_limit_bytes", "trials", "devices")
            if k in given
        }
        check_sizes(**numbers)
        measure = given.get("measure", False)
        if not isinstance(measure, bool):
            raise RequestError(f"measure must be true or false, found {measure!r}")
        seed = given.get("seed", 0)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise RequestError(f"seed must be a whole number, found {seed!r}")
        optimizer = str(given.get("optimizer", "adamw"))
        optimizer_of(optimizer)
        devices, mesh = given.get("devices"), given.get("mesh")
        if devices is None and mesh is not None and mesh != EVERY:
            devices = prod(_sizes(mesh).values())
        cluster = self._cluster(given.get("cluster", "local"), devices, measure)
        meshes = [None] if mesh is None else _meshes(mesh, cluster["devices"])
        return [
            Point(
                **self._model(given["model"]),
                **cluster,
                dtype=resolve_dtype(given.get("dtype")),
                optimizer=optimizer,
                strategy=check_strategy(str(given.get("strategy", "auto"))),
                mesh=each,
                measure=measure,
                seed=seed,
                **{k: v for k, v in numbers.items() if k != "devices"},
            )
            for each in meshes
        ]

    def matcher(self, choices: Mapping[str, list[Any]], where: str) -> Callable[[Point], bool]:
        """Whether a point has one of the values of every parameter that ``choices`` names."""
        try:
            wanted = {k: [_plain(k, v) for v in values] for k, values in choices.items()}
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error
        return lambda point: all(getattr(point, k) in values for k, values in wanted.items())

    def _model(self, model: object) -> dict[str, Any]:
        """Fields of a point that say which model."""
        if isinstance(model, Mapping):
            if set(model) != {"name", "config"} or not isinstance(model["name"], str):
                raise RequestError(
                    f"a model that is a table has 'name' and 'config' (a document or the path of "
                    f"one), found {sorted(map(str, model))}"
                )
            config = model["config"]
            if isinstance(config, Mapping):
                config = json.loads(json.dumps(config))
                return self._once(
                    model["name"], {"model_source": model["name"], "model_config": config}
                )
            found = self._file(self._folder / str(config))
            return self._once(model["name"], found)
        if not isinstance(model, str):
            raise RequestError(
                f"a model is a preset, a path, package.module:factory or a table with 'name' and "
                f"'config', found {model!r}"
            )
        if model not in self._models:
            self._models[model] = {"model": model, **self._named(model)}
        return self._models[model]

    def _once(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields, unless the name stands for another model already."""
        fields = {"model": name, **fields}
        if self._models.setdefault(name, fields) != fields:
            raise RequestError(f"two models are called {name!r}; give each its own name")
        return fields

    def _named(self, model: str) -> dict[str, Any]:
        if model in _model_presets():
            return {"model_source": model}
        path = self._folder / model
        if path.suffix == ".json" or path.is_dir():
            return self._file(path)
        if ":" in model:
            return {"model_source": model}
        raise UnknownNameError("model preset", model, _model_presets())

    def _file(self, path: Path) -> dict[str, Any]:
        path = (path / "config.json" if path.is_dir() else path).absolute()
        try:
            document = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise RequestError(f"cannot read the model {path}: {error.strerror}") from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RequestError(f"the model {path} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise RequestError(f"{path} holds a {type(document).__name__}, not a JSON object")
        if document.get("kind") == GRAPH_KIND:
            return {"model_source": str(path), "model_digest": file_digest(str(path))}
        return {"model_source": str(path), "model_config": document}

    def _cluster(self, cluster: object, devices: int | None, measure: bool) -> dict[str, Any]:
        """Fields of a point that say where."""
        if isinstance(cluster, Cluster):
            name, document = cluster.name, cluster.to_json()
        elif isinstance(cluster, Mapping):
            name, document = str(cluster.get("name")), json.loads(json.dumps(cluster))
        elif isinstance(cluster, str):
            name, document = cluster, None
            if cluster.endswith((".toml", ".json")) or "/" in cluster:
                document = Cluster.load(self._folder / cluster).to_json()
        else:
            raise RequestError(f"a cluster is a preset, a path or a document, found {cluster!r}")
        found, _ = resolve_cluster(name if document is None else document, devices)
        if measure and found.device.kind != "cpu":
            raise RequestError(
                f"cluster {name}: a measured point runs on processes of this machine; leave "
                "'cluster' out, give 'local', or a file that `autoshard calibrate` wrote"
            )
        return {"cluster": name, "cluster_document": document, "devices": found.devices}


@cache
def _model_presets() -> tuple[str, ...]:
    """Names of the model presets; the analyzer knows them too, but loads torch."""
    names = (f.name for f in resources.files("autoshard.models").iterdir())
    return tuple(sorted(n.removesuffix(".json") for n in names if n.endswith(".json")))


def _sizes(mesh: object) -> dict[str, int]:
    if isinstance(mesh, str):
        return read_mesh(mesh)
    if isinstance(mesh, Mapping):
        sizes = {str(k): v for k, v in mesh.items()}
        check_sizes(**{f"mesh axis {k}": v for k, v in sizes.items()})
        return sizes
    raise MeshError(f"a mesh is written data=4,model=2 or {EVERY!r}, found {mesh!r}")


def _meshes(mesh: object, devices: int) -> list[str]:
    """The mesh, or all of them, as text in one spelling."""
    if mesh == EVERY:
        sizes = [d for d in range(1, devices + 1) if devices % d == 0]
        return [f"data={devices // m},model={m}" for m in sizes]
    found = resolve_mesh(_sizes(mesh), devices)
    assert found is not None
    return [",".join(f"{n}={s}" for n, s in zip(found.axis_names, found.sizes, strict=True))]


def _plain(key: str, value: Any) -> Any:
    """A value of ``exclude`` as points have it."""
    if key == "dtype":
        return resolve_dtype(value)
    if key == "model" and isinstance(value, Mapping):
        return value.get("name")
    if key == "mesh" and value is not None:
        sizes = {SHORT_AXES.get(k, k): v for k, v in _sizes(value).items()}
        return _meshes(sizes, prod(sizes.values()))[0]
    return value
