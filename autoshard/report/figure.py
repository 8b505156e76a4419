"""A figure in a report: drawn for a wide page and for a phone, or as a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from autoshard.drawing.png import to_png
from autoshard.drawing.scene import Scene
from autoshard.drawing.svg import to_svg
from autoshard.errors import RequestError
from autoshard.figures.palette import NAMES
from autoshard.report.page import clean

WIDE, NARROW = 830.0, 346.0
"""Pixels: the text column of a page, and that of a phone of 390 with its margins."""

MARGIN = 12.0
"""Around a picture that is a file of its own."""

FORMATS = ("png", "svg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One picture.

    Attributes:
        name: of its file, without an ending.
        title: its heading.
        caption: what one sees, in a sentence or two.
        draw: makes it for a width in pixels.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[float], Scene]

    def html(self) -> str:
        """The picture for both widths, its colours named for the stylesheet."""
        wide, narrow = (to_svg(self.draw(w), names=NAMES) for w in (WIDE, NARROW))
        return (
            f'<figure>\n<div class="wide">{wide}</div>\n<div class="narrow">{narrow}</div>\n'
            f"<figcaption>{clean(self.caption)}</figcaption>\n</figure>"
        )


def write_figures(
    figures: Iterable[Figure], folder: str | Path, kind: str = "png", *, width: float = WIDE
) -> list[Path]:
    """Write each figure as a file, light, for a paper or a slide; returns their paths.

    Args:
        figures: what to write.
        folder: where; it is made where it is missing.
        kind: ``png`` (two pixels a unit) or ``svg``.
        width: of each picture.

    Raises:
        RequestError: another format, or a folder that cannot be written to.
    """
    if kind not in FORMATS:
        raise RequestError(f"format {kind!r} of figures; choose one of {', '.join(FORMATS)}")
    folder = Path(folder)
    out = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            scene = figure.draw(width)
            path = folder / f"{figure.name}.{kind}"
            path.write_bytes(
                to_png(scene, margin=MARGIN)
                if kind == "png"
                else to_svg(scene, margin=MARGIN).encode()
            )
            out.append(path)
    except OSError as error:
        raise RequestError(
            f"cannot write figures into {folder}: {error.strerror}; name another folder"
        ) from error
    return out
