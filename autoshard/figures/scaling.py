"""Throughput and efficiency over the number of devices: strong and weak scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autoshard.drawing.scene import Circle, Path, Scene, Text
from autoshard.figures.labels import SMALL, Entry, Labels, around, legend
from autoshard.figures.palette import GREY, INK, PAPER, series
from autoshard.figures.plot import Axis, frame
from autoshard.figures.rows import Row, called, done, fits, groups, rate, rate_text, varying
from autoshard.figures.scale import Scale, logarithmic
from autoshard.render.units import percent_text

Kind = Literal["strong", "weak"]

MOST_CURVES = 6
"""Curves of one picture: as many as there are colours."""

_SAME = ("cluster", "seq_len", "dtype", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The best throughput at each number of devices.

    Attributes:
        name: what tells it from the other curves.
        points: (devices, samples a second), by devices; at least two.
    """

    name: str
    points: tuple[tuple[int, float], ...]

    def efficiency(self) -> tuple[tuple[int, float], ...]:
        """Throughput a device, as a share of that of the first point."""
        first_devices, first = self.points[0]
        return tuple((n, rate / first * first_devices / n) for n, rate in self.points)


def curves(rows: Sequence[Row], kind: Kind) -> tuple[Curve, ...]:
    """Curves of the rows of one model.

    Strong: the global batch stays; weak: the samples of a device stay. Of several strategies the
    fastest that fits counts. Curves with the most points come first.
    """
    known = [r for r in done(rows) if fits(r) and r.get("global_batch") and rate(r)]
    parts: dict[tuple[Any, ...], list[Row]] = {}
    for key, mine in groups(known, _SAME).items():
        for row in mine:
            batch, devices = int(row["global_batch"]), int(row["devices"])
            load = batch if kind == "strong" else batch / devices
            parts.setdefault((*key, load), []).append(row)
    vary = varying(known, _SAME)
    out = []
    for key, mine in parts.items():
        best: dict[int, float] = {}
        for row in mine:
            devices = int(row["devices"])
            best[devices] = max(best.get(devices, 0.0), rate(row))
        if len(best) < 2:
            continue
        name = f"batch {key[-1]:,}" if kind == "strong" else f"{key[-1]:g} samples a device"
        if vary:
            name = f"{called(mine[0], vary)}, {name}"
        out.append(Curve(name=name, points=tuple(sorted(best.items()))))
    return tuple(sorted(out, key=lambda c: -len(c.points)))


def scaling(title: str, found: Sequence[Curve], *, width: float) -> Scene:
    """The curves above, their efficiency below.

    Args:
        title: for those who cannot see it.
        found: at least one curve; the first ``MOST_CURVES`` are drawn.
        width: of the picture.
    """
    shown = tuple(found[:MOST_CURVES])
    height = min(300.0, max(230.0, width * 0.42))
    scene = Scene(width, 0.0, title)
    devices = sorted({n for c in shown for n, _ in c.points})
    left, right = 62.0, width - 24.0
    x = logarithmic([float(n) for n in devices], left, right, 1.12)
    y = _throughput(scene, shown, devices, x, height)
    y = _efficiency(scene, shown, devices, x, y, height * 0.72)
    entries = [Entry(series(i), c.name) for i, c in enumerate(shown)]
    entries.append(Entry(GREY, "dashed: as from the first point, without loss"))
    scene.height = 4 + legend(scene, entries, x=2, y=y, width=width - 4, ink=INK)
    return scene


def _throughput(
    scene: Scene, shown: Sequence[Curve], devices: Sequence[int], x: Scale, height: float
) -> float:
    rates = [r for c in shown for _, r in c.points]
    ideal = [c.points[0][1] * c.points[-1][0] / c.points[0][0] for c in shown]
    y = logarithmic([*rates, *ideal], height - 40, 24.0)
    across = Axis(scale=x, caption="devices", ticks=[float(n) for n in devices])
    frame(scene, across, Axis(scale=y, caption="samples/s of all devices"))
    for curve, end in zip(shown, ideal, strict=True):
        (first, start), last = curve.points[0], curve.points[-1][0]
        line = ((x(first), y(start)), (x(last), y(end)))
        scene.add(Path(points=line, stroke=GREY, width=1.2, dashed=True))
    for index, curve in enumerate(shown):
        _curve(scene, index, curve.name, curve.points, x, y, rate_text)
    return height


def _efficiency(
    scene: Scene,
    shown: Sequence[Curve],
    devices: Sequence[int],
    x: Scale,
    top: float,
    height: float,
) -> float:
    shares = [s for c in shown for _, s in c.efficiency()]
    y = Scale(low=0.0, high=max(1.05, max(shares) * 1.05), start=top + height - 40, end=top + 28)
    percent = Scale(low=0.0, high=y.high * 100, start=y.start, end=y.end)
    across = Axis(scale=x, caption="devices", ticks=[float(n) for n in devices])
    up = Axis(scale=percent, caption="efficiency a device", suffix=" %")
    frame(scene, across, up)
    labels = Labels(inside=(x.start, y.end - 8, scene.width, y.start))
    scene.add(Path(points=((x.start, y(1.0)), (x.end, y(1.0))), stroke=GREY, dashed=True))
    for index, curve in enumerate(shown):
        points = curve.efficiency()
        _curve(scene, index, curve.name, points, x, y, percent_text)
        labels.keep_free(*((x(n) - 5, y(s) - 5, x(n) + 5, y(s) + 5) for n, s in points))
    ends = sorted((c.efficiency()[-1] for c in shown), key=lambda end: end[1])
    for n, share in {ends[0], ends[-1]}:
        text = Text(x=0, y=0, text=percent_text(share), size=SMALL, color=INK, halo=True)
        labels.place(scene, around(text, x(n), y(share), 8.0)[1:])
    return top + height


def _curve(
    scene: Scene,
    index: int,
    name: str,
    points: Sequence[tuple[int, float]],
    x: Scale,
    y: Scale,
    text: Callable[[float], str],
) -> None:
    color = series(index)
    scene.add(Path(points=tuple((x(n), y(v)) for n, v in points), stroke=color, width=2.0))
    for n, value in points:
        tip = f"{name}, {n:,} devices: {text(value)}"
        scene.add(Circle(x=x(n), y=y(value), radius=4, fill=color, stroke=PAPER, tip=tip))


def by_model(rows: Sequence[Row], kind: Kind) -> Mapping[str, tuple[Curve, ...]]:
    """Curves of each model that has any."""
    found = {str(m): curves(mine, kind) for (m,), mine in groups(rows, ("model",)).items()}
    return {model: mine for model, mine in found.items() if mine}
