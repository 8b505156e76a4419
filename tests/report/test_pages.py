"""The pages: all that is known is on them, nothing from elsewhere, and they stay small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autoshard.cli.app import run
from autoshard.cluster import Cluster
from autoshard.errors import RequestError
from autoshard.plan import PlanDocument
from autoshard.report import (
    SCRIPT_SHA256,
    STYLE_SHA256,
    plan_figures,
    plan_page,
    sweep_figures,
    sweep_page,
    write_figures,
)
from tests.figures import values

VOID = {"meta", "link", "input", "wbr"}


class Reader(HTMLParser):
    """Elements in balance, the addresses that they name, and their text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.inline: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                self.addresses.append(value or "")
            if name == "style" or name.startswith("on"):
                self.inline.append(name)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


PAGES = {
    "plan": plan_page(values.plan(), values.trace()),
    "plan without a trace": plan_page(values.plan()),
    "bare plan": plan_page(
        values.plan(
            cluster={}, alternatives=(), collectives=(), measurements=(), lower_bound_s=None
        )
    ),
    "hostile plan": plan_page(values.hostile_plan(), values.trace(1)),
    "sweep": sweep_page(values.rows(), {"name": "night", "notes": ["a note"]}),
    "hostile sweep": sweep_page(values.rows((values.HOSTILE,)), {"name": values.HOSTILE}),
    "empty sweep": sweep_page([], None),
}
each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


@each_page
def test_a_page_stands_alone(page: str) -> None:
    read = Reader(page)
    assert set(read.addresses) <= {"data:,"}
    assert read.inline == []
    assert read.tags.isdisjoint({"iframe", "object", "embed", "img", "form"})
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


@each_page
def test_a_page_names_its_style_and_script_by_their_hashes(page: str) -> None:
    for tag, source in (("style", STYLE_SHA256), ("script", SCRIPT_SHA256)):
        found = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(found) == 1
        digest = hashlib.sha256(found[0].encode()).digest()
        assert source == "sha256-" + base64.b64encode(digest).decode()
        assert f"'{source}'" in unescape(page[: page.index("<style>")])


def test_names_are_text_whatever_they_hold() -> None:
    for page in (PAGES["hostile plan"], PAGES["hostile sweep"]):
        assert "<script>alert" not in page
        assert "\x07" not in page
        assert "alert(1)" in Reader(page).text


def test_the_largest_plan_stays_below_a_megabyte() -> None:
    page = plan_page(values.large_plan(), values.trace(layers=126, operators=26))
    assert len(page.encode()) < 1_000_000
    assert "model.layers.{0..125}.gate.weight" in Reader(page).text
    assert "16,384 x H100" in page


def test_a_plan_whose_tensors_do_not_fold_stays_below_a_megabyte() -> None:
    document = values.plan()
    tensor = next(iter(document.parameters.values()))
    many = {f"layer_{i:05d}_{'x' * 300}.weight": tensor for i in range(20_000)}
    page = plan_page(document.model_copy(update={"parameters": many}), values.trace())
    assert len(page.encode()) < 1_000_000
    assert "18,500 rows more" in page


def test_a_plan_page_has_everything_that_the_plan_says() -> None:
    document = values.plan()
    text = Reader(PAGES["plan"]).text
    for other in document.alternatives:
        assert other.label in text
        assert other.why in text
    for said in (*document.warnings, *document.assumptions, document.label, document.model.name):
        assert said in text
    for group in document.collectives:
        assert group.op in text
    for measured in document.measurements:
        assert measured.devices in text
    assert "model.layers.{0..31}.self_attn.qkv.weight" in text
    assert document.model.fingerprint in text


def test_every_number_of_the_cluster_stands_there_with_its_source() -> None:
    text = Reader(PAGES["plan"]).text
    for source in Cluster.preset("h100", 8).sources.values():
        assert source in text
    assert "none given" not in text
    swept = Reader(PAGES["sweep"]).text
    for name in ("h100", "a100-80"):
        for source in Cluster.preset(name).sources.values():
            assert source in swept


