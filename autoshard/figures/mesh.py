"""The mesh on the nodes: which device is where, and with whom device 0 talks over each axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autoshard.drawing.scene import Rect, Scene, Text, shortened, text_width
from autoshard.figures.labels import PLAIN, SMALL
from autoshard.figures.palette import GREY, INK, PALE, PAPER, WASH, series

CELL_WIDTH, CELL_HEIGHT, GAP = 44.0, 40.0, 6.0
_PAD = 10.0
_MOST_ROWS = 3
"""Rows of nodes that are drawn; of the others, how many they are."""

_MOST_OF_A_NODE = 16


def mesh(
    axis_names: Sequence[str], sizes: Sequence[int], *, devices_per_node: int, width: float
) -> Scene:
    """Devices by number and place, node by node.

    Args:
        axis_names: of the mesh, outermost first; axes of size 1 are left out.
        sizes: their sizes; devices in row-major order, the last axis nearest.
        devices_per_node: how many devices share a node.
        width: of the picture.
    """
    active = [(n, s) for n, s in zip(axis_names, sizes, strict=True) if s > 1]
    names, lengths = [n for n, _ in active], [s for _, s in active]
    count = prod(lengths)
    per_node = min(devices_per_node, count)
    nodes = -(-count // per_node)
    said = ", ".join(f"{n}={s}" for n, s in active) or "one device"
    scene = Scene(width, 0.0, f"Mesh {said} on {nodes} {'node' if nodes == 1 else 'nodes'}")
    y = _axes(scene, names, lengths, per_node, nodes, width)
    shown = min(per_node, _MOST_OF_A_NODE)
    columns = _columns(shown, width, 4 if nodes > _MOST_ROWS else 8)
    rows = -(-shown // columns)
    node_width = columns * (CELL_WIDTH + GAP) - GAP + 2 * _PAD
    node_height = rows * (CELL_HEIGHT + GAP) - GAP + 2 * _PAD + 18
    across = max(1, int((width - 2 + GAP) // (node_width + GAP)))
    room = across * _MOST_ROWS
    drawn = list(range(nodes)) if nodes <= room else [*range(room - 1), nodes - 1]
    for place, node in enumerate(drawn):
        left = 1 + place % across * (node_width + GAP)
        top = y + place // across * (node_height + GAP)
        scene.add(
            Rect(
                x=left,
                y=top,
                width=node_width,
                height=node_height,
                radius=6,
                fill=WASH,
                stroke=PALE,
            ),
            Text(x=left + _PAD, y=top + 16, text=f"node {node}", size=SMALL, color=GREY),
        )
        first = node * per_node
        here = min(per_node, count - first)
        for index in range(min(here, shown)):
            _cell(
                scene,
                first + index,
                lengths,
                left + _PAD + index % columns * (CELL_WIDTH + GAP),
                top + _PAD + 14 + index // columns * (CELL_HEIGHT + GAP),
            )
        if here > shown:
            text = f"and {here - shown} more"
            end = left + node_width - _PAD
            scene.add(Text(x=end, y=top + 16, text=text, size=SMALL, anchor="end", color=GREY))
    y += -(-len(drawn) // across) * (node_height + GAP)
    if len(drawn) < nodes:
        hidden = f"{nodes - len(drawn):,} nodes before node {nodes - 1:,}"
        scene.add(Text(x=2, y=y + 14, text=f"not drawn: {hidden}", size=PLAIN, color=GREY))
        y += 20
    scene.height = y + 2
    return scene


def _columns(shown: int, width: float, most: int) -> int:
    """Cells a row: the largest divisor that fits, if that is not far too small."""
    most = max(1, min(shown, most, int((width - 2 - 2 * _PAD + GAP) // (CELL_WIDTH + GAP))))
    even = max(c for c in range(1, most + 1) if shown % c == 0)
    return even if even * 2 > most else most


def _axes(
    scene: Scene,
    names: Sequence[str],
    lengths: Sequence[int],
    per_node: int,
    nodes: int,
    width: float,
) -> float:
    """What each axis is; returns the lower edge."""
    y = 0.0
    for index, (name, size) in enumerate(zip(names, lengths, strict=True)):
        stride = prod(lengths[index + 1 :])
        crosses = stride * size > per_node and nodes > 1
        apart = "neighbours" if stride == 1 else f"{stride:,} apart"
        where = "across nodes" if crosses else "inside a node"
        head = shortened(f"{name}={size:,}", PLAIN, width / 2, bold=True)
        scene.add(
            Rect(x=2, y=y + 6, width=11, height=11, radius=2, fill=series(index)),
            Text(x=20, y=y + 16, text=head, size=PLAIN, bold=True, color=INK),
        )
        x = 20 + text_width(head, PLAIN, bold=True) + 10
        long = f"groups of {size:,} devices, {apart}, {where}"
        short = f"{apart}, {where}"
        note = long if x + text_width(long, PLAIN) < width else short
        note = shortened(note, PLAIN, width - x)
        scene.add(Text(x=x, y=y + 16, text=note, size=PLAIN, color=GREY))
        y += 20
    if names:
        text = "Stripes: who shares a group with device 0. Below a number: its place on each axis."
        if text_width(text, SMALL) > width - 4:
            text = "Stripes: device 0's group on each axis"
        scene.add(Text(x=2, y=y + 15, text=text, size=SMALL, color=GREY))
        y += 24
    return y + 4


def _cell(scene: Scene, device: int, lengths: Sequence[int], x: float, y: float) -> None:
    place = []
    rest = device
    for size in reversed(lengths):
        place.append(rest % size)
        rest //= size
    place.reverse()
    text, number = ", ".join(map(str, place)), str(device)
    scene.add(
        Rect(
            x=x,
            y=y,
            width=CELL_WIDTH,
            height=CELL_HEIGHT,
            radius=4,
            fill=PAPER,
            stroke=PALE,
            tip=f"device {device}: ({text})",
        ),
        Text(
            x=x + CELL_WIDTH / 2,
            y=y + 18,
            text=number,
            size=min(PLAIN, PLAIN * (CELL_WIDTH - 4) / text_width(number, PLAIN, bold=True)),
            bold=True,
            anchor="middle",
            color=INK,
        ),
    )
    if lengths:
        scene.add(
            Text(
                x=x + CELL_WIDTH / 2,
                y=y + 30,
                text=shortened(text, 9.5, CELL_WIDTH - 4),
                size=9.5,
                anchor="middle",
                color=GREY,
            )
        )
    stripe = (CELL_WIDTH - 8) / max(1, len(lengths))
    for axis in range(len(lengths)):
        if not any(p for other, p in enumerate(place) if other != axis):
            scene.add(
                Rect(
                    x=x + 4 + axis * stripe,
                    y=y + CELL_HEIGHT - 6,
                    width=stripe - 1,
                    height=4,
                    fill=series(axis),
                )
            )
