from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.plan import MeshDocument, PlanDocument, Schedule
from autoshard.render import (
    graph_table,
    plan_html,
    plan_table,
    render_text,
    validation_table,
)
from autoshard.render.fold import fold
from autoshard.render.plan import mesh_section, placement_text
from autoshard.render.schedule import schedule_text
from autoshard.render.units import (
    bytes_text,
    count_text,
    difference_text,
    flops_text,
    percent_text,
    seconds_text,
)
from autoshard.sharding.spec import tensor_text
from autoshard.validation.report import (
    CaptureCheck,
    CollectiveCheck,
    DryRunReport,
    TensorCheck,
    ValidationReport,
)
from tests.plan.samples import MESH, sample_categories, sample_graph, sample_plan, tensor
from tests.words import golden

GOLDEN = Path(__file__).parent / "golden"

REPORT = ValidationReport(
    devices=4,
    mesh="data=2, model=2",
    dtype="float64",
    tolerance=1e-9,
    checks=(
        *(
            TensorCheck(kind="gradient", name=f"layers.{i}.weight", deviation=i * 1e-15)
            for i in range(14)
        ),
        TensorCheck(kind="output", name="logits", deviation=3e-3),
    ),
    collectives=CollectiveCheck(
        predicted=10,
        issued=9,
        differences=1,
        first="collective 3: predicted all_gather 12 bytes over data, nothing was issued",
    ),
    capture=CaptureCheck(
        dtype="float32",
        checks=(TensorCheck(kind="loss", name="loss", deviation=2e-7),),
        tolerance=1e-3,
    ),
    step_seconds=0.5,
    predicted_step_seconds=0.4,
    peak_bytes=10**9,
    predicted_peak_bytes=11 * 10**8,
    memory=sample_categories(parameters_bytes=3 * 10**8, activations_bytes=7 * 10**8),
    predicted_memory=sample_categories(parameters_bytes=3 * 10**8, activations_bytes=8 * 10**8),
    memory_method="live tensors",
    seconds=12.3,
)

DRY = DryRunReport(
    devices=512,
    coordinate=(0, 0),
    collectives=CollectiveCheck(predicted=478, issued=478, differences=0),
    nodes=2235,
    seconds=1.8,
)

SHOWN = {
    "plan": plan_table(sample_plan()),
    "plan_measured": plan_table(sample_plan(measured=True)),
    "plan_too_large": plan_table(sample_plan(limit=2**33)),
    "graph": graph_table(sample_graph()),
    "graph_without_rule": graph_table(sample_graph(1, custom=True)),
    "validation": validation_table(REPORT),
    "dry_run": validation_table(DRY),
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", SHOWN)
def test_table_is_as_it_was(name: str, width: int) -> None:
    text = render_text(SHOWN[name], width)
    assert all(len(line) <= width for line in text.splitlines())
    golden.check(GOLDEN / f"{name}_{width}.txt", text)


def test_html_is_as_it_was() -> None:
    golden.check(GOLDEN / "plan.html", plan_html(sample_plan(measured=True)) + "\n")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_has_no_scripts_and_nothing_from_outside() -> None:
    tags = Tags()
    tags.feed(plan_html(sample_plan(measured=True)))
    assert tags.open == []
    assert tags.seen <= {
        *("div", "style", "h4", "p", "pre", "table", "thead", "tbody", "tr", "th", "td", "span"),
    }
    assert tags.attributes == {"class", "style", "scope"}
    assert "http" not in tags.text
    assert "url(" not in tags.text
    assert "@import" not in tags.text


def test_html_escapes_names() -> None:
    evil = '<script>alert("x")</script>'
    plan = sample_plan()
    plan = PlanDocument.model_validate(
        {
            **plan.model_dump(),
            "label": evil,
            "warnings": [evil],
            "parameters": {evil: tensor((4,), (), 8).model_dump()},
        }
    )
    text = plan_html(plan)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 3
    assert evil in render_text(plan_table(plan), 120)


def test_markup_in_names_is_shown_as_it_is() -> None:
    plan = PlanDocument.model_validate({**sample_plan().model_dump(), "label": "[red]x[/red]"})
    assert "[red]x[/red]" in render_text(plan_table(plan))


MESHES = [
    (
        ("data",),
        (4,),
        ["        data 0  data 1  data 2  data 3", "device       0       1       2       3"],
    ),
    (("data", "model"), (1, 1), ["device 0"]),
    (
        ("pod", "data", "model"),
        (2, 2, 2),
        [
            "               model 0  model 1",
            "pod 0, data 0        0        1",
            "pod 0, data 1        2        3",
            "pod 1, data 0        4        5",
            "pod 1, data 1        6        7",
        ],
    ),
    (
        ("data", "model"),
        (64, 16),
        [
            "         model 0  model 1  model 2  ...  model 15",
            "data 0         0        1        2  ...        15",
            "data 1        16       17       18  ...        31",
            "data 2        32       33       34  ...        47",
            "...          ...      ...      ...  ...       ...",
            "data 63     1008     1009     1010  ...      1023",
        ],
    ),
]


@pytest.mark.parametrize(("names", "sizes", "lines"), MESHES)
def test_mesh_is_drawn(names: tuple[str, ...], sizes: tuple[int, ...], lines: list[str]) -> None:
    assert list(mesh_section(MeshDocument(axis_names=names, sizes=sizes)).drawing) == lines


PLACEMENTS = [
    (tensor((8, 4), (), 1), "whole"),
    (tensor((8, 4), ("data", None), 1, data="S(0)"), 'P("data", None)'),
    (
        tensor((8, 4), (("data", "model"),), 1, data="S(0)", model="S(0, 4, 2)"),
        'P(("data", "model"))',
    ),
    (tensor((7,), ("model",), 1, model="S(0)"), 'P("model")'),
    (tensor((8,), (), 1, data="P"), "partial over data"),
    (
        tensor((12,), ("model",), 1, model="S(0, 3, 2)"),
        'P("model"); model cuts each of 3 pieces',
    ),
]


@pytest.mark.parametrize(("document", "text"), PLACEMENTS)
def test_placement_in_words(document: object, text: str) -> None:
    assert placement_text(document, MESH) == text  # type: ignore[arg-type]


FOLDS = [
    (["a.0.w", "a.1.w", "a.2.w", "b"], ["a.{0..2}.w 3", "b 1"]),
    (["a.3.w"], ["a.3.w 1"]),
    (["a.0.w", "a.2.w", "a.4.w"], ["a.{0..4 step 2}.w 3"]),
    (["a.0.w", "a.5.w"], ["a.{0,5}.w 2"]),
    (["a.0", "a.1", "a.5"], ["a.{0,1,5} 3"]),
    (["0.e.0", "0.e.1", "1.e.0", "1.e.1"], ["{0..1}.e.{0..1} 4"]),
    (["0.e.0", "1.e.0", "1.e.1"], ["{0..1}.e.0 2", "1.e.1 1"]),
    (["a0.w", "a1.w"], ["a0.w 1", "a1.w 1"]),
]


@pytest.mark.parametrize(("names", "folded"), FOLDS)
def test_names_of_repeated_blocks_are_one(names: list[str], folded: list[str]) -> None:
    assert [f"{p} {n}" for p, n, _ in fold((name, 0) for name in names)] == folded


def test_names_with_unequal_values_stay_apart() -> None:
    assert fold([("a.0", "x"), ("a.1", "y"), ("a.2", "x")]) == [
        ("a.{0,2}", 2, "x"),
        ("a.1", 1, "y"),
    ]


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=12))
def test_no_name_is_lost_or_counted_twice(places: set[tuple[int, int]]) -> None:
    names = [(f"layers.{a}.experts.{b}.w", 0) for a, b in sorted(places)]
    assert sum(count for _, count, _ in fold(names)) == len(names)


