"""The models of published runs, from their dimensions: what a publisher trained, nothing else.

Each returns the loss of one batch. Dropout stands where the recipe had it; attention is torch's
fused one, or spelled out where the publisher had none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Sizes of a transformer.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        ffn: width of the MLP.
        heads: heads of queries.
        kv_heads: heads of keys and values.
        vocab: rows of the embedding.
        seq_len: tokens of a sample.
        fused_attention: whether attention is one kernel.
        dropout: probability; 0 leaves the operators out.
        bias: whether linear layers have biases.
        tied: whether the head is the embedding.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq_len: int
    fused_attention: bool = True
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True


class Attention(nn.Module):
    """Self-attention, with rotary positions where ``rotary``."""

    def __init__(self, d: Dimensions, *, causal: bool, rotary: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = d.heads, d.kv_heads, d.hidden // d.heads
        self.causal, self.rotary, self.fused, self.p = causal, rotary, d.fused_attention, d.dropout
        self.q = nn.Linear(d.hidden, d.heads * self.size, bias=d.bias)
        self.k = nn.Linear(d.hidden, d.kv_heads * self.size, bias=d.bias)
        self.v = nn.Linear(d.hidden, d.kv_heads * self.size, bias=d.bias)
        self.out = nn.Linear(d.heads * self.size, d.hidden, bias=d.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix tokens; shapes [batch, tokens, hidden]."""
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(b, s, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(b, s, self.kv_heads, self.size).transpose(1, 2)
        if self.rotary:
            cos, sin = _angles(s, self.size, x)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        grouped = self.kv_heads != self.heads
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        else:
            if grouped:
                k = k.repeat_interleave(self.heads // self.kv_heads, 1)
                v = v.repeat_interleave(self.heads // self.kv_heads, 1)
            scores = q @ k.transpose(2, 3) * self.size**-0.5
            if mask is not None:
                scores = scores + mask
            y = F.dropout(scores.softmax(-1), self.p, self.training and self.p > 0) @ v
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, s, self.heads * self.size))
        return out


def _angles(s: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    freq = 1.0 / 10000 ** (torch.arange(0, size, 2, device=like.device) / size)
    angle = torch.outer(torch.arange(s, device=like.device).float(), freq)
    both = torch.cat((angle, angle), -1)
    return both.cos().to(like.dtype), both.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class GPTBlock(nn.Module):
    """Norm first, a GELU between two products."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d.hidden), nn.LayerNorm(d.hidden)
        self.attention = Attention(d, causal=True, rotary=False)
        self.up = nn.Linear(d.hidden, d.ffn, bias=d.bias)
        self.down = nn.Linear(d.ffn, d.hidden, bias=d.bias)
        self.p = d.dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, tokens, hidden]."""
        x = x + _drop(self.attention(self.norm1(x), mask), self.p)
        return x + _drop(self.down(F.gelu(self.up(self.norm2(x)))), self.p)


class LlamaBlock(nn.Module):
    """RMS norm first, a gated MLP, rotary positions."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d.hidden), nn.RMSNorm(d.hidden)
        self.attention = Attention(d, causal=True, rotary=True)
        self.gate = nn.Linear(d.hidden, d.ffn, bias=False)
        self.up = nn.Linear(d.hidden, d.ffn, bias=False)
        self.down = nn.Linear(d.ffn, d.hidden, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, tokens, hidden]."""
        x = x + self.attention(self.norm1(x), mask)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class NemotronBlock(nn.Module):
    """Layer norm first, a squared ReLU, rotary positions."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d.hidden), nn.LayerNorm(d.hidden)
        self.attention = Attention(d, causal=True, rotary=True)
        self.up = nn.Linear(d.hidden, d.ffn, bias=False)
        self.down = nn.Linear(d.ffn, d.hidden, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, tokens, hidden]."""
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class BertBlock(nn.Module):
    """Norm last, as the original has it."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d.hidden), nn.LayerNorm(d.hidden)
        self.attention = Attention(d, causal=False, rotary=False)
        self.up = nn.Linear(d.hidden, d.ffn, bias=d.bias)
        self.down = nn.Linear(d.ffn, d.hidden, bias=d.bias)
        self.p = d.dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, tokens, hidden]."""
        x = self.norm1(x + _drop(self.attention(x, mask), self.p))
        return self.norm2(x + _drop(self.down(F.gelu(self.up(x))), self.p))


def _drop(x: Tensor, p: float) -> Tensor:
    return F.dropout(x, p) if p else x


class Decoder(nn.Module):
    """A language model that predicts the next token."""

    def __init__(self, d: Dimensions, block: type[nn.Module], *, learned: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(d.vocab, d.hidden)
        self.positions = nn.Embedding(d.seq_len, d.hidden) if learned else None
        self.blocks = nn.ModuleList([block(d) for _ in range(d.layers)])
        self.norm = nn.RMSNorm(d.hidden) if block is LlamaBlock else nn.LayerNorm(d.hidden)
        self.head = nn.Linear(d.hidden, d.vocab, bias=False)
        if d.tied:
            self.head.weight = self.embed.weight
        self.p = d.dropout

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy; both [batch, tokens] of integers."""
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = _drop(x, self.p)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Bert(nn.Module):
    """Masked language model and next-sentence prediction, logits of masked tokens only."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.embed = nn.Embedding(d.vocab, d.hidden)
        self.positions = nn.Embedding(512, d.hidden)
        self.segments = nn.Embedding(2, d.hidden)
        self.norm = nn.LayerNorm(d.hidden)
        self.blocks = nn.ModuleList([BertBlock(d) for _ in range(d.layers)])
        self.transform = nn.Linear(d.hidden, d.hidden)
        self.transform_norm = nn.LayerNorm(d.hidden)
        self.head = nn.Linear(d.hidden, d.vocab, bias=False)
        self.head.weight = self.embed.weight
        self.pool = nn.Linear(d.hidden, d.hidden)
        self.next = nn.Linear(d.hidden, 2)
        self.p = d.dropout

    def forward(
        self, tokens: Tensor, segments: Tensor, masked: Tensor, labels: Tensor, following: Tensor
    ) -> Tensor:
        """Both losses; tokens [batch, tokens], masked and labels [batch, predictions]."""
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.positions(where) + self.segments(segments)
        x = _drop(self.norm(x), self.p)
        for block in self.blocks:
            x = block(x)
        index = masked[:, :, None].expand(-1, -1, x.shape[2])
        picked = self.transform_norm(F.gelu(self.transform(x.gather(1, index))))
        logits = self.head(picked).flatten(0, 1).float()
        first = self.next(self.pool(x[:, 0]).tanh())
        return F.cross_entropy(logits, labels.flatten()) + F.cross_entropy(first, following)