def test_a_sweep_page_has_every_point_and_every_error() -> None:
    rows = values.rows()
    page = PAGES["sweep"]
    table = page[page.index('id="points"') :]
    assert table[: table.index("</table>")].count("<tr") == len(rows) + 1
    assert "InfeasibleError: does not fit on 1 device" in table
    assert "4 of 40 points failed (4 x InfeasibleError)" in page
    assert "a note" in page
    for title in ("Best strategy", "Strong scaling", "Weak scaling", "Time against memory"):
        assert f"<h2>{title}</h2>" in page
    assert "4 of 8 predictions are within 10 %" in page


def test_a_page_needs_no_torch() -> None:
    program = (
        "import sys; from autoshard.report import plan_page, sweep_page; "
        "from tests.figures import values; plan_page(values.plan(), values.trace(1)); "
        "sweep_page(values.rows()); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_pictures_are_written_under_names_of_their_own(kind: str, tmp_path: Path) -> None:
    figures = sweep_figures(values.rows(("a/b", "a-b", "../c")))
    if kind == "png":  # drawing takes its time, and the names are the same
        figures = tuple(f for f in figures if f.name.startswith("map"))
    paths = write_figures(figures, tmp_path / "new", kind, width=400)
    assert len(set(paths)) == len(figures)
    assert {p.parent for p in paths} == {tmp_path / "new"}
    start = b"\x89PNG" if kind == "png" else b"<svg"
    assert all(p.read_bytes().startswith(start) for p in paths)


def test_another_format_and_a_folder_that_cannot_be_are_refused(tmp_path: Path) -> None:
    figures = plan_figures(values.plan())
    with pytest.raises(RequestError, match="choose one of png, svg"):
        write_figures(figures, tmp_path, "gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="name another folder"):
        write_figures(figures, tmp_path / "file" / "folder")


# ---- command ------------------------------------------------------------------------------------


def unnamed(document: PlanDocument) -> str:
    """A plan that cannot build its model, so that no torch is needed."""
    model = document.model.model_copy(update={"source": None})
    return document.model_copy(update={"model": model}).to_json()


def test_the_command_writes_a_page_and_pictures_of_a_plan(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(unnamed(values.plan()))
    out, pictures = tmp_path / "page.html", tmp_path / "pictures"
    call = ["report", str(tmp_path / "plan.json"), "--out", str(out), "--figures", str(pictures)]
    assert run([*call, "--format", "svg", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["output"] == str(out)
    assert "without a timeline" in captured.err
    assert "<h1>llama-7b on 8 x H100-SXM-80GB</h1>" in out.read_text()
    assert {p.name for p in pictures.iterdir()} == {
        f"{n}.svg" for n in ("mesh", "step-time", "memory", "alternatives", "communication")
    }


@pytest.mark.parametrize("form", ["list", "document"])
def test_the_command_reads_rows(form: str, tmp_path: Path) -> None:
    rows = values.rows()
    content = rows if form == "list" else {"kind": "autoshard.sweep", "name": "n", "rows": rows}
    (tmp_path / "rows.json").write_text(json.dumps(content))
    out = tmp_path / "page.html"
    assert run(["report", str(tmp_path / "rows.json"), "--out", str(out)]) == 0
    assert f"<h1>Sweep {'rows' if form == 'list' else 'n'}</h1>" in out.read_text()


WRONG = [
    ("{}", "not a plan of version 1"),
    ("nothing", "neither a plan, nor rows, nor a store"),
    ("[1]", "a list of objects with a 'model'"),
]


@pytest.mark.parametrize(("content", "message"), WRONG, ids=[c for c, _ in WRONG])
def test_what_is_neither_is_refused(
    content: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.json").write_text(content)
    out = tmp_path / "page.html"
    assert run(["report", str(tmp_path / "file.json"), "--out", str(out)]) == 2
    assert message in capfd.readouterr().err
    assert not out.exists()