UNITS = [
    (bytes_text(0), "0 B"),
    (bytes_text(1023), "1023 B"),
    (bytes_text(1024), "1.00 KiB"),
    (bytes_text(72 * 2**30), "72.0 GiB"),
    (bytes_text(2**30 - 1), "1.00 GiB"),
    (bytes_text(1000 * 2**30), "1000 GiB"),
    (seconds_text(0), "0 s"),
    (seconds_text(1.2345), "1.23 s"),
    (seconds_text(0.9999), "1.00 s"),
    (seconds_text(0.0123), "12.3 ms"),
    (seconds_text(4.5e-5), "45.0 us"),
    (seconds_text(754.2), "754 s"),
    (flops_text(2.1e12), "2.10 TFLOP"),
    (flops_text(12), "12 FLOP"),
    (count_text(6_738_415_616), "6.74 B"),
    (count_text(124_439_808), "124 M"),
    (count_text(7), "7"),
    (percent_text(0.123), "12 %"),
    (percent_text(0.001), "< 1 %"),
    (percent_text(0), "0 %"),
    (difference_text(2.0, 3.0), "+50 %"),
    (difference_text(2.0, 1.0), "-50 %"),
    (difference_text(0.0, 1.0), "predicted 0"),
    (tensor_text((16, 10), "float32"), "f32[16, 10]"),
    (tensor_text((), "bool"), "bool[]"),
]


@pytest.mark.parametrize(("text", "expected"), UNITS)
def test_units_are_those_that_people_read(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule(), ""),
        (
            Schedule(microbatches=32, stages=4, stage_blocks=(8, 9, 8, 7), optimizer_shards=4),
            "32 microbatches of 2 samples; 1F1B over 4 stages of 8+9+8+7 blocks; optimizer shared "
            "by 4 devices",
        ),
        (
            Schedule(
                microbatches=64,
                stages=2,
                virtual_stages=8,
                order="interleaved",
                recompute="full",
                recomputed_blocks=1,
            ),
            "64 microbatches of 1 sample; interleaved 1F1B over 2 stages x 8 chunks; 1 block "
            "computed again",
        ),
        (
            Schedule(recompute="selective", overlapped=("data",), products="fp8"),
            "attention scores of all blocks computed again; messages over data beside computing; "
            "products in fp8",
        ),
        (Schedule(stages=3, stage_blocks=(4, 4, 3)), "1F1B over 3 stages of 4x2+3 blocks"),
    ],
    ids=["plain", "uneven", "interleaved", "selective", "runs"],
)
def test_a_schedule_is_told_in_words(schedule: Schedule, words: str) -> None:
    assert schedule_text(schedule, 64) == words
    shown = render_text(plan_table(sample_plan().model_copy(update={"schedule": schedule})))
    assert ("schedule" in shown) == bool(words)
    assert words.partition(" ")[0] in shown
