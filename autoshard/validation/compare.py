"""Local parts of all devices beside the whole value: how far apart are they?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autoshard.runtime.shards import take_shard
from autoshard.sharding.collective import Collective
from autoshard.sharding.layout import Layout, P, R, Shape, coordinates

Coordinate = tuple[int, ...]


def deviation(
    parts: Mapping[Coordinate, Tensor | None],
    layout: Layout,
    whole: Tensor,
    mesh: Shape,
    floor: float = 0.0,
) -> float:
    """Largest difference between the devices' parts and ``whole``, over its largest magnitude.

    Summands are added; every replica counts. A part that is missing, of another shape or not
    finite where the whole is counts as infinitely far.

    Args:
        parts: by coordinate.
        layout: of one half: R, P and cuts.
        whole: the right value.
        mesh: axis sizes.
        floor: smallest magnitude to compare with: of a value that is zero but for rounding, as
            the gradient of a bias before a batch norm, only the rounding differs.
    """
    if not whole.numel():
        return 0.0
    summed = [axis for axis, s in enumerate(layout) if s is P]
    single = tuple(R if s is P else s for s in layout)
    totals: dict[Coordinate, Tensor] = {}
    for at in coordinates(mesh):
        part = parts.get(at)
        if part is None:
            return float("inf")
        base = tuple(0 if axis in summed else i for axis, i in enumerate(at))
        totals[base] = totals[base] + part if base in totals else part
    scale = max(magnitude(whole), floor)
    worst = 0.0
    for at, part in totals.items():
        right = take_shard(whole, single, mesh, at)
        if part.shape != right.shape:
            return float("inf")
        if not part.numel():
            continue
        wide = torch.complex128 if right.is_complex() else torch.float64
        part, right = part.to(wide), right.to(wide)
        if not torch.isfinite(right).all():
            same = torch.allclose(part, right, rtol=1e-6, atol=0.0, equal_nan=True)
            worst = max(worst, 0.0 if same else float("inf"))
            continue
        difference = float((part - right).abs().max())
        if difference != difference:
            return float("inf")
        if difference:
            worst = max(worst, difference / scale if scale else difference)
    return worst


def magnitude(whole: Tensor) -> float:
    """Largest magnitude; 1 for what is not floating, where any difference is a whole one."""
    if not (whole.is_floating_point() or whole.is_complex()):
        return 1.0
    return float(whole.abs().max()) if whole.numel() else 0.0


def first_difference(predicted: Sequence[Collective], issued: Sequence[Collective]) -> str:
    """Where two ordered lists first differ, in words; empty where they do not."""
    for index, (p, i) in enumerate(zip(predicted, issued, strict=False)):
        if p.key != i.key:
            return f"collective {index}: predicted {p}, issued {i}"
    if len(predicted) > len(issued):
        return f"collective {len(issued)}: predicted {predicted[len(issued)]}, nothing was issued"
    if len(issued) > len(predicted):
        return f"collective {len(predicted)}: issued {issued[len(predicted)]}, none was predicted"
    return ""


def count_differences(predicted: Sequence[Collective], issued: Sequence[Collective]) -> int:
    """Number of places at which two ordered lists differ, surplus items included."""
    unequal = sum(p.key != i.key for p, i in zip(predicted, issued, strict=False))
    return unequal + abs(len(predicted) - len(issued))
