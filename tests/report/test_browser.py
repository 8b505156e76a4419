"""The pages in a real Chromium: quiet, alone, light and dark, on a phone, on paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from autoshard.report import plan_page, sweep_page
from tests.figures import values

CHROMIUM = which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    pages = {
        "plan": plan_page(values.large_plan(), values.trace(40)),
        "sweep": sweep_page(values.rows(), {"name": "night"}),
        "hostile": plan_page(values.hostile_plan(), values.trace(1)),
    }
    out = {}
    for name, page in pages.items():
        out[name] = folder / f"{name}.html"
        out[name].write_text(page, encoding="utf-8")
    return out


class Opened:
    """A page from disk, with what it said and what it asked for."""

    def __init__(self, browser: Browser, path: Path, width: int, scheme: str) -> None:
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,  # type: ignore[arg-type]  # light or dark
        )
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def color(self, selector: str, name: str) -> tuple[int, ...]:
        script = "([s, n]) => getComputedStyle(document.querySelector(s))[n]"
        text = self.page.evaluate(script, [selector, name])
        return tuple(int(v) for v in re.findall(r"\d+", text)[:3])


@pytest.mark.parametrize("name", ["plan", "sweep", "hostile"])
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_a_page_is_quiet_alone_and_no_wider_than_the_screen(
    browser: Browser, files: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    opened = Opened(browser, files[name], width, scheme)
    assert opened.said == []
    assert [u for u in opened.asked if not u.startswith(("file:", "data:"))] == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    shown, hidden = (".narrow", ".wide") if width < 500 else (".wide", ".narrow")
    assert opened.page.locator(f"{shown} svg").first.is_visible()
    assert not opened.page.locator(f"{hidden} svg").first.is_visible()
    opened.page.close()


def test_dark_is_dark_in_the_pictures_too(browser: Browser, files: dict[str, Path]) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        opened = Opened(browser, files["plan"], 1280, scheme)
        seen[scheme] = (
            sum(opened.color("body", "backgroundColor")),
            sum(opened.color("body", "color")),
            sum(opened.color(".wide .f-ink", "fill")),
        )
        opened.page.close()
    light, dark = seen["light"], seen["dark"]
    assert light[0] > 700 > 100 > dark[0]
    assert light[1] < 200 < 600 < dark[1]
    assert light[2] < 200 < 600 < dark[2]


def test_no_text_of_a_picture_is_cut_off(browser: Browser, files: dict[str, Path]) -> None:
    script = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
      const all = svg.getBoundingClientRect();
      if (!all.width) return [];
      return [...svg.querySelectorAll('text')].filter(t => {
        const b = t.getBoundingClientRect();
        return b.left < all.left - 2 || b.right > all.right + 2;
      }).map(t => t.textContent);
    })"""
    for name in ("plan", "sweep"):
        for width in (390, 1280):
            opened = Opened(browser, files[name], width, "light")
            assert opened.page.evaluate(script) == []
            opened.page.close()


def test_a_table_is_searched_and_sorted(browser: Browser, files: dict[str, Path]) -> None:
    opened = Opened(browser, files["sweep"], 1280, "light")
    page = opened.page
    rows = page.locator("#points tbody tr")
    page.get_by_label("Search this table").fill("llama a100-80 infeasible")
    assert rows.filter(visible=True).count() == 2
    page.get_by_label("Search this table").fill("")
    assert rows.filter(visible=True).count() == 40
    page.locator("#points th button", has_text="memory").click()
    values_ = page.evaluate(
        "[...document.querySelectorAll('#points tbody tr')]"
        ".map(r => r.cells[4].dataset.v).filter(v => v).map(Number)"
    )
    assert values_ == sorted(values_)
    assert opened.said == []
    page.close()


def test_a_page_prints_with_all_that_is_folded(browser: Browser, files: dict[str, Path]) -> None:
    opened = Opened(browser, files["plan"], 1280, "dark")
    printed = opened.page.pdf(format="A4")
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= 4
    opened.page.emulate_media(media="print")
    assert sum(opened.color("body", "backgroundColor")) > 700
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.page.locator("details:not([open])").count() == 0
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.page.locator("details[open]").count() == 0
    opened.page.close()
