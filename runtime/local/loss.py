"""Cross-entropy over a cut vocabulary, as in Megatron-LM's vocabulary-parallel cross-entropy.

A row's loss is ``log sum_j exp(x_j - m) - (1 - s) (x_t - m) - s / V sum_j (x_j - m)``, with m the
row's largest logit, t its target, V the vocabulary's size and s the label smoothing. The sums over
j are over all shards; the gradient of a shard's logits needs no message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard.runtime.local.calls import python_value
from autoshard.runtime.local.lookup import Localize, localizer
from autoshard.runtime.local.site import Local, Reducer, Site, local_for
from autoshard.sharding.rules.dims import integer, number


@dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """How this device's shard lies in the vocabulary, and how to reach the others."""

    size: int
    localize: Localize
    smoothing: float
    ignored: int
    axes: tuple[int, ...]
    reducer: Reducer
    value: str


class _NllSum(torch.autograd.Function):
    """See the module's formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, words: _Vocabulary) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rows = len(wide)
        largest = wide.amax(1) if wide.shape[1] else wide.new_full((rows,), float("-inf"))
        reduce = words.reducer.all_reduce
        largest = reduce(largest, "max", words.axes, "forward", words.value)
        local, mine = words.localize(target)
        shifted = wide - largest[:, None]
        if wide.shape[1]:
            picked = shifted.gather(1, local[:, None])[:, 0].masked_fill(~mine, 0)
        else:
            picked = wide.new_zeros(rows)
        sums = [shifted.exp().sum(1), picked]
        if words.smoothing:
            sums.append(shifted.sum(1))
        total = reduce(torch.stack(sums), "sum", words.axes, "forward", words.value)
        losses = total[0].log() - (1 - words.smoothing) * total[1]
        if words.smoothing:
            losses = losses - words.smoothing / words.size * total[2]
        valid = target != words.ignored
        ctx.save_for_backward(x, largest, total[0], local, mine, valid)
        ctx.words = words
        return losses.masked_fill(~valid, 0).sum().to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, largest, total, local, mine, valid = ctx.saved_tensors
        words: _Vocabulary = ctx.words
        out = (x.to(largest.dtype) - largest[:, None]).exp_().div_(total[:, None])
        if x.shape[1]:
            one = mine.to(out.dtype).mul_(words.smoothing - 1)
            out.scatter_add_(1, local[:, None], one[:, None])
        if words.smoothing:
            out -= words.smoothing / words.size
        out *= (gradients[0].to(out.dtype) * valid)[:, None]
        return out.to(x.dtype), None, None


@local_for("autoshard.nll_sum")
def nll_sum(site: Site) -> Local:
    """Torch's own where the vocabulary is whole."""
    ignored = integer(site.call, "ignore_index", -100)
    smoothing = float(number(site.call, "label_smoothing", 0.0))
    axes = site.axes_cutting(0, (1,))
    if not axes:
        return lambda x, target: F.cross_entropy(
            x, target, ignore_index=ignored, reduction="sum", label_smoothing=smoothing
        )
    words = _Vocabulary(
        size=site.call.shapes[0][1],
        localize=localizer(site, 0, 1),
        smoothing=smoothing,
        ignored=ignored,
        axes=axes,
        reducer=site.the_reducer(),
        value=site.value,
    )
    return lambda x, target: _NllSum.apply(x, target, words)  # type: ignore[no-untyped-call]


@local_for("autoshard.count_valid")
def count_valid(site: Site) -> Local:
    """Of this device's rows."""
    ignored = integer(site.call, "ignore_index", -100)
    dtype = python_value("dtype", site.attr("dtype", "float32"))
    return lambda target: (target != ignored).sum().to(dtype)
