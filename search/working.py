"""What one operator takes on a device beside its operands and its result, as the runtime runs it.

Forward: what it keeps for backward that neither operand nor result is, and what it needs while it
runs. Backward: what it needs beside the gradients. All of local shapes. The formulas are those of
torch's derivatives (``tools/autograd/derivatives.yaml``) and of ``autoshard.runtime.local``;
``tests/validation/test_memory.py`` holds them to what processes measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autoshard.graph import Node
from autoshard.search.strides import Strides, viewed
from autoshard.search.work import ATTENTION, PRODUCTS
from autoshard.sharding.layout import Shape

LOSS = "autoshard.nll_sum"


@dataclass(frozen=True, slots=True)
class Working:
    """Bytes of an operator on one device.

    Attributes:
        keeps: roles that are kept for backward instead of those of the graph; None: the graph's.
        kept_bytes: kept beside operands and result.
        forward_bytes: needed while forward runs.
        backward_bytes: needed while backward runs, beside the gradients.
    """

    keeps: frozenset[str] | None = None
    kept_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """An operator on one device.

    Attributes:
        node: of the graph.
        operands: local shapes.
        strides: how the operands lie in memory.
        item: bytes of an element of the first operand.
        result: local shape.
        cut: dims of the first operand that are cut.
        work: share of the operator that the device does.
        is_cpu: whether torch has no fused attention with dropout here.
    """

    node: Node
    operands: Sequence[Shape]
    strides: Sequence[Strides]
    item: int
    result: Shape
    cut: frozenset[int]
    work: float
    is_cpu: bool

    @property
    def first_bytes(self) -> int:
        """Of the first operand."""
        return prod(self.operands[0]) * self.item

    @property
    def result_bytes(self) -> int:
        """Of the result."""
        return prod(self.result) * self.node.itemsize


def kept_by_product(node: Node, differentiable: Sequence[bool]) -> frozenset[str]:
    """Roles that a product keeps: each operand for the gradient of the other.

    The graph does not tell where something before kept the same storage already, and where an
    operand is moved it is another one.
    """
    if node.family not in PRODUCTS and not node.family.startswith("aten.conv"):
        return frozenset()
    first, second = differentiable[:2]
    return frozenset(node.roles[i] for i, other in ((0, second), (1, first)) if other)


def working(site: Site) -> Working:
    """What the operator at ``site`` takes."""
    node = site.node
    kept = int(node.saved_extra_bytes * site.work)
    match node.family:
        case base if base == LOSS and 1 in site.cut:
            return _parallel_loss(site)
        case base if base == LOSS:  # the gradient of the log-softmax
            return Working(kept_bytes=kept, backward_bytes=site.first_bytes)
        case "autoshard.batch_norm" if site.cut - {1}:
            return _synchronised_norm(site, kept)
        case "aten.embedding" if 0 in site.cut:  # indices of its own, and whose they are
            rows = prod(site.operands[1])
            return Working(
                keeps=frozenset(),
                kept_bytes=9 * rows,
                forward_bytes=site.result_bytes + 9 * rows,
                backward_bytes=site.result_bytes,
            )
        case "autoshard.dropout":
            return Working(kept_bytes=kept, forward_bytes=node.num_bytes)
        case base if base == ATTENTION and node.attrs.get("dropout_p") and site.is_cpu:
            return _open_attention(site)
        case "aten.pow" | "aten.rsqrt":
            # grad * (n * x**(n - 1)): the power and its multiple live as long as the product.
            return Working(kept_bytes=kept, backward_bytes=2 * site.result_bytes)
        case "aten.div" if len(site.operands) > 1:
            return Working(kept_bytes=kept, backward_bytes=2 * site.result_bytes)
        case "aten.mul" if any(s != site.result for s in site.operands):
            # The product of the whole shape, before it is summed.
            return Working(kept_bytes=kept, backward_bytes=site.result_bytes)
    return Working(kept_bytes=kept)


def _parallel_loss(site: Site) -> Working:
    """Over a cut vocabulary: see ``autoshard.runtime.local.loss``."""
    rows = site.operands[0][0]
    wide = max(4, site.item) * prod(site.operands[0])
    # Per row: largest and sum of float32, index of int64, and two truths.
    small = rows * (2 * max(4, site.item) + 8 + 2)
    return Working(
        keeps=frozenset({"input"}), kept_bytes=small, forward_bytes=2 * wide, backward_bytes=0
    )


def _synchronised_norm(site: Site, kept: int) -> Working:
    """Over a cut batch: see ``autoshard.runtime.local.batch_norm``."""
    wide = max(4, site.item) * prod(site.operands[0])
    return Working(kept_bytes=kept, forward_bytes=2 * wide, backward_bytes=3 * wide)


def _open_attention(site: Site) -> Working:
    """With dropout and without a fused kernel: see ``autoshard.runtime.local.attention``."""
    query, key = site.operands[0], site.operands[1]
    scores = site.item * prod(query[:-1]) * key[-2]
    whole = site.node
    drawn = whole.itemsize * prod(whole.shape[:-1]) * key[-2]
    scaled = site.item * (prod(query) + prod(key))
    value = site.operands[2]
    # The products are of one batch: what cannot be seen so is copied.
    is_view = viewed(value, site.strides[2], (prod(value[:-2]), *value[-2:])) is not None
    copied = 0 if is_view else site.item * prod(value)
    return Working(
        keeps=frozenset({"value"} if is_view else ()),
        kept_bytes=scaled + copied + 2 * scores + scores // site.item,
        forward_bytes=scores + max(drawn, scores),
        backward_bytes=scores,
    )
