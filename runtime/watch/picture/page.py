"""A picture and its messages as one HTML page without outside references or scripts."""

from __future__ import annotations

from html import escape

from autoshard.drawing.scene import Scene
from autoshard.drawing.svg import FONTS, to_svg
from autoshard.runtime.watch.picture.reading import StepView
from autoshard.runtime.watch.records import bytes_text, seconds_text

_MOST_ROWS = 1000
_STYLE = f"""
body {{ font-family: {FONTS}; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color: #1f2933; background: #f5f7fa; }}
figure {{ margin: 0; background: #fff; border-radius: 8px; overflow-x: auto; }}
svg {{ display: block; max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; }}
th, td {{ padding: 0.25rem 0.9rem; text-align: right; border-bottom: 1px solid #cbd2d9; }}
th:nth-child(-n+5), td:nth-child(-n+5) {{ text-align: left; }}
@media (prefers-color-scheme: dark) {{ body {{ color: #e4e7eb; background: #1f2933; }} }}
"""


def to_html(scene: Scene, step: StepView) -> str:
    """The page: the picture, then every message of rank 0 in the order of issue."""
    rank = step.ranks[0] if step.ranks else None
    messages = [] if rank is None else rank.messages
    rows = []
    for number, m in enumerate(messages[:_MOST_ROWS]):
        cells = (
            str(number),
            m.op,
            m.axis,
            m.phase,
            m.value,
            bytes_text(m.num_bytes),
            seconds_text(m.start_s),
            seconds_text(m.end_s - m.start_s),
            "" if m.predicted_s is None else seconds_text(m.predicted_s),
            seconds_text(m.blocked_s),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    heads = (
        "number",
        "op",
        "axis",
        "phase",
        "value",
        "bytes",
        "issued at",
        "measured",
        "predicted",
        "waited for",
    )
    rest = len(messages) - _MOST_ROWS
    more = f"<p>{rest} messages more</p>" if rest > 0 else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(scene.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<figure>\n{to_svg(scene)}</figure>\n<h2>Messages of rank 0</h2>\n<table>\n<tr>"
        + "".join(f"<th>{h}</th>" for h in heads)
        + "</tr>\n"
        + "\n".join(rows)
        + f"\n</table>\n{more}</body>\n</html>\n"
    )
