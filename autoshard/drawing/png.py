"""A scene as PNG, through Pillow."""

from __future__ import annotations

import io
from functools import lru_cache
from itertools import pairwise
from math import hypot

from PIL import Image, ImageDraw, ImageFont

from autoshard.drawing.scene import Circle, Line, Path, Point, Rect, Scene, Shape, Text

_SCALE = 2  # pixels a unit, for sharp screens
_OVER = 2  # drawn larger by this and shrunk: Pillow's shapes have no soft edges
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def to_png(scene: Scene, *, margin: float = 0.0) -> bytes:
    """The picture as PNG, twice as large as the scene says, with room around it."""
    factor = _SCALE * _OVER
    size = round(scene.width * factor), round(scene.height * factor)
    image = Image.new("RGB", size, "#ffffff")
    draw = ImageDraw.Draw(image)
    for shape in scene.shapes:
        if isinstance(shape, Text) and shape.turned:
            _draw_turned(image, shape, factor)
        else:
            _draw(draw, shape, factor)
    image = image.resize((size[0] // _OVER, size[1] // _OVER), Image.Resampling.LANCZOS)
    if margin:
        edge = round(margin * _SCALE)
        framed = Image.new("RGB", (image.width + 2 * edge, image.height + 2 * edge), "#ffffff")
        framed.paste(image, (edge, edge))
        image = framed
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
        case Path():
            points = [(x * k, y * k) for x, y in shape.points]
            width = max(1, round(shape.width * k))
            if shape.fill:
                draw.polygon(points, shape.fill)
                points.append(points[0])
            if shape.stroke and shape.dashed:
                _dashed_path(draw, points, shape.stroke, width, k)
            elif shape.stroke:
                draw.line(points, shape.stroke, width, joint="curve")
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


def _draw_turned(image: Image.Image, text: Text, k: float) -> None:
    """Written level on a mask of its own, which is turned and painted through."""
    font = _font(text.size * k)
    width, height = int(font.getlength(text.text)) + 2, int(text.size * k * 1.6)
    mask = Image.new("L", (width, height))
    base = round(text.size * k * 1.1)
    ImageDraw.Draw(mask).text((0, base), text.text, 255, font, "ls")
    before = {"start": 0, "middle": width // 2, "end": width}[text.anchor]
    place = round(text.x * k) - base, round(text.y * k) + before - width
    image.paste(text.color, place, mask.transpose(Image.Transpose.ROTATE_90))


def _dashed_path(
    draw: ImageDraw.ImageDraw, points: list[Point], color: str, width: int, k: float
) -> None:
    """Dashes that go on around the corners."""
    at = 0.0
    for a, b in pairwise(points):
        at = _dashes(draw, a, b, color, width, k, at)


def _dashes(
    draw: ImageDraw.ImageDraw,
    a: Point,
    b: Point,
    color: str,
    width: int,
    k: float,
    done: float = 0.0,
) -> float:
    """Dashes from ``a`` to ``b``, of which ``done`` of the first period are drawn; what remains."""
    length = hypot(b[0] - a[0], b[1] - a[1])
    if not length:
        return done
    unit = (b[0] - a[0]) / length, (b[1] - a[1]) / length
    at = -done
    while at < length:
        start, to = max(at, 0.0), min(at + 6 * k, length)
        if to > start:
            draw.line(
                [
                    (a[0] + unit[0] * start, a[1] + unit[1] * start),
                    (a[0] + unit[0] * to, a[1] + unit[1] * to),
                ],
                color,
                width,
            )
        at += 10 * k
    return length - (at - 10 * k)


@lru_cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)  # the font that Pillow brings along
