"""A plan as the files of other tools: DTensor code, recipes, flags, configs, specs, launch lines.

    >>> export = plan.export("dtensor")
    >>> export.files["parallelize.py"], export.losses

One file a target. All of them read a plan the same way (``reading``): every axis is data
parallelism, FSDP or tensor parallelism, every weight is cut by columns or rows. What a target
cannot express is in ``losses``, unless it is a size, a style or a use of an axis: then the export
is refused.
"""

from autoshard.exports.export import Export, Exporter, Source, Written
from autoshard.exports.reading import Reading, Weight, read
from autoshard.exports.registry import EXPORTERS, TARGETS, export

__all__ = [
    "EXPORTERS",
    "TARGETS",
    "Export",
    "Exporter",
    "Reading",
    "Source",
    "Weight",
    "Written",
    "export",
    "read",
]
