"""Predicted against measured, with a band of 10 per cent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.drawing.scene import Circle, Color, Line, Path, Scene, Text
from autoshard.figures.labels import SMALL, Entry, Labels, around, legend
from autoshard.figures.palette import BAND, GREY, INK, PAPER, series
from autoshard.figures.plot import Axis, frame
from autoshard.figures.rows import Row, called, varying
from autoshard.figures.scale import Scale, Unit, byte_unit, logarithmic, time_unit
from autoshard.render.units import bytes_text, seconds_text

BAND_SHARE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One point that was predicted and measured.

    Attributes:
        label: what it is.
        kind: its model, say, for the colour.
        predicted: a value.
        measured: the same, measured.
        low: least that was measured, where known.
        high: most that was measured.
    """

    label: str
    kind: str
    predicted: float
    measured: float
    low: float | None = None
    high: float | None = None

    @property
    def is_inside(self) -> bool:
        """Whether the prediction is within the band around what was measured."""
        return abs(self.predicted / self.measured - 1) <= BAND_SHARE


def time_pairs(rows: Sequence[Row]) -> list[Pair]:
    """Seconds of forward and backward (of the step where that is not known)."""
    known = [r for r in rows if r.get("measured_step_time_s") and _predicted_s(r)]
    vary = varying(known) or ["model"]
    return [
        Pair(
            label=f"{called(r, vary)}, {r['mesh']}" if r.get("mesh") else called(r, vary),
            kind=str(r["model"]),
            predicted=_predicted_s(r),
            measured=float(r["measured_step_time_s"]),
            low=_or_none(r.get("measured_low_s")),
            high=_or_none(r.get("measured_high_s")),
        )
        for r in known
    ]


def memory_pairs(rows: Sequence[Row]) -> list[Pair]:
    """Peak bytes without the reserve (all of them where that is not known)."""
    known = [r for r in rows if r.get("measured_memory_bytes") and _predicted_bytes(r)]
    vary = varying(known) or ["model"]
    return [
        Pair(
            label=f"{called(r, vary)}, {r['mesh']}" if r.get("mesh") else called(r, vary),
            kind=str(r["model"]),
            predicted=_predicted_bytes(r),
            measured=float(r["measured_memory_bytes"]),
        )
        for r in known
    ]


def _predicted_s(row: Row) -> float:
    return float(row.get("forward_backward_s") or row.get("step_time_s") or 0.0)


def _predicted_bytes(row: Row) -> float:
    return float(row.get("comparable_memory_bytes") or row.get("memory_bytes") or 0.0)


def _or_none(value: float | None) -> float | None:
    return None if not value else float(value)


def times(title: str, pairs: Sequence[Pair], *, width: float) -> Scene:
    """The pairs in seconds."""
    unit = time_unit(min((p.measured for p in pairs), default=1.0))
    return _parity(title, pairs, unit, seconds_text, width)


def memories(title: str, pairs: Sequence[Pair], *, width: float) -> Scene:
    """The pairs in bytes."""
    unit = byte_unit(min((p.measured for p in pairs), default=1.0))
    return _parity(title, pairs, unit, bytes_text, width)


def _parity(
    title: str,
    pairs: Sequence[Pair],
    unit: Unit,
    text: Callable[[float], str],
    width: float,
) -> Scene:
    side = min(width - 90, 420.0)
    left, top = 66.0, 26.0
    scene = Scene(width, top + side + 42, title)
    ends = [v for p in pairs for v in (p.predicted, p.measured, p.low, p.high) if v]
    x = logarithmic(ends, left, left + side, 1.25)
    y = logarithmic(ends, top + side, top, 1.25)
    frame(
        scene,
        Axis(scale=x, caption="measured", unit=unit),
        Axis(scale=y, caption="predicted", unit=unit),
    )
    _band(scene, x, y)
    kinds = list(dict.fromkeys(p.kind for p in pairs))
    labels = Labels(inside=(left, top, width - 2, top + side))
    for pair in pairs:
        _pair(scene, pair, series(kinds.index(pair.kind)), x, y, text)
        at, up = x(pair.measured), y(pair.predicted)
        labels.keep_free((at - 5, up - 5, at + 5, up + 5))
    for pair in sorted(pairs, key=lambda p: p.is_inside):
        label = Text(x=0, y=0, text=pair.label, size=SMALL, color=INK, halo=True)
        if not pair.is_inside or len(pairs) <= 12:
            labels.place(scene, around(label, x(pair.measured), y(pair.predicted), 9.0))
    entries = [Entry(series(i), kind) for i, kind in enumerate(kinds)]
    entries.append(Entry(BAND, f"within {BAND_SHARE:.0%} of what was measured"))
    scene.height = 4 + legend(scene, entries, x=2, y=scene.height, width=width - 4, ink=INK)
    return scene


def _band(scene: Scene, x: Scale, y: Scale) -> None:
    """Around the diagonal; straight, since both axes are logarithmic."""
    low, high = x.low, x.high
    corners = (
        (low, low),
        (low, low * (1 + BAND_SHARE)),
        (high / (1 + BAND_SHARE), high),
        (high, high),
        (high, high * (1 - BAND_SHARE)),
        (low / (1 - BAND_SHARE), low),
    )
    points = tuple((x(a), y(b)) for a, b in corners)
    scene.shapes.insert(0, Path(points=points, fill=BAND))
    scene.add(Line(x1=x(low), y1=y(low), x2=x(high), y2=y(high), color=GREY, dashed=True))


def _pair(
    scene: Scene,
    pair: Pair,
    color: Color,
    x: Scale,
    y: Scale,
    text: Callable[[float], str],
) -> None:
    at, up = x(pair.measured), y(pair.predicted)
    if pair.low and pair.high:
        scene.add(Line(x1=x(pair.low), y1=up, x2=x(pair.high), y2=up, color=color, width=1.5))
    off = pair.predicted / pair.measured - 1
    tip = (
        f"{pair.label}: predicted {text(pair.predicted)}, measured {text(pair.measured)} "
        f"({off:+.0%})"
    )
    scene.add(Circle(x=at, y=up, radius=5, fill=color, stroke=PAPER, tip=tip))
