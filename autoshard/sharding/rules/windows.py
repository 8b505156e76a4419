"""Operators that slide a window over spatial dims: convolutions, pooling, interpolation.

Spatial dims stay whole: a window at a shard's edge would need its neighbour's rows.
"""

from __future__ import annotations

from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Rule
from autoshard.sharding.rules.dims import integer, letters, linear_groups, single


@rule_for(
    "aten.conv1d",
    "aten.conv2d",
    "aten.conv3d",
    "aten.convolution",
    "aten.conv_transpose1d",
    "aten.conv_transpose2d",
    "aten.conv_transpose3d",
)
def convolution(call: OpCall) -> Rule | None:
    """``n (g c) x y, (g o) c p q -> n (g o) u v``; spatial dims and windows whole.

    A transposed one has ``(g c) o p q``. Groups, channels in a group (contracted) and outputs of a
    group may all be cut. None with a bias: the normal form adds it afterwards.
    """
    if len(call.shapes) != 2:
        return None
    image, window = call.shapes
    spatial = len(window) - 2
    groups = integer(call, "groups", 1)
    transposed = bool(call.attrs.get("transposed")) or "transpose" in call.family
    names = [tuple(f"{letter}{i}" for i in range(spatial)) for letter in "xwy"]
    channel = len(image) - spatial - 1
    batch = ("n",) if channel else ()
    c = image[channel] // groups
    o = call.result[channel] // groups
    sizes = {"g": groups, "c": c, "o": o} | ({"n": image[0]} if batch else {})
    for row, shape in zip(names, (image, window, call.result), strict=True):
        sizes |= zip(row, shape[len(shape) - spatial :], strict=True)

    def grouped(name: str) -> tuple[str, ...]:
        return tuple(f for f in ("g", name) if sizes[f] > 1) or (name,)

    weight = (grouped("c"), ("o",)) if transposed else (grouped("o"), ("c",))
    return Rule(
        operands=(
            (*single(batch), grouped("c"), *single(names[0])),
            (*weight, *single(names[1])),
        ),
        result=(*single(batch), grouped("o"), *single(names[2])),
        sizes=sizes,
        whole=frozenset(f for row in names for f in row),
        linear=linear_groups(call, [[0], [1]]),
        anchors=frozenset({"n", "g", "c", "o"} & sizes.keys()),
    )


def _windowed(call: OpCall, spatial: int, *, linear: bool) -> Rule:
    shape = call.shapes[0]
    kept = letters(len(shape) - spatial)
    before, after = (tuple(f"{letter}{i}" for i in range(spatial)) for letter in "xy")
    return Rule(
        operands=(single((*kept, *before)),),
        result=single((*kept, *after)),
        sizes={
            **dict(zip((*kept, *before), shape, strict=True)),
            **dict(zip(after, call.result[len(kept) :], strict=True)),
        },
        whole=frozenset({*before, *after}),
        linear=linear_groups(call, [[0]] if linear else ()),
    )


@rule_for("aten.pixel_shuffle")
def pixel_shuffle(call: OpCall) -> Rule:
    """``n (c r) x y -> n c u v``; r and spatial dims whole."""
    shape, result = call.shapes[0], call.result
    lead = tuple(f"n{i}" for i in range(len(shape) - 3))
    sizes = dict(zip(lead, shape[:-3], strict=True))
    sizes |= {"c": result[-3], "r": shape[-3] // result[-3]}
    sizes |= {"x": shape[-2], "y": shape[-1], "u": result[-2], "v": result[-1]}
    return Rule(
        operands=((*single(lead), ("c", "r"), *single("xy")),),
        result=(*single(lead), *single("cuv")),
        sizes=sizes,
        whole=frozenset("rxyuv"),
        linear=linear_groups(call, [[0]]),
    )


MAXIMA = tuple(f"aten.{name}{n}d" for name in ("max_pool", "adaptive_max_pool") for n in (1, 2, 3))
AVERAGES = tuple(
    f"aten.{name}{n}d" for name in ("avg_pool", "adaptive_avg_pool") for n in (1, 2, 3)
)
INTERPOLATIONS = (
    "aten.upsample_nearest1d",
    "aten.upsample_nearest2d",
    "aten.upsample_nearest3d",
    "aten._upsample_nearest_exact1d",
    "aten._upsample_nearest_exact2d",
    "aten.upsample_linear1d",
    "aten.upsample_bilinear2d",
    "aten.upsample_bicubic2d",
    "aten.upsample_trilinear3d",
)


def _spatial(call: OpCall) -> int:
    return int(call.family[-2])


@rule_for(*MAXIMA)
def max_pool(call: OpCall) -> Rule:
    """``n c x y -> n c u v``; spatial dims whole."""
    return _windowed(call, _spatial(call), linear=False)


@rule_for(*AVERAGES, *INTERPOLATIONS)
def average(call: OpCall) -> Rule:
    """``n c x y -> n c u v``; spatial dims whole; each result is a weighted sum."""
    return _windowed(call, _spatial(call), linear=True)
