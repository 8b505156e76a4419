"""What a request may ask for; checked before anything is built, without torch."""

from __future__ import annotations

from math import prod
from typing import Any

from autoshard.api.configs import checked_config
from autoshard.api.graphs import check_graph
from autoshard.api.presets import cluster_preset, model_preset
from autoshard.api.problems import Fault, Invalid, pointer
from autoshard.api.reading import validated
from autoshard.api.settings import Limits
from autoshard.api.wire import (
    ClusterDocument,
    ConfigModel,
    GraphModel,
    ModelSpec,
    OldClusterDocument,
    PlanRequest,
    PresetCluster,
    PresetModel,
)
from autoshard.cluster import Cluster
from autoshard.errors import RequestError, UnknownNameError
from autoshard.planner.request import ALL_AXES, SHORT_AXES, resolve_mesh


def check_request(request: PlanRequest, limits: Limits) -> PlanRequest:
    """The request without what only describes, so that equal requests are equal.

    Args:
        request: well-formed.
        limits: of this service.

    Raises:
        Invalid: what cannot be taken, each fault with a pointer.
    """
    model = checked_model(request.model, limits, "/model")
    check_around(request, limits)
    return request.model_copy(update={"model": model})


def checked_model(model: ModelSpec, limits: Limits, at: str) -> ModelSpec:
    """The model without what only describes.

    Args:
        model: well-formed.
        limits: of this service.
        at: JSON pointer of the model in the request.

    Raises:
        Invalid: see :func:`check_request`.
    """
    if isinstance(model, PresetModel):
        _about(at + "/preset", model_preset, model.preset)
        return model
    if isinstance(model, ConfigModel):
        return ConfigModel(config=checked_config(model.config, limits, at + "/config"))
    assert isinstance(model, GraphModel)
    check_graph(model.graph, limits, at + "/graph")
    return model


def check_around(request: PlanRequest, limits: Limits) -> None:
    """Check all but the model.

    Raises:
        Invalid: see :func:`check_request`.
    """
    cluster = _cluster(request, limits)
    _check_workload(request, limits)
    _check_search(request, limits, cluster)


def _cluster(request: PlanRequest, limits: Limits) -> Cluster:
    asked = request.cluster
    if isinstance(asked, PresetCluster):
        _about("/cluster/preset", cluster_preset, asked.preset)
        if asked.devices is not None:
            _at_most("/cluster/devices", asked.devices, limits.devices, "devices")
        cluster: Cluster = _about("/cluster/devices", Cluster.preset, asked.preset, asked.devices)
        return cluster
    return checked_cluster(asked, limits, "/cluster")


def checked_cluster(document: dict[str, Any], limits: Limits, at: str) -> Cluster:
    """The cluster of a document.

    Args:
        document: as it was sent.
        limits: of this service.
        at: JSON pointer of the document in the request.

    Raises:
        Invalid: see :func:`check_request`.
    """
    old = document.get("schema_version") == 1
    form = validated(OldClusterDocument if old else ClusterDocument, document, at)
    _at_most(at + "/devices", form.devices, limits.devices, "devices")
    _at_most(at + "/devices_per_node", form.devices_per_node, limits.devices, "devices")
    found: Cluster = _about(at + "/devices", Cluster.from_json, document)
    return found


def _check_workload(request: PlanRequest, limits: Limits) -> None:
    work = request.workload
    if work.global_batch is not None:
        _at_most("/workload/global_batch", work.global_batch, limits.global_batch, "samples")
    if work.seq_len is not None:
        _at_most("/workload/seq_len", work.seq_len, limits.seq_len, "tokens")


def _check_search(request: PlanRequest, limits: Limits, cluster: Cluster) -> None:
    search = request.search
    if search.trials is not None:
        _at_most("/search/trials", search.trials, limits.trials, "trials")
    if search.mesh is not None:
        _check_mesh(search.mesh, cluster)
    if request.validation == "run":
        _at_most(
            "/validate",
            cluster.devices,
            limits.validate_devices,
            "processes for a validation by running; use 'dry-run', or fewer devices",
        )


def _check_mesh(mesh: dict[str, int], cluster: Cluster) -> None:
    known = (*ALL_AXES, *SHORT_AXES)
    for axis, size in mesh.items():
        if axis not in known:
            raise Invalid(
                [
                    Fault(
                        "/search/mesh" + pointer(axis[:100]),
                        str(UnknownNameError("mesh axis", axis[:100], known)),
                    )
                ]
            )
        if not 1 <= size <= cluster.devices:
            raise Invalid(
                [
                    Fault(
                        "/search/mesh" + pointer(axis),
                        f"an axis has a size from 1 to the {cluster.devices} devices",
                    )
                ]
            )
    if prod(mesh.values()) <= cluster.devices**2:
        _about("/search/mesh", resolve_mesh, mesh, cluster.devices)


def _about(at: str, call: Any, *arguments: Any) -> Any:
    """The result of a call whose complaint is about the field at ``at``."""
    try:
        return call(*arguments)
    except RequestError as error:
        raise Invalid([Fault(at, str(error))]) from error


def _at_most(at: str, value: int, most: int, what: str) -> None:
    if value > most:
        raise Invalid([Fault(at, f"{value} {what}; at most {most} are taken here")])
