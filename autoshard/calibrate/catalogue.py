"""Which operators are measured: a module that uses each at a few sizes, captured like a model.

So each operator is counted by the rules of the cost model and run by the code of the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from autoshard.graph import ModelGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of what is measured.

    Attributes:
        matrices: rows and columns of the operands of operators between products, small first.
        products: (rows, inner, columns) of products.
        batched: (batch, rows, inner, columns) of batched ones.
        attention: (batch, heads, tokens, head size).
        convolutions: (batch, channels, pixels a side, channels out, kernel, stride).
        images: (batch, channels, pixels a side) of norms and pooling.
        words: rows of an embedding.
        message_bytes: of messages.
        update_elements: of the tensors that an optimizer updates, small first.
    """

    matrices: tuple[tuple[int, int], ...] = ((16, 32), (512, 768), (1024, 1536))
    products: tuple[tuple[int, int, int], ...] = (
        (128, 256, 256),
        (256, 512, 512),
        (512, 384, 1536),
        (512, 1536, 384),
        (1024, 768, 768),
        (128, 768, 3072),
        (2048, 192, 768),
        (64, 1024, 1024),
    )
    batched: tuple[tuple[int, int, int, int], ...] = ((24, 128, 64, 128),)
    attention: tuple[tuple[int, int, int, int], ...] = ((4, 6, 128, 64), (2, 6, 256, 64))
    convolutions: tuple[tuple[int, int, int, int, int, int], ...] = (
        (4, 3, 112, 64, 7, 2),
        (4, 64, 28, 64, 3, 1),
        (4, 128, 14, 128, 3, 1),
        (4, 64, 28, 128, 3, 2),
        (4, 64, 28, 128, 1, 2),
        (4, 256, 7, 256, 3, 1),
    )
    images: tuple[tuple[int, int, int], ...] = ((4, 64, 28), (4, 64, 56))
    words: int = 4096
    message_bytes: tuple[int, ...] = (1 << 10, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
    update_elements: tuple[int, ...] = (64, 1 << 20)


QUICK = Sizes(
    matrices=((16, 32), (64, 128)),
    products=((64, 64, 64), (64, 128, 64)),
    batched=((2, 32, 32, 32),),
    attention=((1, 2, 32, 16),),
    convolutions=((1, 4, 14, 8, 3, 1),),
    images=((2, 8, 14),),
    words=128,
    message_bytes=(1 << 10, 1 << 16),
    update_elements=(64, 1 << 12),
)
"""For tests."""


def catalogue(sizes: Sizes) -> ModelGraph:
    """The graph of every operator that is measured."""
    from autoshard.analyzer import analyze

    with torch.device("meta"):
        module = _Catalogue(sizes)
        rows = [torch.zeros(r, dtype=torch.long) for r, _ in sizes.matrices]
    return analyze(module, tuple(torch.zeros_like(r, device="cpu") for r in rows)).graph


class _Catalogue(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.table = _parameter(sizes.words, sizes.matrices[-1][1])
        for i, (rows, columns) in enumerate(sizes.matrices):
            self.register_parameter(f"x{i}", _parameter(rows, columns))
            self.register_parameter(f"y{i}", _parameter(rows, columns))
            self.register_parameter(f"w{i}", _parameter(columns))
            self.register_parameter(f"b{i}", _parameter(columns))
        for i, (m, k, n) in enumerate(sizes.products):
            self.register_parameter(f"left{i}", _parameter(m, k))
            self.register_parameter(f"right{i}", _parameter(k, n))
            self.register_parameter(f"weight{i}", _parameter(n, k))
        for i, (b, m, k, n) in enumerate(sizes.batched):
            self.register_parameter(f"lefts{i}", _parameter(b, m, k))
            self.register_parameter(f"rights{i}", _parameter(b, k, n))
        for i, (b, h, s, d) in enumerate(sizes.attention):
            for name in ("q", "k", "v"):
                self.register_parameter(f"{name}{i}", _parameter(b, h, s, d))
        for i, (b, c, p, o, k, _) in enumerate(sizes.convolutions):
            self.register_parameter(f"pixels{i}", _parameter(b, c, p, p, wants=c > 3))
            self.register_parameter(f"kernel{i}", _parameter(o, c, k, k))
        for i, (b, c, p) in enumerate(sizes.images):
            self.register_parameter(f"image{i}", _parameter(b, c, p, p))
            self.register_module(f"norm{i}", nn.BatchNorm2d(c))

    def forward(self, *rows: Tensor) -> Tensor:
        """A loss that needs every operator."""
        p, total = dict(self.named_parameters()), []
        for i, labels in enumerate(rows):
            total += _between(p[f"x{i}"], p[f"y{i}"], p[f"w{i}"], p[f"b{i}"], labels)
        total.append(F.embedding(rows[-1], self.table))
        for i in range(len(self.sizes.products)):
            total.append(p[f"left{i}"] @ p[f"right{i}"])
            total.append(F.linear(p[f"left{i}"], p[f"weight{i}"]))
        for i in range(len(self.sizes.batched)):
            total.append(torch.bmm(p[f"lefts{i}"], p[f"rights{i}"]))
        for i in range(len(self.sizes.attention)):
            q, k, v = p[f"q{i}"], p[f"k{i}"], p[f"v{i}"]
            total.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            total.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True))
        for i, (*_, kernel, stride) in enumerate(self.sizes.convolutions):
            image, weight = p[f"pixels{i}"], p[f"kernel{i}"]
            total.append(F.conv2d(image, weight, stride=stride, padding=kernel // 2))
        for i in range(len(self.sizes.images)):
            image = p[f"image{i}"]
            total.append(self.get_submodule(f"norm{i}")(image))
            total.append(F.max_pool2d(image, 3, 2, 1))
        loss: Tensor = torch.stack([t.sum() for t in total]).sum()
        return loss


def _between(x: Tensor, y: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> list[Tensor]:
    """Operators that stand between products, of matrices."""
    return [
        x + y,
        x + b,
        x - y,
        x * y,
        x / y,
        -x,
        x**2,
        torch.rsqrt(x),
        torch.exp(x),
        torch.tanh(x),
        torch.sigmoid(x),
        F.relu(x),
        F.gelu(x),
        F.silu(x),
        F.softmax(x, -1),
        torch.cat([x, y], -1),
        F.layer_norm(x, (x.shape[-1],), w, b),
        F.rms_norm(x, (x.shape[-1],), w),
        F.dropout(x, 0.1),
        x.mean(-1, keepdim=True),
        F.cross_entropy(x, labels, reduction="sum"),
    ]


def _parameter(*shape: int, wants: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=wants)
