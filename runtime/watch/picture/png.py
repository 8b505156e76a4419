"""A scene as PNG, through Pillow."""

from __future__ import annotations

import io
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from autoshard.runtime.watch.picture.scene import Circle, Line, Rect, Scene, Shape, Text

_SCALE = 2  # pixels a unit, for sharp screens
_OVER = 2  # drawn larger by this and shrunk: Pillow's shapes have no soft edges
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def to_png(scene: Scene) -> bytes:
    """The picture as PNG, twice as large as the scene says."""
    factor = _SCALE * _OVER
    size = round(scene.width * factor), round(scene.height * factor)
    image = Image.new("RGB", size, "#ffffff")
    draw = ImageDraw.Draw(image)
    for shape in scene.shapes:
        _draw(draw, shape, factor)
    image = image.resize((size[0] // _OVER, size[1] // _OVER), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _draw(draw: ImageDraw.ImageDraw, shape: Shape, k: float) -> None:
    match shape:
        case Rect():
            box = (
                shape.x * k,
                shape.y * k,
                (shape.x + shape.width) * k,
                (shape.y + shape.height) * k,
            )
            width = max(1, round(shape.stroke_width * k)) if shape.stroke else 0
            if shape.dashed and shape.stroke:
                if shape.fill:
                    draw.rounded_rectangle(box, shape.radius * k, shape.fill)
                x1, y1, x2, y2 = box
                for a, b in (
                    ((x1, y1), (x2, y1)),
                    ((x2, y1), (x2, y2)),
                    ((x2, y2), (x1, y2)),
                    ((x1, y2), (x1, y1)),
                ):
                    _dashes(draw, a, b, shape.stroke, width, k)
                return
            draw.rounded_rectangle(box, shape.radius * k, shape.fill, shape.stroke, width)
        case Line():
            a, b = (shape.x1 * k, shape.y1 * k), (shape.x2 * k, shape.y2 * k)
            width = max(1, round(shape.width * k))
            if shape.dashed:
                _dashes(draw, a, b, shape.color, width, k)
                return
            draw.line([a, b], shape.color, width)
            if shape.width >= 2:
                for x, y in (a, b):
                    draw.ellipse(
                        (x - width / 2, y - width / 2, x + width / 2, y + width / 2), shape.color
                    )
        case Circle():
            x, y, r = shape.x * k, shape.y * k, shape.radius * k
            width = max(1, round(shape.stroke_width * k))
            draw.ellipse((x - r, y - r, x + r, y + r), shape.fill, shape.stroke, width)
        case Text():
            draw.text(
                (shape.x * k, shape.y * k),
                shape.text,
                shape.color,
                _font(shape.size * k),
                _ANCHORS[shape.anchor],
                stroke_width=round(2 * k) if shape.halo else round(0.2 * k) if shape.bold else 0,
                stroke_fill="#ffffff" if shape.halo else shape.color,
            )
            if shape.halo and shape.bold:
                draw.text(
                    (shape.x * k, shape.y * k),
                    shape.text,
                    shape.color,
                    _font(shape.size * k),
                    _ANCHORS[shape.anchor],
                    stroke_width=round(0.2 * k),
                    stroke_fill=shape.color,
                )


def _dashes(
    draw: ImageDraw.ImageDraw,
    a: tuple[float, float],
    b: tuple[float, float],
    color: str,
    width: int,
    k: float,
) -> None:
    length = ((b[0] - a[0]) ** 2 + (b[1] - a[1]) ** 2) ** 0.5
    if not length:
        return
    unit = (b[0] - a[0]) / length, (b[1] - a[1]) / length
    at = 0.0
    while at < length:
        to = min(at + 6 * k, length)
        draw.line(
            [
                (a[0] + unit[0] * at, a[1] + unit[1] * at),
                (a[0] + unit[0] * to, a[1] + unit[1] * to),
            ],
            color,
            width,
        )
        at += 10 * k


@lru_cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)  # the font that Pillow brings along
