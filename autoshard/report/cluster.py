"""Every number of a cluster that a prediction rests on, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.cluster import Cluster
from autoshard.render.units import bytes_text, percent_text, seconds_text
from autoshard.report.page import Cell, Column, table

_WHAT = {
    "collective_s": "starting one collective",
    "reserve_bytes": "memory that no tensor gets",
    "reserve.context_bytes": "of it context and kernels",
    "reserve.communication_bytes": "of it communication buffers",
    "reserve.fragmentation_bytes": "of it fragmentation",
    "devices_per_node": "devices in a node",
    "device.efficiency": "share of the peak that a large product sustains",
    "device.memory_bytes": "memory of a device",
    "device.memory_bytes_per_second": "peak of its memory",
    "device.memory_efficiency": "share of that which a long copy sustains",
    "device.launch_s": "least time of one operator",
}

_OF_TIER = {
    "devices": "devices in one unit",
    "bytes_per_second": "a card or a device's own links, one direction",
    "latency_s": "hop of a short message",
    "bulk_latency_s": "hop of a bulk transfer",
    "short_share": "share of the bandwidth that short messages get",
    "devices_per_card": "devices that share a card",
    "reduction.bytes_per_second": "sums by the switches, one direction",
    "reduction.latency_s": "start of sums by the switches",
}


def cluster_table(document: Mapping[str, Any]) -> str:
    """The numbers with their sources.

    Raises:
        RequestError: not a cluster document.
    """
    cluster = Cluster.from_json(document)
    rows: list[list[str | Cell]] = []
    for field, value in cluster.figures().items():
        rows.append([_what(field), figure_text(field, value), _source(field, cluster.sources)])
    return table([Column("what", "name"), Column("figure", "r"), Column("source", "long")], rows)


def _what(field: str) -> str:
    peak = field.removeprefix("device.peak_flops_per_second.")
    if peak != field:
        return f"peak in {peak}"
    if field.startswith("tiers."):
        _, tier, figure = field.split(".", 2)
        return f"{tier}: {_OF_TIER.get(figure, figure)}"
    return _WHAT.get(field, field)


def _source(field: str, sources: Mapping[str, str]) -> str:
    """Of the field, or of the part of the document that it stands in."""
    while field:
        if field in sources:
            return sources[field]
        field = field.rpartition(".")[0]
    return "none given"


def figure_text(field: str, value: float) -> str:
    """A number in the unit that the field's name says."""
    if "flops" in field:
        return f"{value / 1e12:,.4g} TFLOP/s"
    if field.endswith("bytes_per_second"):
        return f"{value / 1e9:,.4g} GB/s"
    if field.endswith("_bytes"):
        return bytes_text(value)
    if field.endswith("_s"):
        return seconds_text(value)
    if field.endswith("efficiency"):
        return percent_text(value)
    return f"{value:,.6g}"
