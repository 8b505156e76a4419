"""What one device runs for one operator under a strategy: local tensors in, a local tensor out."""

from autoshard.runtime.local import adapt, attention, batch_norm, creation, experts, lookup, loss
from autoshard.runtime.local.calls import call_op, generic_call, local_call
from autoshard.runtime.local.site import Local, Reducer, Site

__all__ = [
    "Local",
    "Reducer",
    "Site",
    "adapt",
    "attention",
    "batch_norm",
    "call_op",
    "creation",
    "experts",
    "generic_call",
    "local_call",
    "lookup",
    "loss",
]
