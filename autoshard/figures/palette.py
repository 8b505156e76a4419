"""Colours and names of everything that figures show, in one place and one order.

The colours are Okabe and Ito's, told apart by nearly everybody (https://jfly.uni-koeln.de/color/,
2008), and greys. Figures use the light ones; ``dark_css`` gives a page the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.drawing.scene import Color

INK, GREY, PALE, PAPER = "#1f2933", "#5a6775", "#d9dee4", "#ffffff"
BLUE, VERMILION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
ORANGE, SKY, NEUTRAL = "#e69f00", "#56b4e9", "#9aa5b1"
BAND, WASH, PALE_VERMILION = "#e8f1f7", "#f5f7f9", "#f5c8a8"

_DARK: Mapping[Color, tuple[str, Color]] = {
    INK: ("ink", "#e6eaef"),
    GREY: ("grey", "#a3afbc"),
    PALE: ("pale", "#39434e"),
    PAPER: ("paper", "#161b21"),
    BLUE: ("blue", "#4ba3dd"),
    VERMILION: ("vermilion", "#f0834a"),
    GREEN: ("green", "#2fbf96"),
    PURPLE: ("purple", "#e09bc3"),
    ORANGE: ("orange", "#efb73e"),
    SKY: ("sky", "#8fd0f7"),
    NEUTRAL: ("neutral", "#76828f"),
    BAND: ("band", "#1d3547"),
    WASH: ("wash", "#1f262e"),
    PALE_VERMILION: ("pale-vermilion", "#7d4a2c"),
}

NAMES: Mapping[Color, str] = {color: name for color, (name, _) in _DARK.items()}
"""Name of each colour, for :func:`autoshard.drawing.svg.to_svg`."""

TIME: Mapping[str, Color] = {
    "compute": BLUE,
    "optimizer": SKY,
    "communication not hidden": VERMILION,
    "communication hidden": PALE_VERMILION,
    "waiting": NEUTRAL,
    "forward": GREEN,
    "backward": PURPLE,
}
"""What a step spends its time on."""

MEMORY: Mapping[str, Color] = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer state": SKY,
    "activations": GREEN,
    "KV cache": ORANGE,
    "gathered parameters": PURPLE,
    "temporaries": VERMILION,
    "reserve": NEUTRAL,
}
"""What a device's memory holds. Where there is a KV cache there are no gradients: one colour."""

COLLECTIVES: Mapping[str, Color] = {
    "all_reduce": BLUE,
    "all_gather": ORANGE,
    "reduce_scatter": GREEN,
    "all_to_all": PURPLE,
}

STRATEGIES: Mapping[str, Color] = {
    "auto": VERMILION,
    "hybrid": PURPLE,
    "tensor": ORANGE,
    "fsdp": GREEN,
    "data": BLUE,
}
"""Colour of what was asked for; anything else is grey."""

_SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)


def series(index: int) -> Color:
    """Colour of one of several lines or axes."""
    return _SERIES[index % len(_SERIES)]


def dark_css() -> str:
    """Rules that give every named colour its dark form, to stand in a media query."""
    return "".join(
        f".f-{name}{{fill:{dark}}}.s-{name}{{stroke:{dark}}}" for name, dark in _DARK.values()
    )
