"""How well the kernels of a device use it: seconds of products, attention and memory traffic.

A product of ``batch`` matrices M x K and K x N in a dtype with peak P takes::

    max( 2 (batch M N + waste units 128^2) (K + depth) / (efficiency P),  bytes / B )

The last wave of 128 x 128 tiles fills only part of the ``units`` (on average ``waste`` of a wave is
lost), each tile fills and drains its pipeline (``depth`` elements of K), and nothing is faster than
memory. Everything else moves bytes: an operator reads its operands and writes its result, and how
often depends on how the program is run (``Style``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from autoshard.errors import RequestError
from autoshard.sections import check_names, mapping, number

Style = Literal["eager", "autocast", "fused"]
STYLES: tuple[Style, ...] = ("eager", "autocast", "fused")
"""How operators between products are run: each by a kernel of its own, the same with casts to and
from float32 around norms and losses, or several by one kernel (compiled, or fused by hand)."""

Products = Literal["native", "tf32", "fp8", "mxfp8", "nvfp4"]
PRODUCTS: tuple[Products, ...] = ("native", "tf32", "fp8", "mxfp8", "nvfp4")
"""What products of weights run in: the dtype of their operands, or fewer bits."""

TILE = 128
"""Rows and columns of the result that one unit makes at a time."""

LEAST_ROWS = 16
"""Rows of a tensor core's own product (PTX's mma m16n8k16): fewer cost as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Shape-dependent figures of a device's kernels.

    Attributes:
        units: compute units that a wave of tiles fills; 0: products do not come in waves.
        waste: share of a wave that is lost at the end of a product.
        depth: elements of K that filling and draining the pipeline costs.
        attention: share of the peak that fused attention sustains, forward.
        attention_backward: the same, backward.
        vendor_attention: what the vendor's own attention kernels, which fused programs call,
            sustain by those of frameworks.
        eager: bytes that memory-bound operators really move, by those that are counted.
        autocast: the same under autocast.
        fused: the same where kernels are fused.
        scores: the same of operators on attention scores, where attention is not one kernel.
        contention: share of the shorter side that computing and messages lose while both run.
    """

    units: int = 0
    waste: float = 0.0
    depth: float = 0.0
    attention: float = 0.5
    attention_backward: float = 0.4
    vendor_attention: float = 1.0
    eager: float = 1.0
    autocast: float = 1.0
    fused: float = 1.0
    scores: float = 1.0
    contention: float = 0.0

    def product_flops(
        self, batch: float, m: float, n: float, k: float, *, splits: bool = False
    ) -> float:
        """Operations that a product costs, those that it wastes included.

        With ``splits``, a product of fewer tiles than there are units is split along K, as kernels
        of inference do: it wastes a share of itself, not of a whole wave.
        """
        lost: float = self.units * TILE**2
        if splits:
            m = max(m, LEAST_ROWS)
            lost = min(lost, batch * m * n)
        return 2.0 * (batch * m * n + self.waste * lost) * (k + self.depth)

    def beside(self, computing: float, messages: float) -> float:
        """Seconds of computing and messages that need not wait for each other."""
        shorter, longer = sorted((computing, messages))
        return longer + min(1.0, self.contention) * shorter

    def traffic(self, style: Style) -> float:
        """Factor on the bytes of memory-bound operators."""
        return {"eager": self.eager, "autocast": self.autocast, "fused": self.fused}[style]

    def attention_gain(self, style: Style) -> float:
        """How much faster than its figures fused attention is."""
        return self.vendor_attention if style == "fused" else 1.0

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, document: object) -> Kernels:
        """The figures that ``to_json`` wrote; those that are missing have their defaults.

        Raises:
            RequestError: an unknown field, or one that is no number from 0.
        """
        where = "device.kernels"
        values = mapping(where, document)
        check_names(where, values, [f.name for f in fields(cls)])
        for name, value in values.items():
            if not number(f"{where}.{name}", value) and name in ("attention", "attention_backward"):
                raise RequestError(f"{where}.{name} is a share of the peak, above 0")
        return cls(**values)
