"""Products of groups of rows, each with the matrix of its expert, on a shard of either."""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.normal.experts import has_kernel, some_experts
from autoshard.runtime.local.site import Local, Site, local_for
from autoshard.runtime.shards import positions


@local_for("autoshard.experts")
def experts(site: Site) -> Local:
    """Those that this device has; the tokens of others' experts give zeros."""
    every = site.call.shapes[3][0]
    here = positions(every, 0, site.operands[3], site.mesh, site.coordinate)
    place = torch.full((every,), len(here))
    place[here] = torch.arange(len(here))

    def run(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        at = place.to(x.device)
        whole = len(here) == every
        return some_experts(x, index, weight, gate_up, down, at, site.call.attrs, every=whole)

    return run


@local_for("aten._grouped_mm")
def grouped_mm(site: Site) -> Local:
    """Torch's own where it can be; else one product an expert."""
    rows_in, experts_in = site.call.shapes[0][0], site.call.shapes[1][0]
    rows = positions(rows_in, 0, site.operands[0], site.mesh, site.coordinate)
    experts = positions(experts_in, 0, site.operands[1], site.mesh, site.coordinate)
    first, count = (rows[0] if rows else 0), len(rows)
    contiguous = rows == list(range(first, first + count))
    every = len(experts) == experts_in

    def ends(offs: Tensor) -> Tensor:
        """How many of this device's rows lie before each expert's end."""
        if contiguous:
            return (offs - first).clamp(0, count)
        return torch.searchsorted(torch.tensor(rows, device=offs.device), offs).to(offs.dtype)

    def run(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        until = ends(offs)
        if every and has_kernel(x, weight):
            return torch.ops.aten._grouped_mm.default(x, weight, until)  # type: ignore[no-any-return]
        return _one_by_one(x, weight, [0, *until.tolist()], experts)

    return run


def _one_by_one(x: Tensor, weight: Tensor, ends: list[int], experts: list[int]) -> Tensor:
    """Rows of experts that are not among ``experts`` give zeros."""
    parts: list[Tensor] = []
    done = 0
    for place, expert in enumerate(experts):
        start, stop = ends[expert], ends[expert + 1]
        if start > done:
            parts.append(x.new_zeros(start - done, weight.shape[-1]))
        parts.append(x[start:stop] @ weight[place])
        done = stop
    parts.append(x.new_zeros(len(x) - done, weight.shape[-1]))
    out = torch.cat(parts)
    # Where no expert is here, the result still hangs on both operands.
    return out if experts else out + 0 * (x.sum() + weight.sum())
