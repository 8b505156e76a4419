"""Profiler, trace file and pictures, from calls that are made up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from autoshard.errors import RequestError
from autoshard.runtime.watch import (
    CallTrace,
    CollectiveRecord,
    Profiler,
    RankTrace,
    Span,
    profiler,
    profiling,
    trace,
)
from autoshard.runtime.watch.picture import write_picture
from autoshard.runtime.watch.picture.reading import view_step
from autoshard.runtime.watch.records import bytes_text, merged, seconds_text

T = 1_700_000_000.0


def record(
    op: str, axes: tuple[str, ...], num_bytes: int, start: float, end: float, blocked: float
) -> CollectiveRecord:
    return CollectiveRecord(
        op=op,  # type: ignore[arg-type]
        axes=axes,
        bytes=num_bytes,
        phase="backward",
        value="w",
        start_s=T + start,
        end_s=T + end,
        blocked_s=blocked,
    )


def rank(number: int, late: float = 0.0) -> RankTrace:
    """10 ms: a gather that is waited for, and two overlapping messages that are half hidden."""
    return RankTrace(
        rank=number,
        coordinate=(number // 2, number % 2),
        start_s=T,
        end_s=T + 0.010 + late,
        collectives=(
            record("all_gather", ("model",), 50_000, 0.001, 0.002, 0.001),
            record("all_reduce", ("data",), 256_000_000, 0.003, 0.007, 0.001),
            record("all_reduce", ("data",), 4, 0.005, 0.008, 0.001),
            record("all_reduce", ("data", "model"), 8, 0.0085, 0.009, 0.0),
        ),
        spans=(Span("backward", T + 0.002, T + 0.006), Span("optimizer", T + 0.009, T + 0.01)),
        memory_bytes={"parameters": 1000 * (number + 1), "peak": 10_000_000},
    )


def call(step: int = 0) -> CallTrace:
    return CallTrace(
        step=step,
        name="step",
        axes={"data": 2, "model": 2},
        device="cpu",
        ranks=(rank(0), rank(1), rank(2, late=0.005), rank(3)),
    )


# ---- figures ------------------------------------------------------------------------------------


def test_times_of_a_rank_add_up() -> None:
    trace_of_0 = rank(0)
    assert trace_of_0.wall_s == pytest.approx(0.010, abs=1e-6)
    assert trace_of_0.exposed_s == pytest.approx(0.003, abs=1e-6)
    assert trace_of_0.compute_s == pytest.approx(0.007, abs=1e-6)
    # 1 to 2, 3 to 8 (two overlap) and 8.5 to 9 ms
    assert trace_of_0.communication_s == pytest.approx(0.0065, abs=1e-6)
    assert trace_of_0.hidden_s == pytest.approx(0.0035, abs=1e-6)


def test_merged_intervals_are_disjoint() -> None:
    assert merged([(3, 4), (0, 2), (1, 2.5), (4, 5)]) == [(0, 2.5), (3, 5)]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (4, "4 B"), (999.6, "1 kB"), (256e6, "256 MB"), (1.5e13, "15 TB")],
)
def test_bytes_text(number: float, text: str) -> None:
    assert bytes_text(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (5e-6, "5 us")])
def test_seconds_text(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_summary_names_the_slowest_rank_and_what_was_hidden() -> None:
    prof = Profiler()
    prof.calls = [call(0), call(1)]
    text = prof.summary()
    assert "2 calls of step on 4 processes (data=2, model=2), mean of a call" in text
    assert "3.5 ms (54%)" in text
    assert "slowest: rank 2, computes 12 ms where the median is 7 ms (+71%)" in text
    assert "  all_reduce over data, backward: 4 x, 512 MB, 14 ms" in text
    assert "  parameters: 4 kB (rank 3)" in text
    assert [r.op for r in prof.collectives] == [r.op for r in rank(0).collectives] * 2
    assert prof.collectives[3].axis == "data x model"


def test_profilers_nest_and_see_only_what_is_inside() -> None:
    assert not profiling.is_profiling()
    with profiler() as outer:
        profiling.tell(call(0))
        with profiler() as inner:
            profiling.tell(call(1))
    profiling.tell(call(2))
    assert [c.step for c in outer.calls] == [0, 1]
    assert [c.step for c in inner.calls] == [1]


# ---- trace --------------------------------------------------------------------------------------


def test_lines_of_a_step() -> None:
    assert trace.step_lines(call(3)) == [
        "step 3: all_gather 50 kB over model",
        "step 3: all_reduce 256 MB over data (2 messages)",
        "step 3: all_reduce 8 B over data x model",
    ]
    silent = replace(call(1), ranks=(replace(rank(0), collectives=()),))
    assert trace.step_lines(silent) == ["step 1: no communication"]


def test_the_trace_is_what_viewers_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace.save([call(0), call(1)], path)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    document = json.loads(path.read_text())
    assert document["distributedInfo"]["rank"] == 0
    assert document["distributedInfo"]["world_size"] == 4
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in document["traceEvents"]
        if e["name"] == "thread_name"
    }
    tracks = ["compute", "phases", "comm: data", "comm: model", "comm: data x model"]
    assert [names[2, n] for n in range(5)] == tracks
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert min(e["ts"] for e in events) == 0
    gather = next(e for e in events if e["name"] == "all_gather")
    assert gather["args"]["op"] == "all_gather"
    assert gather["args"]["axis"] == "model"
    assert gather["args"]["bytes"] == 50_000
    assert gather["args"]["measured_us"] == pytest.approx(1000, abs=1)
    assert gather["args"]["predicted_us"] > 0
    compute = [e for e in events if e["cat"] == "compute" and e["pid"] == 0]
    assert sum(e["dur"] for e in compute) == pytest.approx(2 * 7000, abs=10)


def test_events_of_a_track_nest(tmp_path: Path) -> None:
    events = [e for e in trace.document([call(0)])["traceEvents"] if e["ph"] == "X"]
    for first in events:
        for second in events:
            same = (first["pid"], first["tid"]) == (second["pid"], second["tid"])
            if same and first is not second and first["ts"] <= second["ts"]:
                end = first["ts"] + first["dur"]
                assert second["ts"] >= end - 0.01 or second["ts"] + second["dur"] <= end + 0.01


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; run the program with AUTOSHARD_TRACE_COMM=1"),
        ("{", "is not JSON"),
        ("[]", "it has no list 'traceEvents'"),
        ('{"traceEvents": []}', "was not written by this version of autoshard"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RequestError, match=re.escape(message)):
        trace.load(path)


@pytest.mark.parametrize("value", ["", "0", "off", "False"])
def test_tracing_is_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(trace.VARIABLE, value)
    assert not trace.is_tracing()


def test_the_variable_may_name_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trace.VARIABLE, "runs/a.json")
    assert trace.is_tracing()
    assert trace.trace_file() == Path("runs/a.json")
    monkeypatch.setenv(trace.VARIABLE, "1")
    assert trace.trace_file() == Path("comm_trace.json")


# ---- pictures -----------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "comm_trace.json"
    trace.save([call(0), call(1)], path)
    return path


def test_groups_of_a_mesh(log: Path) -> None:
    view = view_step(trace.load(log))
    assert view.step == 1
    assert view.axis_sets == ("data", "model", "data x model")
    assert view.groups("data") == [(0, 2), (1, 3)]
    assert view.groups("model") == [(0, 1), (2, 3)]
    assert view.groups("data x model") == [(0, 1, 2, 3)]
    assert view.ranks[0].communication_s == pytest.approx(0.0065, abs=1e-5)


def test_svg_says_who_how_much_and_when(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "g.svg"
    write_picture(log, path)
    root = ElementTree.fromstring(path.read_text())
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    for expected in (
        "Communication of step",
        "data (size 2) down the columns: 256 MB",
        "all_reduce over data x model",
        "backward",
        "rank 3",
    ):
        assert expected in texts
    tips = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(t and t.startswith("ranks 1, 3 over data: 2 all_reduce 256 MB") for t in tips)
    assert "http" not in path.read_text().replace("http://www.w3.org/2000/svg", "")


def test_shapes_stay_inside_the_picture(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "g.svg"
    write_picture(log, path)
    root = ElementTree.fromstring(path.read_text())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
        at = {k: float(shape.attrib.get(k, 0)) for k in ("x", "y", "width", "height")}
        assert 0 <= at["x"] <= at["x"] + at["width"] <= width + 0.5
        assert 0 <= at["y"] <= at["y"] + at["height"] <= height + 0.5


def test_png_is_a_picture(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "g.png"
    write_picture(log, path, step=0)
    with Image.open(path) as image:
        assert image.width == 2240
        assert image.height > 800
        assert len(image.getcolors(1 << 20) or ()) > 50


def test_html_needs_nothing_else(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "g.html"
    write_picture(log, path)
    text = path.read_text()
    assert "<script" not in text
    assert "<svg" in text
    assert text.count("<tr>") == 5
    assert not re.search(r"(src|href)=", text)


@pytest.mark.parametrize(
    ("output", "step", "message"),
    [
        ("g.gif", None, "ends in '.gif'; a picture is one of .png, .svg, .html"),
        ("no/g.png", None, "there is no folder"),
        ("g.png", 7, "the trace has no step 7; its steps: 0 to 1"),
    ],
)
def test_pictures_that_cannot_be(
    log: Path, tmp_path: Path, output: str, step: int | None, message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        write_picture(log, tmp_path / output, step)


def test_large_meshes_are_drawn_in_part(tmp_path: Path) -> None:
    log = tmp_path / "t.json"
    ranks = tuple(replace(rank(0), rank=n, coordinate=(n // 32, n % 32)) for n in range(256))
    trace.save([replace(call(0), axes={"data": 8, "model": 32}, ranks=ranks)], log)
    write_picture(log, tmp_path / "g.svg")
    text = (tmp_path / "g.svg").read_text()
    assert "... and 192 ranks more" in text
    assert "When (ranks 0 to 7 of 256)" in text


def test_the_command_draws_without_torch(log: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from autoshard.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules)"
    )
    arguments = ["visualize", "--log", str(log), "--output", str(tmp_path / "g.png")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {tmp_path / 'g.png'}: step 1 of step on 4 devices\nFalse\n"
    assert (tmp_path / "g.png").stat().st_size > 10_000
