"""The picture of one step: the mesh with who talks to whom, a table, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import fmean

from autoshard.drawing.scene import (
    Circle,
    Line,
    Rect,
    Scene,
    Text,
    text_width,
    tint,
)
from autoshard.runtime.watch.picture.reading import Message, RankView, StepView, coordinate
from autoshard.runtime.watch.records import bytes_text, seconds_text

# Okabe and Ito's colours, told apart by nearly everybody (https://jfly.uni-koeln.de/color/, 2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, GREY, PALE, COMPUTE = "#1f2933", "#616e7c", "#e4e7eb", "#9aa5b1"

WIDTH = 1120.0
MARGIN = 28.0
NODE = 22.0
MOST_NODES = 64
MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class _Kind:
    """All messages of one op over one axis, on one rank."""

    op: str
    axis: str
    messages: tuple[Message, ...]

    @property
    def num_bytes(self) -> int:
        return sum(m.num_bytes for m in self.messages)


def draw(step: StepView, *, title: str) -> Scene:
    """The picture.

    Args:
        step: what to draw.
        title: name of the trace.
    """
    colors = {a: COLORS[i % len(COLORS)] for i, a in enumerate(step.axis_sets)}
    scene = Scene(WIDTH, 0.0, f"{title}, step {step.step}")
    y = _heading(scene, step, title)
    bottom, right = _mesh(scene, step, colors, y)
    table = _table(scene, step, colors, max(right + 48, 400.0), y)
    y = _timeline(scene, step, colors, max(bottom, table) + 34)
    scene.height = y + MARGIN
    return scene


def _heading(scene: Scene, step: StepView, title: str) -> float:
    mesh = ", ".join(f"{name}={size}" for name, size in step.mesh.items())
    communication = fmean(r.communication_s for r in step.ranks) if step.ranks else 0.0
    hidden = fmean(r.hidden_s for r in step.ranks) if step.ranks else 0.0
    compute = fmean(r.compute_s for r in step.ranks) if step.ranks else 0.0
    share = f", {hidden / communication:.0%} of it hidden behind compute" if communication else ""
    scene.add(
        Text(x=MARGIN, y=42, text=f"Communication of {step.name}", size=21, bold=True),
        Text(
            x=MARGIN,
            y=66,
            text=(
                f"{title}: step {step.step} of 0 to {step.steps - 1}, "
                f"on {len(step.ranks)} devices: {mesh}"
            ),
            color=GREY,
        ),
        Text(
            x=MARGIN,
            y=87,
            text=(
                f"{seconds_text(step.wall_s)} in all. Mean over ranks: compute "
                f"{seconds_text(compute)}, communication {seconds_text(communication)}{share}"
            ),
            color=GREY,
        ),
    )
    return 112.0


# ---- who talks to whom ------------------------------------------------------------------------


def _mesh(scene: Scene, step: StepView, colors: dict[str, str], top: float) -> tuple[float, float]:
    """Ranks on a grid, and a bus for each group; returns the lower and right edge."""
    sizes = list(step.mesh.values())
    names = list(step.mesh)
    columns = sizes[-1]
    world = 1
    for size in sizes:
        world *= size
    shown = min(world, MOST_NODES // columns * columns or columns)
    rows = -(-shown // columns)
    across = [a for a in colors if a == names[-1]]  # along a row
    down = [a for a in colors if a in names[:-1]]  # along a column
    merged = [a for a in colors if a not in across and a not in down]
    lane = 20.0
    pitch_x = 2 * NODE + 34 + lane * len(down)
    pitch_y = 2 * NODE + 34 + lane * len(across)
    frame = 13.0 * len(merged)
    sent = {a: _sent(step, a) for a in colors}
    y0 = _axis_names(scene, step, colors, top + 32) + 10 + frame
    left = MARGIN + 2 + frame

    def center(rank: int) -> tuple[float, float]:
        return left + rank % columns * pitch_x + NODE, y0 + rank // columns * pitch_y + NODE

    scene.add(Text(x=MARGIN, y=top + 8, text="Who talks to whom", size=15, bold=True))
    right = center(columns - 1)[0] + NODE + lane * len(down) + frame
    bottom = center((rows - 1) * columns)[1] + NODE + lane * len(across) + frame
    most = max((n for n, _ in sent.values()), default=1) or 1
    for number, axis in enumerate(merged):
        inset = 13.0 * (len(merged) - number)
        for group in step.groups(axis):
            if max(group) >= shown:
                continue
            xs, ys = zip(*(center(rank) for rank in group), strict=True)
            x, y = min(xs) - NODE - inset, min(ys) - NODE - inset
            box = Rect(
                x=x,
                y=y,
                width=max(xs) + NODE + lane * len(down) + inset - x,
                height=max(ys) + NODE + lane * len(across) + inset - y,
                stroke=colors[axis],
                stroke_width=_thickness(sent[axis][0], most) / 2 + 0.5,
                radius=14,
                tip=f"{axis}: {sent[axis][1]}",
            )
            scene.add(box)
    for axis in (*across, *down):
        is_row = axis in across
        at = (across if is_row else down).index(axis)
        offset = NODE + 12 + lane * at
        width = _thickness(sent[axis][0], most)
        for group in step.groups(axis):
            members = [center(rank) for rank in group if rank < shown]
            if len(members) < 2:
                continue
            tip = f"ranks {', '.join(map(str, group))} over {axis}: {sent[axis][1]}"
            color = colors[axis]
            if is_row:
                y = members[0][1] + offset
                for x, node_y in members:
                    scene.add(Line(x1=x, y1=node_y, x2=x, y2=y, color=color, width=2.0))
                scene.add(
                    Line(
                        x1=members[0][0],
                        y1=y,
                        x2=members[-1][0],
                        y2=y,
                        color=color,
                        width=width,
                        tip=tip,
                    )
                )
            else:
                x = members[0][0] + offset
                for node_x, y in members:
                    scene.add(Line(x1=node_x, y1=y, x2=x, y2=y, color=color, width=2.0))
                scene.add(
                    Line(
                        x1=x,
                        y1=members[0][1],
                        x2=x,
                        y2=members[-1][1],
                        color=color,
                        width=width,
                        tip=tip,
                    )
                )
    for rank in range(shown):
        x, y = center(rank)
        place = ", ".join(f"{n} {c}" for n, c in zip(names, coordinate(rank, sizes), strict=True))
        scene.add(
            Circle(x=x, y=y, radius=NODE, fill="#ffffff", stroke=INK, tip=f"rank {rank}: {place}"),
            Text(x=x, y=y + 5, text=str(rank), size=15, anchor="middle", bold=True),
        )
    if shown < world:
        bottom += 24
        scene.add(Text(x=left, y=bottom, text=f"... and {world - shown} ranks more", color=GREY))
    return bottom + 8, right


def _axis_names(scene: Scene, step: StepView, colors: dict[str, str], y: float) -> float:
    """What each axis is in the picture, and how much it carries; returns the lower edge."""
    names = list(step.mesh)
    for axis in [*names, *(a for a in colors if a not in names)]:
        where = (
            f"(size {step.mesh[axis]}) along the rows"
            if axis == names[-1]
            else f"(size {step.mesh[axis]}) down the columns"
            if axis in names
            else "together: the frame"
        )
        carries = bytes_text(_sent(step, axis)[0]) if axis in colors else "nothing sent"
        text = f"{axis} {where}: {carries}"
        color = colors.get(axis, GREY)
        scene.add(Text(x=MARGIN, y=y, text=text, size=12.5, color=color, bold=axis in colors))
        y += 18
    return y


def _sent(step: StepView, axis: str) -> tuple[int, str]:
    """Bytes that one device puts into the messages over an axis, and the same in words."""
    kinds = [k for k in _kinds(step.ranks[0]) if k.axis == axis]
    text = ", ".join(f"{len(k.messages)} {k.op} {bytes_text(k.num_bytes)}" for k in kinds)
    return sum(k.num_bytes for k in kinds), text


def _thickness(num_bytes: int, most: int) -> float:
    """Width of a bus: 3 to 11, by the logarithm of the bytes, two decades below the most."""
    if num_bytes <= 0:
        return 3.0
    return 3.0 + 8.0 * max(0.0, 1.0 + log10(num_bytes / most) / 2.0)


def _kinds(rank: RankView) -> list[_Kind]:
    found: dict[tuple[str, str], list[Message]] = {}
    for message in rank.messages:
        found.setdefault((message.axis, message.op), []).append(message)
    return [_Kind(op, axis, tuple(m)) for (axis, op), m in found.items()]


# ---- how much ---------------------------------------------------------------------------------


def _table(scene: Scene, step: StepView, colors: dict[str, str], left: float, top: float) -> float:
    """What rank 0 sent, by axis and op; returns the lower edge."""
    scene.add(Text(x=left, y=top + 8, text="How much, per device", size=15, bold=True))
    right = WIDTH - MARGIN
    span = right - left
    heads = ("messages", "bytes", "measured", "predicted", "hidden")
    ends = [left + span * share for share in (0.50, 0.63, 0.77, 0.90, 1.0)]
    y = top + 36
    for head, x in zip(heads, ends, strict=True):
        scene.add(Text(x=x, y=y, text=head, size=12, anchor="end", color=GREY))
    scene.add(Line(x1=left, y1=y + 8, x2=right, y2=y + 8, color=PALE))
    kinds = sorted(_kinds(step.ranks[0]), key=lambda k: list(colors).index(k.axis))
    y += 28
    for kind in kinds:
        seconds = sum(m.end_s - m.start_s for m in kind.messages)
        blocked = sum(m.blocked_s for m in kind.messages)
        known = [m.predicted_s for m in kind.messages if m.predicted_s is not None]
        cells = (
            str(len(kind.messages)),
            bytes_text(kind.num_bytes),
            seconds_text(seconds),
            seconds_text(sum(known)) if known else "-",
            f"{max(0.0, 1 - blocked / seconds):.0%}" if seconds else "-",
        )
        scene.add(
            Rect(x=left, y=y - 11, width=12, height=12, fill=colors[kind.axis], radius=2),
            Text(x=left + 20, y=y, text=f"{kind.op} over {kind.axis}"),
        )
        for cell, x in zip(cells, ends, strict=True):
            scene.add(Text(x=x, y=y, text=cell, anchor="end"))
        y += 24
    if not kinds:
        scene.add(Text(x=left, y=y, text="nothing", color=GREY))
        y += 24
    return y


# ---- when -------------------------------------------------------------------------------------


def _timeline(scene: Scene, step: StepView, colors: dict[str, str], top: float) -> float:
    """Lanes for each rank; returns the lower edge."""
    shown = step.ranks[:MOST_RANKS]
    more = (
        f" (ranks 0 to {len(shown) - 1} of {len(step.ranks)})"
        if len(shown) < len(step.ranks)
        else ""
    )
    scene.add(Text(x=MARGIN, y=top, text=f"When{more}", size=15, bold=True))
    x = MARGIN + text_width(f"When{more}", 15) + 26
    for fill, stroke, text in (
        (COMPUTE, None, "compute"),
        (INK, None, "communication, the program waits"),
        (tint(INK, 0.22), INK, "communication hidden behind compute"),
    ):
        scene.add(
            Rect(x=x, y=top - 10, width=14, height=11, fill=fill, stroke=stroke, radius=2),
            Text(x=x + 20, y=top, text=text, size=12, color=GREY),
        )
        x += 44 + text_width(text, 12)
    left, right = MARGIN + 128, WIDTH - MARGIN
    scale = (right - left) / (step.wall_s or 1.0)
    lanes = list(colors)
    y = top + 24
    first = y
    for view in shown:
        scene.add(Text(x=MARGIN, y=y + 22, text=f"rank {view.rank}", bold=True))
        _lane_name(scene, "compute", left, y + 22, GREY)
        _phases(scene, view, left, scale, y)
        for start, end in view.compute:
            scene.add(
                Rect(
                    x=left + start * scale,
                    y=y + 12,
                    width=max(0.6, (end - start) * scale),
                    height=13,
                    fill=COMPUTE,
                    tip=f"compute {seconds_text(end - start)}",
                )
            )
        y += 30
        for axis in lanes:
            _lane_name(scene, axis, left, y + 9, colors[axis])
            messages = [m for m in view.messages if m.axis == axis]
            _messages(scene, messages, colors[axis], left, scale, y)
            y += 15
        y += 10
        scene.add(Line(x1=MARGIN, y1=y - 3, x2=right, y2=y - 3, color=PALE))
        y += 3
    return _ruler(scene, step.wall_s, left, right, first, y)


def _lane_name(scene: Scene, name: str, left: float, y: float, color: str) -> None:
    while text_width(name, 11) > 66 and len(name) > 4:
        name = name[:-2].rstrip(".") + "."
    scene.add(Text(x=left - 8, y=y, text=name, size=11, anchor="end", color=color))


def _phases(scene: Scene, view: RankView, left: float, scale: float, y: float) -> None:
    """Stretches known by name, as brackets above the compute lane."""
    free = 0.0
    for name, start, end in view.phases:
        x, width = left + start * scale, max(1.0, (end - start) * scale)
        tip = f"{name} {seconds_text(end - start)}"
        scene.add(Rect(x=x, y=y + 8.5, width=width, height=2.5, fill=INK, tip=tip))
        if text_width(name, 10) < width + 30 and x >= free:
            scene.add(Text(x=x, y=y + 5.5, text=name, size=10, color=INK))
            free = x + text_width(name, 10) + 6


def _messages(
    scene: Scene, messages: Sequence[Message], color: str, left: float, scale: float, y: float
) -> None:
    """What is hidden, pale; over it, what the program waits for: messages may overlap."""
    for is_waiting in (False, True):
        for message in messages:
            waits = max(message.start_s, message.end_s - message.blocked_s)
            start, end = (waits, message.end_s) if is_waiting else (message.start_s, waits)
            if (end - start) * scale < 0.4 and (is_waiting or message.blocked_s):
                continue
            tip = (
                f"{message.op} over {message.axis}, {bytes_text(message.num_bytes)}, "
                f"{message.phase}{', ' + message.value if message.value else ''}: "
                f"{seconds_text(message.end_s - message.start_s)}, "
                f"{seconds_text(message.blocked_s)} of it waited for"
            )
            scene.add(
                Rect(
                    x=left + start * scale,
                    y=y,
                    width=max(1.0, (end - start) * scale),
                    height=11,
                    fill=color if is_waiting else tint(color, 0.22),
                    stroke=None if is_waiting else color,
                    stroke_width=0.8,
                    tip=tip,
                )
            )


def _ruler(
    scene: Scene, wall_s: float, left: float, right: float, top: float, bottom: float
) -> float:
    """Ticks at round times under the lanes; lines behind would hide what is short."""
    tick = _round_step(wall_s / 7) if wall_s else 1.0
    count = floor(wall_s / tick + 1e-9)
    for n in range(count + 1):
        x = left + (right - left) * n * tick / (wall_s or 1.0)
        scene.shapes.insert(0, Line(x1=x, y1=top, x2=x, y2=bottom, color=PALE))
        text = "0" if n == 0 else seconds_text(n * tick)
        scene.add(Text(x=x, y=bottom + 14, text=text, size=11, anchor="middle", color=GREY))
    return bottom + 18


def _round_step(seconds: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``seconds``."""
    power = 10.0 ** floor(log10(seconds))
    for factor in (1, 2, 5, 10):
        if factor * power >= seconds * 0.999:
            return factor * power
    return 10 * power
