"""What an operator's kernels do on one device: products, attention, and bytes moved.

All from local shapes, forward and backward. Counts of bytes are those of a kernel that reads each
operand once and writes its result once; backward reads what was kept and the incoming gradient and
writes a gradient for each operand that wants one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autoshard.graph import Node
from autoshard.sharding.layout import Shape

PRODUCTS = frozenset(
    {"aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"}
)
CONVOLUTIONS = frozenset(
    {"aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution", "aten.conv_transpose2d"}
)
ATTENTION = "aten.scaled_dot_product_attention"
APPEND = "autoshard.append"
NORMS = frozenset({"aten.layer_norm", "aten.rms_norm", "aten.group_norm", "aten.batch_norm"})

EXPERTS = "autoshard.experts"

ATTENTION_BACKWARD = 2.5
"""Operations of fused attention's backward by those of its forward: five products for two (Dao
2023, arXiv 2307.08691, section 4.1)."""


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products of M x K by K x N."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def elements(self) -> int:
        """Elements of operands and result."""
        return self.batch * (self.m * self.n + self.m * self.k + self.k * self.n)


@dataclass(frozen=True, slots=True)
class Pass:
    """Forward or backward of one operator on one device.

    Attributes:
        products: matrix products.
        flops: other operations that run at the rate of products (convolutions).
        attention_flops: operations of fused attention's forward, those that a causal mask leaves
            out not counted.
        attention_backward_flops: the same of its backward.
        num_bytes: traffic of memory-bound work.
        scores_bytes: of the matrix of attention scores, where dropout wants it.
        random_bytes: of random numbers: those of the whole value, since every device draws all of
            them and takes its own, so that a plan drops what one device would.
        launches: kernels.
    """

    products: tuple[Product, ...] = ()
    flops: float = 0.0
    attention_flops: float = 0.0
    attention_backward_flops: float = 0.0
    num_bytes: float = 0.0
    scores_bytes: float = 0.0
    random_bytes: float = 0.0
    launches: int = 0


def passes(
    node: Node,
    shapes: tuple[Shape, ...],
    itemsizes: tuple[int, ...],
    result: Shape,
    wants: tuple[bool, ...],
    work: float,
    *,
    bias: bool,
) -> tuple[Pass, Pass]:
    """What a node (not a leaf, not a view) does forward and backward.

    Args:
        node: the operator; its FLOPs are global.
        shapes: local shapes of its operands.
        itemsizes: bytes of an element of each operand.
        result: local shape of its result.
        wants: which operands' gradients this backward makes.
        work: share of the operator's FLOPs that this device does.
        bias: whether it adds a parameter to a product: kernels of products do that for nothing.
    """
    family = node.family
    if family in PRODUCTS:
        return _products(family, shapes, result, wants)
    sizes = [prod(s) * b for s, b in zip(shapes, itemsizes, strict=True)]
    out = prod(result) * node.itemsize
    if family == ATTENTION:
        flops = node.flops_forward * work * (0.5 if node.attrs.get("is_causal") else 1.0)
        moved = sum(sizes) + out
        scores = drawn = 0.0
        if node.attrs.get("dropout_p"):
            scores = prod(shapes[0][:-1]) * shapes[1][-2] * node.itemsize
            drawn = prod(node.shape[:-1]) * shapes[1][-2] * node.itemsize
        back = Pass(
            attention_backward_flops=ATTENTION_BACKWARD * flops,
            num_bytes=2.0 * moved,
            scores_bytes=scores,
            launches=2,
        )
        there = Pass(
            attention_flops=flops,
            num_bytes=moved,
            scores_bytes=scores,
            random_bytes=drawn,
            launches=1,
        )
        return there, (back if any(wants) else Pass())
    if family == EXPERTS:
        return _experts(node, shapes, result, wants)
    if family == APPEND:
        # In place: what is new is read and written, what was there stays.
        written = min(sizes[0], sizes[1])
        return Pass(num_bytes=2.0 * written, launches=1), Pass()
    if node.flops_forward > 4 * prod(node.shape) * max(1, len(shapes)):
        # Convolutions and what else works more than it moves.
        moved = sum(sizes) + out
        forward = Pass(flops=node.flops_forward * work, num_bytes=moved, launches=1)
        if not any(wants):
            return forward, Pass()
        flops = node.flops_backward
        if family in CONVOLUTIONS:  # one convolution for each gradient
            flops = min(flops, sum(wants[:2]) * node.flops_forward)
        launches = 2 if flops > node.flops_forward > 0 else 1
        return forward, Pass(flops=flops * work, num_bytes=2.0 * moved, launches=launches)
    drops = family == "autoshard.dropout"
    forward = Pass(
        num_bytes=0.0 if bias else sum(sizes) + out + prod(result) * drops,
        random_bytes=node.num_bytes * drops,
        launches=not bias,
    )
    if not any(wants):
        return forward, Pass()
    return forward, _memory_backward(node, shapes, sizes, result, out, wants)


def _products(
    family: str, shapes: tuple[Shape, ...], result: Shape, wants: tuple[bool, ...]
) -> tuple[Pass, Pass]:
    shift = 1 if family in ("aten.addmm", "aten.baddbmm") else 0
    left, right = shapes[shift], shapes[shift + 1]
    k = left[-1]
    if family == "aten.linear":
        batch, m, n = 1, prod(left[:-1]), result[-1]
    else:
        m = left[-2] if len(left) > 1 else 1
        n = right[-1] if len(right) > 1 else 1
        batch = prod(result) // max(1, m * n)
        if len(right) == 2:
            batch, m = 1, batch * m  # one right side for all
    forward = Pass(products=(Product(batch, m, n, k),), launches=1)
    back = []
    if wants[shift]:
        back.append(Product(batch, m, k, n))
    if wants[shift + 1]:
        back.append(Product(batch, k, n, m))
    return forward, Pass(products=tuple(back), launches=len(back))


def _experts(
    node: Node, shapes: tuple[Shape, ...], result: Shape, wants: tuple[bool, ...]
) -> tuple[Pass, Pass]:
    """Two products an expert, of as many rows each: routers are trained to balance.

    Rows are gathered by expert before and summed by token after; between the products the
    activation and the gate.
    """
    (tokens, inner), (_, each), _, (here, wide, _), (_, out, channels) = shapes
    every = round(node.attrs["experts"])  # type: ignore[arg-type]
    rows = -(-tokens * each // every)
    first = Product(here, rows, wide, inner)
    second = Product(here, rows, out, channels)
    moved = here * rows * (2 * inner + 3 * channels + 3 * out) + prod(result)
    forward = Pass(products=(first, second), num_bytes=moved * float(node.itemsize), launches=9)
    back: list[Product] = []
    if wants[0] or wants[2]:
        back += [Product(here, rows, inner, wide), Product(here, rows, channels, out)]
    if any(wants[3:]):
        back += [Product(here, inner, wide, rows), Product(here, channels, out, rows)]
    if not back:
        return forward, Pass()
    launches = len(back) + 10
    return forward, Pass(
        products=tuple(back), num_bytes=2.0 * moved * node.itemsize, launches=launches
    )


def _memory_backward(
    node: Node,
    shapes: tuple[Shape, ...],
    sizes: list[int],
    result: Shape,
    out: int,
    wants: tuple[bool, ...],
) -> Pass:
    family = node.family
    whole = prod(result)
    if family in ("aten.add", "aten.sub"):
        # The gradient goes on as it is; an operand that was broadcast gets a sum of it.
        summed = sum(1 for s, w in zip(shapes, wants, strict=True) if w and prod(s) < whole)
        return Pass(num_bytes=float(out * summed), launches=summed)
    if family in NORMS:
        # Once for the operand, once more for scale and shift.
        own, again = wants[0], any(wants[1:])
        return Pass(num_bytes=out * (3.0 * own + 2.0 * again), launches=own + again)
    if family in ("aten.mul", "aten.div"):
        each = 3.0 if len(shapes) > 1 else 2.0
        count = sum(wants)
        return Pass(num_bytes=each * out * count, launches=count)
    if family == "aten.softmax" or family == "aten._softmax":
        return Pass(num_bytes=3.0 * out, launches=1)
    if family == "aten.embedding":
        # Rows are added into a gradient that is zeroed first.
        return Pass(num_bytes=2.0 * out + sizes[0], launches=2)
    if family == "autoshard.dropout":
        return Pass(num_bytes=2.0 * out + whole, launches=1)
    return Pass(
        num_bytes=float(
            out + sum(sizes) + sum(size for size, w in zip(sizes, wants, strict=True) if w)
        ),
        launches=1,
    )


def joined_bytes(node: Node, result: Shape, uses: int) -> int:
    """Traffic of adding up the gradients of a value that is used several times."""
    return 3 * prod(result) * node.itemsize * (uses - 1) if uses > 1 else 0
