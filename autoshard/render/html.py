"""The same tables as an HTML fragment: no scripts, nothing from outside, names escaped.

Colours are inherited or half transparent, so that it reads in a light and in a dark notebook.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from autoshard.plan import PlanDocument
from autoshard.render.plan import plan_sections
from autoshard.render.sections import KINDS, Section

_STYLE = """
.autoshard{font:13px/1.45 system-ui,sans-serif;color:inherit;max-width:72rem}
.autoshard h4{font-size:1em;margin:1.1em 0 .3em}
.autoshard .good{color:#2e9e5b}.autoshard .bad{color:#d9534f}.autoshard .warn{color:#b8860b}
.autoshard .scroll{overflow-x:auto}
.autoshard table{border-collapse:collapse;background:none;color:inherit;margin:0}
.autoshard th,.autoshard td{padding:.15em 1em .15em 0;text-align:left;vertical-align:top;border:0;
background:none;color:inherit}
.autoshard th{font-weight:600;opacity:.75;border-bottom:1px solid rgba(128,128,128,.5)}
.autoshard .r{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.autoshard tr.total td{font-weight:600;border-top:1px solid rgba(128,128,128,.5)}
.autoshard .bar{display:block;height:.8em;margin-top:.3em;background:#4c8dd6;border-radius:2px}
.autoshard p{margin:.15em 0}.autoshard .note{opacity:.75}
.autoshard pre{background:none;color:inherit;margin:.2em 0;padding:0;border:0;font-size:12px}
""".strip()


def plan_html(plan: PlanDocument) -> str:
    """The plan as a fragment for a notebook."""
    return sections_html(plan_sections(plan))


def sections_html(sections: Iterable[Section]) -> str:
    """Sections as one fragment, its style included."""
    body = "\n".join(_section(s) for s in sections)
    return f'<div class="autoshard">\n<style>{_STYLE}</style>\n{body}\n</div>'


def _section(section: Section) -> str:
    tone = f' class="{section.tone}"' if section.tone else ""
    parts = [f"<h4{tone}>{escape(section.title)}</h4>"]
    parts += [f"<p>{escape(line)}</p>" for line in section.lines]
    if section.drawing:
        text = "\n".join(escape(line) for line in section.drawing)
        parts.append(f'<div class="scroll"><pre>{text}</pre></div>')
    if section.rows:
        parts.append(_table(section))
    parts += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
    return "\n".join(parts)


def _table(section: Section) -> str:
    out = ['<div class="scroll"><table>']
    if any(c.lstrip(KINDS) for c in section.columns):
        heads = "".join(
            f'<th scope="col"{_right(c)}>{escape(c.lstrip(KINDS))}</th>' for c in section.columns
        )
        out.append(f"<thead><tr>{heads}</tr></thead>")
    out.append("<tbody>")
    for index, row in enumerate(section.rows):
        last = section.total and index == len(section.rows) - 1
        cells = "".join(_cell(c, text) for c, text in zip(section.columns, row, strict=True))
        mark = ' class="total"' if last else ""
        out.append(f"<tr{mark}>{cells}</tr>")
    out.append("</tbody></table></div>")
    return "\n".join(out)


def _cell(column: str, text: str) -> str:
    if column.startswith("*"):
        width = len(text) * 0.6
        span = f'<span class="bar" style="width:{width:.1f}em"></span>' if text else ""
        return f"<td>{span}</td>"
    return f"<td{_right(column)}>{escape(text)}</td>"


def _right(column: str) -> str:
    return ' class="r"' if column.startswith(">") else ""
