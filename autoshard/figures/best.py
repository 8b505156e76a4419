"""The best strategy for each model and number of devices, as a map."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.drawing.scene import Color, Rect, Scene, Text, shortened, text_width
from autoshard.figures.labels import PLAIN, SMALL, Entry, legend
from autoshard.figures.palette import GREY, INK, NEUTRAL, PALE, PAPER, STRATEGIES, WASH
from autoshard.figures.rows import (
    KINDS,
    Row,
    called,
    done,
    fits,
    groups,
    kind_of,
    mesh_text,
    rate,
    rate_text,
)
from autoshard.render.units import count_text

_CELL = 46.0


def best_rows(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """The row with the highest throughput that fits, by model and devices."""
    out: dict[tuple[str, int], Row] = {}
    for row in done(rows):
        key = str(row["model"]), int(row["devices"])
        if fits(row) and (key not in out or rate(row) > rate(out[key])):
            out[key] = row
    return out


def strategy_map(title: str, rows: Sequence[Row], *, width: float) -> Scene:
    """Models down, devices across; a cell says what is best there, its mesh and its rate.

    Args:
        title: for those who cannot see it.
        rows: of one cluster.
        width: of the picture.
    """
    scene = Scene(width, 0.0, title)
    models = [str(m) for (m,) in groups(rows, ("model",))]
    devices = sorted({int(r["devices"]) for r in rows})
    found = best_rows(rows)
    names = max((text_width(m, PLAIN) for m in models), default=0.0)
    left = min(names, 0.3 * width) + 10
    cell = (width - left - 2) / max(1, len(devices))
    for column, count in enumerate(devices):
        x = left + (column + 0.5) * cell
        scene.add(Text(x=x, y=27, text=f"{count:,}", size=SMALL, anchor="middle", color=GREY))
    scene.add(Text(x=left, y=11, text="devices", size=SMALL, color=GREY))
    y = 36.0
    for model in models:
        name = shortened(model, PLAIN, left - 10)
        scene.add(Text(x=2, y=y + _CELL / 2 + 4, text=name, size=PLAIN, color=INK))
        for column, count in enumerate(devices):
            row = found.get((model, count))
            tried = any(str(r["model"]) == model and int(r["devices"]) == count for r in rows)
            _cell(scene, row, left + column * cell, y, cell, tried)
        y += _CELL + 3
    kinds = {kind_of(r) for r in found.values()}
    entries = [Entry(color(k), k) for k in (*KINDS, "auto") if k in kinds]
    if any((m, n) not in found for m in models for n in devices):
        entries.append(Entry(GREY, "empty: nothing fits, or not tried", hollow=True))
    scene.height = 4 + legend(scene, entries, x=2, y=y + 4, width=width - 4, ink=INK)
    return scene


def color(kind: str) -> Color:
    """Colour of what a plan amounts to."""
    return STRATEGIES.get(kind, NEUTRAL)


def _cell(scene: Scene, row: Row | None, x: float, y: float, cell: float, tried: bool) -> None:
    middle = x + cell / 2
    scene.add(
        Rect(
            x=x + 1,
            y=y,
            width=cell - 2,
            height=_CELL,
            radius=4,
            fill=PAPER if row else WASH,
            stroke=PALE,
        )
    )
    if row is None:
        text = "nothing fits" if tried else "not tried"
        if text_width(text, 10) < cell - 4:
            scene.add(
                Text(x=middle, y=y + _CELL / 2 + 4, text=text, size=10, anchor="middle", color=GREY)
            )
        return
    kind = kind_of(row)
    what = called(row, ("model", "cluster", "devices", "global_batch"))
    tip = f"{what}: {row.get('label') or kind}, {rate_text(rate(row))}"
    scene.add(Rect(x=x + 1, y=y, width=cell - 2, height=6, fill=color(kind), tip=tip))
    lines = [
        (kind, 12.0, True),
        (mesh_text(row), 11.0, False),
        (f"{count_text(rate(row))}/s", 11.0, False),
    ]
    base = y + 18.0
    for text, size, bold in lines:
        while size > 8.5 and text_width(text, size, bold=bold) > cell - 5:
            size -= 0.5
        if text and text_width(text, size, bold=bold) <= cell - 4:
            scene.add(
                Text(x=middle, y=base, text=text, size=size, anchor="middle", bold=bold, color=INK)
            )
        base += 12.5
