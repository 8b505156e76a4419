"""Attention on a shard: its own rows of a causal mask, and one dropout mask for all devices."""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.runtime.local.adapt import drop, zeros_if_empty
from autoshard.runtime.local.site import Local, Site, local_for
from autoshard.runtime.shards import is_cut, positions, shard_viewer
from autoshard.sharding.layout import Cut, R
from autoshard.sharding.rules.dims import number


def causal_rows(site: Site) -> Local | None:
    """Makes the rows of the causal mask that belong to this device's query positions.

    Takes the query, for its device. None where the whole mask applies, or none does.
    """
    query = site.call.shapes[0]
    dim = len(query) - 2
    if not site.attr("is_causal") or not is_cut(site.operands[0], dim):
        return None
    rows = positions(query[dim], dim, site.operands[0], site.mesh, site.coordinate)
    keys = site.call.shapes[1][-2]
    first, count = (rows[0] if rows else 0), len(rows)
    if rows == list(range(first, first + count)):
        return lambda q: torch.ones(count, keys, dtype=torch.bool, device=q.device).tril(first)
    return lambda q: (
        torch.tensor(rows, device=q.device)[:, None] >= torch.arange(keys, device=q.device)
    )


@local_for("aten.scaled_dot_product_attention")
def attention(site: Site) -> Local:
    """Fused; with dropout the explicit softmax, whose mask is drawn for the global shape."""
    p = number(site.call, "dropout_p", 0.0)
    scale = site.attr("scale")
    scale = None if scale is None else number(site.call, "scale", 1.0)
    causal, gqa = bool(site.attr("is_causal")), bool(site.attr("enable_gqa"))
    rows = causal_rows(site)
    if p:
        return _explicit(site, p, scale, rows)
    if (zeros := zeros_if_empty(site)) is not None:
        return zeros
    if rows is None:

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa
            )

        return run

    def offset(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, rows(q), scale=scale, enable_gqa=gqa)

    return offset


def _explicit(site: Site, p: float, scale: float | None, rows: Local | None) -> Local:
    """``softmax(q k' scale + mask) * dropped @ v``, as torch's own form for dropout on CPU."""
    query, key = site.call.shapes[:2]
    root = sqrt(scale or 1 / sqrt(query[-1]))
    shape = (*query[:-1], key[-2])
    last = len(shape) - 1
    layout = tuple(R if isinstance(s, Cut) and s.dim == last else s for s in site.operands[0])
    take = shard_viewer(shape, layout, site.mesh, site.coordinate)
    causal = bool(site.attr("is_causal"))
    groups = bool(site.attr("enable_gqa"))

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if groups and k.shape[-3]:
            times = q.shape[-3] // k.shape[-3]
            k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
        scores = (q * root) @ (k.transpose(-2, -1) * root)
        if rows is not None:
            mask = rows(q)
        elif causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is None:
            weights = scores.softmax(-1)
        else:
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, float("-inf"))
                dead = ~mask.any(-1, keepdim=True)
                weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
            else:
                weights = (scores + mask).softmax(-1)
        del scores
        return (drop(weights, shape, p, take) if p < 1 else weights * 0.0) @ v

    return run


@local_for("autoshard.append")
def append(site: Site) -> Local:
    """The last places of this device's part of the cache take the new items, in place."""

    def run(cache: Tensor, new: Tensor) -> Tensor:
        count = min(cache.shape[-2], new.shape[-2])
        cache[..., cache.shape[-2] - count :, :] = new[..., new.shape[-2] - count :, :]
        return cache

    return run
