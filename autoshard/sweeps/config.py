"""What a sweep is: a file (TOML, YAML, JSON) or a mapping, read and checked before anything runs.

    name = "sizes"

    [parameters]                                # every combination of these is a point
    model = ["gpt2", "llama-3-8b"]
    cluster = ["a100-80", "h100"]
    devices = [1, 2, 4, 8]
    global_batch = 32

    [[points]]                                  # and these; what is left out is taken from above
    model = "llama-3-70b"                       # where that has one value
    cluster = "h100"
    devices = 64

    [[exclude]]                                 # but not what matches one of these
    model = "llama-3-8b"
    devices = [1, 2]

The form is that of Weights & Biases: ``method`` may be ``grid``, and a parameter may be written
``{values = [...]}`` or ``{value = ...}``.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.errors import RequestError, UnknownNameError
from autoshard.sweeps.points import Point
from autoshard.sweeps.resolve import Resolver

PARAMETERS = (
    "model",
    "seq_len",
    "dtype",
    "global_batch",
    "cluster",
    "devices",
    "optimizer",
    "strategy",
    "mesh",
    "measure",
    "steps",
    "memory_limit_bytes",
    "trials",
    "seed",
)
"""What a point may be given, outermost first: points that share a captured model are neighbours."""

SECTIONS = ("name", "description", "method", "parameters", "points", "exclude")

MOST_POINTS = 100_000
"""A grid larger than this is taken for a mistake."""

LONGEST_NAME = 200

Choices = dict[str, list[Any]]
"""Parameter -> the values it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep that was read.

    Attributes:
        name: what a store keeps it under.
        description: for people.
        points: in the order in which they are begun; no two are equal.
        notes: what was noticed while reading, for people.
    """

    name: str
    description: str
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()


def read_sweep(source: str | Path | Mapping[str, Any]) -> Sweep:
    """Read and check a sweep.

    Args:
        source: path of a TOML, YAML or JSON file; relative paths in it begin at its folder. Or a
            mapping of that form; relative paths in it begin at the working folder.

    Raises:
        UnknownNameError: an unknown key, preset, dtype or strategy; names the nearest.
        RequestError: anything else that cannot be; says where.
    """
    if isinstance(source, Mapping):
        return _sweep(source, "sweep", Path(), "the sweep")
    path = Path(source)
    return _sweep(_read(path), path.stem, path.parent, str(path))


def _read(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"cannot read the sweep {path}: {reason}") from error
    kind = path.suffix.lower()
    try:
        if kind == ".toml":
            found: Any = tomllib.loads(text)
        elif kind in (".yaml", ".yml"):
            found = yaml.safe_load(text)
        elif kind == ".json":
            found = json.loads(text)
        else:
            raise RequestError(f"{path}: a sweep is a .toml, .yaml or .json file")
    except (tomllib.TOMLDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        raise RequestError(f"{path} is not {kind[1:].upper()}: {error}") from error
    if not isinstance(found, Mapping):
        raise RequestError(f"{path} holds a {type(found).__name__}; a sweep is a table of keys")
    return found


def _sweep(document: Mapping[str, Any], name: str, folder: Path, where: str) -> Sweep:
    _known(document, (*SECTIONS, *PARAMETERS), where)
    name = document.get("name", name)
    if not isinstance(name, str) or not name.strip():
        raise RequestError(f"{where}: 'name' must be a text, found {name!r}")
    if len(name) > LONGEST_NAME:
        raise RequestError(f"{where}: 'name' has {len(name)} characters; at most {LONGEST_NAME}")
    if (method := document.get("method", "grid")) != "grid":
        raise RequestError(f"{where}: method is {method!r}; every point is run: 'grid'")
    axes = _table(document.get("parameters", {}), f"{where}: 'parameters'")
    _known(axes, PARAMETERS, f"{where}: 'parameters'")
    above = {k: v for k, v in document.items() if k in PARAMETERS}
    if twice := sorted(set(above) & set(axes)):
        raise RequestError(f"{where}: {twice[0]!r} stands at the top and in 'parameters'")
    common = _choices({**above, **axes}, f"{where}: parameter")
    explicit = _tables(document, "points", where)
    excluded = _tables(document, "exclude", where)
    if "model" not in common and not explicit:
        raise RequestError(f"{where} names no model; give 'model' in [parameters], or [[points]]")

    resolver = Resolver(folder)
    points: dict[str, Point] = {}
    used = [False] * len(excluded)
    matchers = [resolver.matcher(t, f"{where}: exclude[{i}]") for i, t in enumerate(excluded)]
    shared = {k: v for k, v in common.items() if len(v) == 1}
    grids = [(common, where)] if "model" in common else []
    grids += [({**shared, **t}, f"{where}: points[{i}]") for i, t in enumerate(explicit)]
    for choices, at in grids:
        for values in _product(choices, at):
            for point in resolver.points(values, at):
                hits = [i for i, matches in enumerate(matchers) if matches(point)]
                for i in hits:
                    used[i] = True
                if not hits:
                    points.setdefault(point.key, point)
                if len(points) > MOST_POINTS:
                    raise RequestError(f"{where} has more than {MOST_POINTS:,} points; divide it")
    if not points:
        raise RequestError(f"{where}: no point is left; 'exclude' matches all of them")
    notes = tuple(f"exclude[{i}] matches no point" for i, hit in enumerate(used) if not hit)
    description = str(document.get("description", ""))
    return Sweep(name=name, description=description, points=tuple(points.values()), notes=notes)


def _known(table: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise RequestError(f"{where}: {UnknownNameError('key', str(key), keys)}")


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be a table, found {value!r}")
    return value


def _tables(document: Mapping[str, Any], key: str, where: str) -> list[Choices]:
    """The tables of ``points`` or ``exclude``."""
    found = document.get(key, [])
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise RequestError(f"{where}: {key!r} must be a list of tables ([[{key}]] in TOML)")
    out = []
    for index, value in enumerate(found):
        at = f"{where}: {key}[{index}]"
        table = _table(value, at)
        _known(table, PARAMETERS, at)
        if not table:
            raise RequestError(f"{at} is empty; give parameters in it")
        out.append(_choices(table, f"{at}:"))
    return out


def _choices(table: Mapping[str, Any], where: str) -> Choices:
    """The values of each parameter: of a list, of one value, of ``{values = [...]}``."""
    out: Choices = {}
    for key in (p for p in PARAMETERS if p in table):
        value = table[key]
        if isinstance(value, Mapping) and set(value) & {"values", "value", "min", "max"}:
            if set(value) not in ({"values"}, {"value"}):
                raise RequestError(
                    f"{where} {key!r} is {dict(value)!r}; write a list, or {{values = [...]}}"
                )
            value = value["values"] if "values" in value else [value["value"]]
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values:
            raise RequestError(f"{where} {key!r} has no values")
        out[key] = values
    return out


def _product(choices: Choices, where: str) -> list[dict[str, Any]]:
    """Every combination, the first parameter outermost."""
    out: list[dict[str, Any]] = [{}]
    for key in (p for p in PARAMETERS if p in choices):
        out = [{**rest, key: value} for rest in out for value in choices[key]]
        if len(out) > MOST_POINTS:
            raise RequestError(f"{where} has more than {MOST_POINTS:,} points; divide it")
    return out
