"""Lookup in a table whose rows are cut: every device looks up its own rows, the others are zero."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.runtime.local.adapt import plain
from autoshard.runtime.local.site import Local, Site, local_for
from autoshard.runtime.shards import positions
from autoshard.sharding.rules.dims import integer

Localize = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Global indices -> (local indices, 0 where the item is another device's; whether it is ours)."""


def localizer(site: Site, operand: int, dim: int) -> Localize:
    """How to turn indices into dim ``dim`` of an operand into this device's own."""
    size = site.call.shapes[operand][dim]
    held = positions(size, dim, site.operands[operand], site.mesh, site.coordinate)
    start, count = (held[0] if held else 0), len(held)
    if held == list(range(start, start + count)):

        def in_range(indices: Tensor) -> tuple[Tensor, Tensor]:
            local = indices - start
            mine = (local >= 0) & (local < count)
            return local.masked_fill(~mine, 0), mine

        return in_range
    places = torch.full((size,), -1)
    places[held] = torch.arange(count)

    def by_table(indices: Tensor) -> tuple[Tensor, Tensor]:
        inside = (indices >= 0) & (indices < size)
        local = places.to(indices.device)[indices.masked_fill(~inside, 0)]
        mine = inside & (local >= 0)
        return local.masked_fill(~mine, 0).to(indices.dtype), mine

    return by_table


@local_for("aten.embedding")
def embedding(site: Site) -> Local:
    """Over a cut vocabulary a masked lookup."""
    if not site.axes_cutting(0, (0,)):
        return plain(site)
    rows = site.operand_shapes[0][0]
    localize = localizer(site, 0, 0)
    padding = integer(site.call, "padding_idx", -1)
    if padding >= 0:
        local, mine = localize(torch.tensor(padding))
        padding = int(local) if bool(mine) else -1
    padding_idx = padding if padding >= 0 else None

    def run(weight: Tensor, indices: Tensor) -> Tensor:
        local, mine = localize(indices)
        table = weight if rows else weight.sum(0, keepdim=True)
        return F.embedding(local, table, padding_idx).masked_fill(~mine.unsqueeze(-1), 0)

    return run
