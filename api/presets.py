"""The presets with their numbers and sources, as data: nothing is built, torch is not needed."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from autoshard.api.wire import ClusterPreset, ModelPreset
from autoshard.cluster import ALIASES, Cluster
from autoshard.cluster import presets as cluster_names
from autoshard.errors import UnknownNameError


@cache
def model_presets() -> dict[str, ModelPreset]:
    """Every model preset by name."""
    folder = resources.files("autoshard.models")
    names = (f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
    found: dict[str, ModelPreset] = {}
    for name in sorted(names):
        document: dict[str, Any] = json.loads((folder / f"{name}.json").read_text("utf-8"))
        found[name] = ModelPreset(
            name=name,
            source=document["_source"],
            parameter_count=document["_parameter_count"],
            model_type=document["model_type"],
            architecture=document["architectures"][0],
            config={k: v for k, v in document.items() if not k.startswith("_")},
        )
    return found


def model_preset(name: str) -> ModelPreset:
    """A model preset.

    Raises:
        UnknownNameError: no such preset; the message lists them.
    """
    if (found := model_presets().get(name)) is None:
        raise UnknownNameError("model preset", name, model_presets())
    return found


@cache
def cluster_presets() -> dict[str, ClusterPreset]:
    """Every cluster preset by name; ``local`` is the machine that the service runs on."""
    return {name: _cluster(name) for name in cluster_names()}


def _cluster(name: str) -> ClusterPreset:
    cluster = Cluster.preset(name)
    return ClusterPreset(
        name=name,
        aliases=sorted(a for a, of in ALIASES.items() if of == name),
        devices=cluster.devices,
        document=cluster.to_json(),
    )


def cluster_preset(name: str) -> ClusterPreset:
    """A cluster preset, by its name or an alias.

    Raises:
        UnknownNameError: no such preset; the message lists them.
    """
    if (found := cluster_presets().get(ALIASES.get(name, name))) is None:
        raise UnknownNameError("cluster preset", name, [*cluster_presets(), *ALIASES])
    return found
