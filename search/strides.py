"""Which views of a tensor need a copy: strides, as torch's ``reshape`` reckons with them."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.sharding.layout import Shape

Strides = tuple[int, ...]


def contiguous(shape: Sequence[int]) -> Strides:
    """Strides of a row-major tensor."""
    out: list[int] = []
    step = 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def is_contiguous(shape: Shape, strides: Strides) -> bool:
    """Whether the memory is in row-major order; dims of one item do not matter."""
    return all(
        size == 1 or a == b for size, a, b in zip(shape, strides, contiguous(shape), strict=True)
    )


def viewed(shape: Shape, strides: Strides, new: Shape) -> Strides | None:
    """Strides of a tensor seen in shape ``new``; None where that needs a copy.

    As ``at::detail::computeStride``: runs of dims whose memory hangs together may be cut anew.
    """
    if 0 in shape or 0 in new:
        return contiguous(new)
    out = [0] * len(new)
    place = len(new) - 1
    base = strides[-1] if strides else 1
    run = seen = 1
    for dim in range(len(shape) - 1, -1, -1):
        run *= shape[dim]
        ends = dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != run * base)
        if not ends:
            continue
        while place >= 0 and (seen < run or new[place] == 1):
            out[place] = seen * base
            seen *= new[place]
            place -= 1
        if seen != run:
            return None
        if dim:
            base = strides[dim - 1]
            run = seen = 1
    if not shape:
        return contiguous(new)
    return tuple(out) if place < 0 else None
