"""Documents of other tools, read as what a plan must keep to: a mesh, its uses, stored layouts.

``parse`` reads the document (``huggingface``, ``megatron``), ``demand`` sets it against a model;
:func:`autoshard.from_export` searches the fastest program that keeps to it. ``kept`` reads what the
whole space keeps of a configuration (``kept_megatron``, ``kept_torchtitan``).
"""

from autoshard.imports.foreign import FORMATS, Cutting, Foreign, Format
from autoshard.imports.layouts import Demand, demand

__all__ = ["FORMATS", "Cutting", "Demand", "Foreign", "Format", "demand"]
