"""From values to pixels: round ticks, linear and logarithmic, with their units."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

_UNITS_S = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_UNITS_BYTES = (
    (2.0**50, "PiB"),
    (2.0**40, "TiB"),
    (2.0**30, "GiB"),
    (2.0**20, "MiB"),
    (2.0**10, "KiB"),
    (1.0, "B"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a number of an axis is counted in: ``size`` of the base unit."""

    size: float
    name: str


def time_unit(most_s: float) -> Unit:
    """The unit in which the longest time of a picture is at least 1."""
    return _unit(most_s, _UNITS_S)


def byte_unit(most: float) -> Unit:
    """The same for bytes."""
    return _unit(most, _UNITS_BYTES)


def _unit(most: float, units: tuple[tuple[float, str], ...]) -> Unit:
    for size, name in units:
        if most >= size:
            return Unit(size=size, name=name)
    size, name = units[-1]
    return Unit(size=size, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values between ``low`` and ``high`` on pixels from ``start`` to ``end``.

    Attributes:
        low: value at ``start``.
        high: value at ``end``.
        start: pixel; may be larger than ``end``.
        end: pixel.
        log: whether equal distances are equal ratios.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = log10(low), log10(high), log10(max(value, low * 1e-9))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """About ``count`` round values between low and high."""
        if self.log:
            return _log_ticks(self.low, self.high, count)
        step = round_step((self.high - self.low) / max(1, count))
        first = ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, floor(self.high / step + 1e-9) + 1)]


def linear(values: list[float], start: float, end: float, *, zero: bool = True) -> Scale:
    """A linear scale that holds all values with a little room, from 0 where ``zero``."""
    low, high = (0.0 if zero else min(values, default=0.0)), max(values, default=1.0)
    if high <= low:
        high = low + (abs(low) or 1.0)
    room = (high - low) * 0.06
    return Scale(low=low if zero else max(0.0, low - room), high=high + room, start=start, end=end)


def logarithmic(values: list[float], start: float, end: float, room: float = 1.15) -> Scale:
    """A logarithmic scale that holds all (positive) values with a little room."""
    known = [v for v in values if v > 0] or [1.0]
    return Scale(low=min(known) / room, high=max(known) * room, start=start, end=end, log=True)


def round_step(value: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``value``."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    for factor in (1, 2, 5, 10):
        if factor * power >= value * 0.999:
            return factor * power
    return 10 * power


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for factors in ((1.0, 2.0, 3.0, 5.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        found = [f * 10.0**p for p in powers for f in factors]
        found = [v for v in found if low * 0.999 <= v <= high * 1.001]
        if len(found) <= count:
            break
    if len(found) > count:
        found = found[:: ceil(len(found) / count)]
    if len(found) < 2:  # less than one step of a decade: a linear scale has round values there
        step = round_step((high - low) / max(1, count))
        found = [n * step for n in range(ceil(low / step), floor(high / step) + 1)]
    return found


def number_text(value: float) -> str:
    """A tick's number: no more digits than it needs."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.6f}".rstrip("0").rstrip(".") if abs(value) < 0.1 else f"{value:.4g}"
