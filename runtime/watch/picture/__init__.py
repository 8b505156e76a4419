"""Pictures of a trace: who talks to whom over which axis, how much, and a timeline."""

from __future__ import annotations

from pathlib import Path

from autoshard.errors import RequestError
from autoshard.runtime.watch import trace
from autoshard.runtime.watch.picture.drawing import draw
from autoshard.runtime.watch.picture.reading import StepView, view_step

FORMATS = (".png", ".svg", ".html")


def write_picture(log: str | Path, output: str | Path, step: int | None = None) -> StepView:
    """Draw one step of a trace.

    Args:
        log: the trace file.
        output: the picture; ``.png``, ``.svg`` or ``.html``.
        step: which step; None: the last one that communicated.

    Raises:
        RequestError: no trace, no such step, another format, or a folder that is not there.
    """
    log, output = Path(log), Path(output)
    kind = output.suffix.lower()
    if kind not in FORMATS:
        raise RequestError(
            f"{output} ends in {output.suffix or 'nothing'!r}; a picture is one of "
            f"{', '.join(FORMATS)}"
        )
    if not output.absolute().parent.is_dir():
        raise RequestError(f"there is no folder {output.absolute().parent} to write {output} into")
    view = view_step(trace.load(log), step)
    scene = draw(view, title=log.name)
    if kind == ".png":
        from autoshard.drawing.png import to_png

        output.write_bytes(to_png(scene))
    elif kind == ".svg":
        from autoshard.drawing.svg import to_svg

        output.write_text(to_svg(scene), encoding="utf-8")
    else:
        from autoshard.runtime.watch.picture.page import to_html

        output.write_text(to_html(scene, view), encoding="utf-8")
    return view
