"""What ``autoshard calibrate`` found out about operators on a device, and how it enters their cost.

Data sheets say what products and memory can do at best. Where a device was measured, an operator
between products takes, of the bytes that it counts and the bandwidth of a long copy::

    factor of its family x bytes / bandwidth + launches x launch

so a factor of 1 is a copy, and tanh on a CPU, which computes longer than it moves, has one of 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from autoshard.errors import RequestError
from autoshard.sections import check_names, mapping, number

BIAS = "autoshard.bias"
"""Family of an addition of a bias to a product, free where the product's kernel does it."""

CUT = ".cut"
"""Ends the family of an operator that sends messages inside, and so is made of several parts."""

SCORES = "autoshard.scores"
"""Family of attention with dropout: its factor is of the bytes of the matrix of scores."""

RANDOM = "autoshard.random"
"""Family of drawing random numbers: its factor is of the bytes that are drawn."""

UPDATE = "autoshard.update"
"""Family of an optimizer's update: its factor is of the bytes that the update needs at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Seconds of a family's memory-bound work by those of a copy of as many bytes.

    Attributes:
        forward: forward.
        backward: backward.
    """

    forward: float
    backward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of a device that were measured with the programs that run on it.

    Attributes:
        operators: factors by family; a family that is missing has the device's own (``Kernels``).
        edge: rows and columns that a product costs beside its own: packing, and tiles that are not
            full.
        convolution: share of the rate of products that convolutions reach, forward.
        convolution_backward: the same, backward.
        update_launches: launches of an optimizer's update of one tensor.
        step_s: seconds of a step beside its operators and messages.
        gradient_copies: how often a fused gradient is copied, into its message and back.
        contention: share by which computing and a message beside it slow each other: 0 where
            neither minds, 1 where a core does one of them at a time.
        waiting: what the slowest of several processes computes longer than their mean, by the
            seconds that they compute: the others wait for it at the next message.
    """

    operators: Mapping[str, Factor] = field(default_factory=dict)
    edge: float = 0.0
    convolution: float = 1.0
    convolution_backward: float = 1.0
    update_launches: float = 0.0
    step_s: float = 0.0
    gradient_copies: float = 0.0
    contention: float = 0.0
    waiting: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["operators"] = {
            name: {"forward": f.forward, "backward": f.backward}
            for name, f in self.operators.items()
        }
        return out

    @classmethod
    def from_json(cls, document: object) -> Measured:
        """What ``to_json`` wrote.

        Raises:
            RequestError: an unknown field, or one that is no number from 0.
        """
        values = mapping("device.measured", document)
        known = [f.name for f in fields(cls)]
        check_names("device.measured", values, known)
        operators = {
            name: _factor(f"device.measured.operators.{name}", f)
            for name, f in mapping("device.measured.operators", values.pop("operators", {})).items()
        }
        numbers = {k: number(f"device.measured.{k}", v) for k, v in values.items()}
        for name in ("convolution", "convolution_backward"):
            if numbers.get(name) == 0:
                raise RequestError(f"device.measured.{name} must be above 0, found 0")
        return cls(operators=operators, **numbers)


def _factor(where: str, document: object) -> Factor:
    values = mapping(where, document)
    check_names(where, values, ["forward", "backward"])
    if "forward" not in values:
        raise RequestError(f"{where} needs a figure for forward")
    return Factor(**{k: number(f"{where}.{k}", v) for k, v in values.items()})
