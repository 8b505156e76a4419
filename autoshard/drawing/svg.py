"""A scene as SVG, written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from autoshard.drawing.scene import Circle, Color, Line, Path, Rect, Scene, Shape, Text

FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


def to_svg(scene: Scene, *, names: Mapping[Color, str] | None = None, margin: float = 0.0) -> str:
    """The picture as one SVG document, without outside references.

    Args:
        scene: what to draw.
        names: names of colours, for a picture inside a page: a shape that is filled (or drawn) in
            one of them has the class ``f-NAME`` (or ``s-NAME``), so that a stylesheet can give it
            another colour; the attributes hold the scene's own. The background is then the page's.
        margin: room around it.
    """
    draw = _Writer(names or {})
    edge = _number(-margin)
    width, height = (_number(side + 2 * margin) for side in (scene.width, scene.height))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="{edge} {edge} {width} {height}" role="img" font-family="{FONTS}">',
        f"<title>{_text(scene.title)}</title>",
        *([] if names else [_background(edge, width, height)]),
        *(draw.shape(shape) for shape in scene.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _background(edge: str, width: str, height: str) -> str:
    place = "" if edge == "0" else f' x="{edge}" y="{edge}"'
    return f'<rect{place} width="{width}" height="{height}" fill="#ffffff"/>'


class _Writer:
    def __init__(self, names: Mapping[Color, str]) -> None:
        self.names = names

    def shape(self, shape: Shape) -> str:
        match shape:
            case Rect():
                return self.element(
                    "rect",
                    shape.tip,
                    x=shape.x,
                    y=shape.y,
                    width=shape.width,
                    height=shape.height,
                    rx=shape.radius or None,
                    fill=shape.fill or "none",
                    stroke=shape.stroke,
                    stroke_width=shape.stroke_width if shape.stroke else None,
                    stroke_dasharray="6 4" if shape.dashed else None,
                )
            case Line():
                return self.element(
                    "line",
                    shape.tip,
                    x1=shape.x1,
                    y1=shape.y1,
                    x2=shape.x2,
                    y2=shape.y2,
                    stroke=shape.color,
                    stroke_width=shape.width,
                    stroke_dasharray="6 4" if shape.dashed else None,
                    stroke_linecap=None if shape.dashed else "round",
                )
            case Path():
                points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
                return self.element(
                    "polygon" if shape.fill else "polyline",
                    shape.tip,
                    points=points,
                    fill=shape.fill or "none",
                    stroke=shape.stroke,
                    stroke_width=shape.width if shape.stroke else None,
                    stroke_dasharray="6 4" if shape.dashed else None,
                    stroke_linejoin="round" if shape.stroke else None,
                )
            case Circle():
                return self.element(
                    "circle",
                    shape.tip,
                    cx=shape.x,
                    cy=shape.y,
                    r=shape.radius,
                    fill=shape.fill,
                    stroke=shape.stroke,
                    stroke_width=shape.stroke_width,
                )
            case Text():
                turn = f"rotate(-90 {_number(shape.x)} {_number(shape.y)})"
                attributes = self.attributes(
                    x=shape.x,
                    y=shape.y,
                    font_size=shape.size,
                    fill=shape.color,
                    text_anchor=None if shape.anchor == "start" else shape.anchor,
                    font_weight="600" if shape.bold else None,
                    paint_order="stroke" if shape.halo else None,
                    stroke="#ffffff" if shape.halo else None,
                    stroke_width=4 if shape.halo else None,
                    stroke_linejoin="round" if shape.halo else None,
                    transform=turn if shape.turned else None,
                )
                return f"<text{attributes}>{_text(shape.text)}</text>"

    def element(self, name: str, tip: str, **attributes: object) -> str:
        text = self.attributes(**attributes)
        return f"<{name}{text}><title>{_text(tip)}</title></{name}>" if tip else f"<{name}{text}/>"

    def attributes(self, **attributes: object) -> str:
        classes = [
            f"{key[0]}-{self.names[color]}"
            for key in ("fill", "stroke")
            if isinstance(color := attributes.get(key), str) and color in self.names
        ]
        if classes:
            attributes["class"] = " ".join(classes)
        return "".join(
            f' {key.replace("_", "-")}="{_number(v) if isinstance(v, float | int) else _text(v)}"'
            for key, v in attributes.items()
            if v is not None
        )


def _text(value: object) -> str:
    """Escaped, and without what XML has no place for."""
    return escape("".join(c if c >= " " or c in "\t\n" else "\ufffd" for c in str(value)))


def _number(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
