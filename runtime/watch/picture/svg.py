"""A scene as SVG, written by hand."""

from __future__ import annotations

from html import escape

from autoshard.runtime.watch.picture.scene import Circle, Line, Rect, Scene, Shape, Text

FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


def to_svg(scene: Scene) -> str:
    """The picture as one SVG document, without outside references."""
    width, height = _number(scene.width), _number(scene.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="{FONTS}">',
        f"<title>{escape(scene.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *(_shape(shape) for shape in scene.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _shape(shape: Shape) -> str:
    match shape:
        case Rect():
            return _element(
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
            return _element(
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
        case Circle():
            return _element(
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
            attributes = _attributes(
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
            )
            return f"<text{attributes}>{escape(shape.text)}</text>"


def _element(name: str, tip: str, **attributes: object) -> str:
    text = _attributes(**attributes)
    return f"<{name}{text}><title>{escape(tip)}</title></{name}>" if tip else f"<{name}{text}/>"


def _attributes(**attributes: object) -> str:
    return "".join(
        f' {key.replace("_", "-")}="{_number(v) if isinstance(v, float | int) else escape(str(v))}"'
        for key, v in attributes.items()
        if v is not None
    )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
