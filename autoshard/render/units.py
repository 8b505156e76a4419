"""Numbers as people read them: GiB, ms, TFLOP."""

from __future__ import annotations


def bytes_text(num_bytes: float) -> str:
    """``1.50 GiB``."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def flops_text(flops: float) -> str:
    """``2.10 TFLOP``."""
    return _scaled(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def count_text(count: float) -> str:
    """``8.03 B`` (billion), ``124 M``, ``512``."""
    return _scaled(count, 1000, ("", "k", "M", "B", "T"))


def seconds_text(seconds: float) -> str:
    """``12.3 ms``."""
    if seconds == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * 0.9995:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} us"


def percent_text(share: float) -> str:
    """``12 %``; ``< 1 %`` where that would read as nothing."""
    if 0 < share < 0.005:
        return "< 1 %"
    return f"{share:.0%}".replace("%", " %")


def difference_text(predicted: float, measured: float) -> str:
    """How far the measured figure is from the predicted one: ``+12 %``."""
    if not predicted:
        return "" if not measured else "predicted 0"
    return f"{measured / predicted - 1:+.0%}".replace("%", " %")


def bar(share: float, width: int = 20) -> str:
    """A bar of ``width`` characters for all."""
    return "\u2588" * round(max(0.0, min(share, 1.0)) * width)


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= step * 0.9995 and index < len(units) - 1:
        value /= step
        index += 1
    text = f"{value:.0f}" if index == 0 else _digits(value)
    return f"{text} {units[index]}".rstrip()


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
