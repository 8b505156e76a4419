"""Every figure: nothing outside its canvas, no text on another, values as they are."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from autoshard.drawing.png import to_png
from autoshard.drawing.scene import Circle, Line, Path, Rect, Scene, Shape, Text, text_width
from autoshard.drawing.svg import to_svg
from autoshard.figures import palette, parity, scaling, timeline
from autoshard.figures.bars import Bar, Part, stacked_bars
from autoshard.figures.best import best_rows
from autoshard.figures.labels import overlap
from autoshard.figures.rows import kind_of, mesh_text
from autoshard.figures.scale import Scale, Unit, logarithmic, number_text
from autoshard.figures.scatter import Dot, pareto
from autoshard.report import Figure, plan_figures, sweep_figures
from tests.figures import values

WIDTHS = (346.0, 830.0)

FIGURES: list[tuple[str, Figure]] = [
    (f"{group}: {figure.name[:40]}", figure)
    for group, figures in (
        ("plan", plan_figures(values.plan(), values.trace())),
        ("large", plan_figures(values.large_plan(), values.trace(60))),
        ("hostile", plan_figures(values.hostile_plan(), values.trace(1))),
        ("stages", plan_figures(values.staged_plan(), values.staged_trace())),
        ("many stages", plan_figures(values.staged_plan(64), values.staged_trace(64, 100))),
        ("sweep", sweep_figures(values.rows())),
        ("hostile rows", sweep_figures(values.rows((values.HOSTILE,)))),
    )
    for figure in figures
]
each_figure = pytest.mark.parametrize(
    "figure", [f for _, f in FIGURES], ids=[n for n, _ in FIGURES]
)
each_width = pytest.mark.parametrize("width", WIDTHS)


def box(shape: Shape) -> tuple[float, float, float, float]:
    match shape:
        case Rect():
            return shape.x, shape.y, shape.x + shape.width, shape.y + shape.height
        case Line():
            xs, ys = (shape.x1, shape.x2), (shape.y1, shape.y2)
            return min(xs), min(ys), max(xs), max(ys)
        case Path():
            xs, ys = zip(*shape.points, strict=True)
            return min(xs), min(ys), max(xs), max(ys)
        case Circle():
            r = shape.radius
            return shape.x - r, shape.y - r, shape.x + r, shape.y + r
        case Text():
            return shape.box()


@each_figure
@each_width
def test_nothing_is_outside_the_canvas(figure: Figure, width: float) -> None:
    scene = figure.draw(width)
    assert scene.width == width
    for shape in scene.shapes:
        left, top, right, bottom = box(shape)
        assert left >= -0.5, shape
        assert top >= -0.5, shape
        assert right <= width + 0.5, shape
        assert bottom <= scene.height + 0.5, shape


@each_figure
@each_width
def test_no_text_lies_on_another(figure: Figure, width: float) -> None:
    texts = [s for s in figure.draw(width).shapes if isinstance(s, Text)]
    for one, two in combinations(texts, 2):
        a, b = one.box(), two.box()
        assert not overlap(a, b, -1.0), (one.text, two.text)


@each_figure
def test_every_colour_has_a_dark_form(figure: Figure) -> None:
    used = {
        color
        for shape in figure.draw(830.0).shapes
        for name in ("fill", "stroke", "color")
        if (color := getattr(shape, name, None))
    }
    assert used <= set(palette.NAMES)


@each_figure
def test_the_picture_is_well_formed_whatever_the_names(figure: Figure) -> None:
    text = to_svg(figure.draw(346.0), names=palette.NAMES)
    root = ElementTree.fromstring(text)
    allowed = {"svg", "title", "rect", "line", "polyline", "polygon", "circle", "text"}
    assert {e.tag.rpartition("}")[2] for e in root.iter()} <= allowed
    assert "style=" not in text
    assert "alert(1)</script" not in text


def test_dark_rules_name_every_colour_once() -> None:
    css = palette.dark_css()
    assert len(set(palette.NAMES.values())) == len(palette.NAMES)
    assert all(f".f-{n}{{" in css and f".s-{n}{{" in css for n in palette.NAMES.values())


# ---- values -------------------------------------------------------------------------------------


def draw_bars(bars: list[list[float]], *, compact: bool = False) -> Scene:
    return stacked_bars(
        "title",
        [
            Bar(
                label=f"bar {i}",
                parts=tuple(
                    Part(name=f"part {j}", value=v, color=palette.series(j))
                    for j, v in enumerate(parts)
                ),
            )
            for i, parts in enumerate(bars)
        ],
        width=500,
        unit=Unit(size=1, name="s"),
        value_text=lambda v: f"{v:.3f}",
        compact=compact,
    )


@given(
    st.lists(st.lists(st.floats(0.5, 1e3), min_size=1, max_size=4), min_size=1, max_size=5),
    st.booleans(),
)
def test_bars_are_as_long_as_their_values(bars: list[list[float]], compact: bool) -> None:
    scene = draw_bars(bars, compact=compact)
    drawn = [s for s in scene.shapes if isinstance(s, Rect) and s.tip]
    pixels = {s.tip: s.width for s in drawn}
    most = max(sum(parts) for parts in bars)
    longest = max(
        sum(pixels.get(f"bar {i}: part {j} {v:.3f}", 0.0) for j, v in enumerate(parts))
        for i, parts in enumerate(bars)
    )
    for i, parts in enumerate(bars):
        for j, value in enumerate(parts):
            found = pixels.get(f"bar {i}: part {j} {value:.3f}", 0.0)
            assert found == pytest.approx(value / most * longest, abs=0.2)


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e4), st.integers(2, 10), st.booleans())
def test_ticks_are_round_few_and_on_the_axis(
    low: float, ratio: float, count: int, log: bool
) -> None:
    scale = Scale(low=low, high=low * ratio, start=0, end=100, log=log)
    ticks = scale.ticks(count)
    assert len(ticks) <= 2 * count + 1
    assert all(a < b for a, b in pairwise(ticks))
    assert all(-0.5 <= scale(t) <= 100.5 for t in ticks)
    assert all(len(number_text(t).strip("0").replace(".", "").strip("0")) <= 8 for t in ticks)


def test_a_logarithmic_scale_has_equal_distances_for_equal_ratios() -> None:
    scale = logarithmic([1.0, 64.0], 0.0, 100.0)
    steps = [scale(2.0 ** (n + 1)) - scale(2.0**n) for n in range(6)]
    assert steps == pytest.approx([steps[0]] * 6)


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(1, 99), st.booleans()), max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[float, float, bool]]) -> None:
    dots = [
        Dot(label="", kind="", color="#000000", seconds=s, num_bytes=b, fits=f)
        for s, b, f in points
    ]
    front = pareto(dots)
    assert all(a.num_bytes <= b.num_bytes and a.seconds > b.seconds for a, b in pairwise(front))
    for dot in dots:
        if dot.fits:
            assert any(f.seconds <= dot.seconds and f.num_bytes <= dot.num_bytes for f in front)
        else:
            assert dot not in front


@given(
    st.lists(st.tuples(st.floats(0, 99), st.floats(0.01, 1)), max_size=20),
)
def test_a_track_is_as_high_as_it_is_busy(spans: list[tuple[float, float]]) -> None:
    shares = [0.0] * 100
    for start, share in spans:
        timeline._spread(shares, start, start + share * (100 - start))
    assert sum(shares) == pytest.approx(sum(s * (100 - a) for a, s in spans), abs=1e-6)


def test_scaling_compares_like_with_like() -> None:
    rows = values.rows(("gpt2",))
    strong, weak = scaling.curves(rows, "strong"), scaling.curves(rows, "weak")
    assert {c.name for c in strong} == {
        f"{c}, batch {b}" for c in ("h100", "a100-80") for b in (32, 64)
    }
    assert [len(c.points) for c in strong] == [5, 5, 4, 4]  # 64 do not fit on one device
    assert all([n for n, _ in c.points] in ([1, 2], [2, 4], [4, 8], [8, 16]) for c in weak)
    for curve in (*strong, *weak):
        assert curve.efficiency()[0][1] == 1.0
        assert all(share <= 1.0 for _, share in curve.efficiency())


def test_the_map_shows_the_fastest_that_fits() -> None:
    rows = values.rows()
    best = best_rows(rows)
    assert ("llama-3-8b", 1) not in best
    assert best["gpt2", 4]["global_batch"] == 64
    assert best["gpt2", 4]["cluster"] == "h100"
    assert kind_of(best["gpt2", 4]) == "fsdp"


MESHES = [
    ("data=4, model=2", "4 x 2"),
    ("data=8, model=1", "data=8"),
    ("data=1", ""),
    (None, ""),
]


@pytest.mark.parametrize(("mesh", "text"), MESHES)
def test_a_mesh_is_named_by_its_active_axes(mesh: str | None, text: str) -> None:
    assert mesh_text({"mesh": mesh}) == text


def test_pairs_within_ten_per_cent_are_told_from_others() -> None:
    pairs = parity.time_pairs(values.rows(("gpt2",)))
    assert len(pairs) == 8
    assert sum(p.is_inside for p in pairs) == 4
    assert all(p.low and p.high for p in pairs)


# ---- drawing ------------------------------------------------------------------------------------


def scene_of(*shapes: Shape) -> Scene:
    return Scene(60, 40, "title", list(shapes))


def pixel(scene: Scene, x: float, y: float, margin: float = 0.0) -> tuple[int, ...]:
    image = Image.open(io.BytesIO(to_png(scene, margin=margin)))
    found = image.convert("RGB").getpixel((round(2 * (x + margin)), round(2 * (y + margin))))
    assert isinstance(found, tuple)
    return found


def test_a_closed_path_is_filled_in_both_formats() -> None:
    area = Path(points=((10, 10), (50, 10), (50, 30), (10, 30)), fill="#ff0000")
    assert pixel(scene_of(area), 30, 20) == (255, 0, 0)
    assert pixel(scene_of(area), 30, 20, margin=7) == (255, 0, 0)
    assert pixel(scene_of(area), 5, 20) == (255, 255, 255)
    assert '<polygon points="10,10 50,10 50,30 10,30" fill="#ff0000"/>' in to_svg(scene_of(area))


def test_an_open_path_goes_through_its_points() -> None:
    line = Path(points=((10, 30), (30, 10), (50, 30)), stroke="#0000ff", width=3)
    assert pixel(scene_of(line), 30, 11)[2] > 200
    assert pixel(scene_of(line), 30, 25) == (255, 255, 255)
    assert "<polyline" in to_svg(scene_of(line))


TURNS: list[tuple[str, Callable[[tuple[int, int, int, int]], bool]]] = [
    ("start", lambda box: box[3] <= 42),
    ("end", lambda box: box[1] >= 38),
]


@pytest.mark.parametrize(("anchor", "holds"), TURNS, ids=[a for a, _ in TURNS])
def test_upright_text_runs_up(
    anchor: str, holds: Callable[[tuple[int, int, int, int]], bool]
) -> None:
    text = Text(x=30, y=20, text="mm", size=12, anchor=anchor, turned=True)  # type: ignore[arg-type]
    image = Image.open(io.BytesIO(to_png(scene_of(text)))).convert("L")
    ink = image.point(lambda v: 255 if v < 128 else 0).getbbox()
    assert ink is not None
    assert ink[3] - ink[1] > ink[2] - ink[0]
    assert holds(ink)
    assert 'transform="rotate(-90 30 20)"' in to_svg(scene_of(text))


def test_named_colours_become_classes_and_keep_their_light_form() -> None:
    rect = Rect(x=1, y=1, width=5, height=5, fill="#0072b2", stroke="#123456")
    text = to_svg(scene_of(rect), names={"#0072b2": "blue"})
    assert 'fill="#0072b2"' in text
    assert 'class="f-blue"' in text
    assert 'fill="#ffffff"' not in text
    assert "class" not in to_svg(scene_of(rect))


def test_bold_and_wide_texts_take_more_room() -> None:
    assert text_width("abc", 10, bold=True) > text_width("abc", 10)
    assert text_width("\u6a21\u578b", 10) > text_width("ab", 10)
