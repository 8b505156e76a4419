"""The page in a real browser, against a real server: what a new user does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from autoshard.plan import PlanDocument
from tests.service.conftest import Keyed
from tests.service.running import SMALL, Server

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"the page is tested in a browser, and {CHROMIUM} is not there"
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
TIMES = "\N{MULTIPLICATION SIGN}"
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
PATIENCE_MS = 60_000
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 3,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 512,
    "n_positions": 64,
}

Open = Callable[..., Page]
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[Open]:
    """Opens pages; at the end none of them has complained or asked another host."""
    server.wait_ready()
    complaints: list[str] = []
    hosts: set[str] = set()
    contexts = []

    def complain(text: str) -> None:
        # The browser itself notes each answer of 4xx; that is how errors are shown, not a fault.
        if not text.startswith("Failed to load resource"):
            complaints.append(text)

    def new(path: str = "/", *, url: str = server.url, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": DESK, "locale": "en-US", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: complain(str(error)))
        page.on(
            "console",
            lambda said: complain(said.text) if said.type in ("error", "warning") else None,
        )
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.goto(url + path)
        return page

    yield new
    for context in contexts:
        context.close()
    assert not complaints
    assert {host.partition(":")[0] for host in hosts if host} == {"127.0.0.1"}


def plan_of(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """An envelope, by HTTP."""
    answer = server.http.post("/v1/plans", json=body, headers={"prefer": "wait=60"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def small_plan(server: Server) -> dict[str, Any]:
    server.wait_ready()
    return plan_of(server, SMALL)


def paste(page: Page, config: object) -> None:
    page.get_by_role("radio", name="config.json").check()
    page.get_by_label("Hugging Face config.json").fill(
        config if isinstance(config, str) else json.dumps(config, indent=1)
    )


def scrolls_sideways(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


# ---- a new user ---------------------------------------------------------------------------------


def test_a_new_user_plans_llama_on_8_h100_with_the_defaults(open_page: Open) -> None:
    page = open_page()
    expect(page.get_by_role("combobox", name="Preset").locator("option:checked")).to_have_text(
        "llama-3-8b (8.03B)"
    )
    page.get_by_role("button", name="Find the plan").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    expect(page.get_by_text("Best so far")).to_be_visible()
    title = page.get_by_role("heading", level=1)
    expect(title).to_have_text(f"llama-3-8b on 8 {TIMES} H100-SXM-80GB")
    expect(title).to_be_focused()
    expect(page.locator(".device")).to_have_count(8)
    expect(page.locator(".timeline")).to_be_visible()
    for name in ("Forward compute", "Backward compute", "Communication not hidden"):
        expect(page.locator(".key").get_by_text(name)).to_be_visible()
    for name in ("Parameters", "Gradients", "Optimizer state", "Activations", "Reserve"):
        expect(page.locator(".key").get_by_text(name, exact=True)).to_be_visible()
    chosen = page.locator("#alternatives tr.chosen")
    expect(chosen).to_have_count(1)
    assert page.locator(".chart .point").count() == page.locator("#alternatives tbody tr").count()
    layers = page.locator("#parameters tbody tr").filter(has_text="self_attn.q_proj")
    expect(layers).to_have_count(1)
    expect(layers).to_contain_text("model.layers.{0..31}.self_attn.q_proj.weight")
    page.get_by_label("Search").fill("q_proj bfloat16")
    expect(page.locator("#parameters tbody tr")).to_have_count(1)
    page.get_by_label("Show every layer by itself").check()
    expect(page.locator("#parameters tbody tr")).to_have_count(32)


def test_a_pasted_config_is_planned_downloaded_and_reloaded_by_its_link(
    open_page: Open, tmp_path: Path
) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    paste(page, CONFIG)
    expect(page.locator("#config-state")).to_have_text("Valid JSON: gpt2, 3 layers")
    page.get_by_label("Global batch").fill("8")
    page.get_by_label("Sequence length").fill("32")
    page.get_by_role("button", name="Find the plan").click()
    title = page.get_by_role("heading", level=1)
    expect(title).to_have_text(f"gpt2 on 8 {TIMES} H100-SXM-80GB")

    files = {}
    for name in ("Plan (JSON)", "Report (HTML)", "Timeline (trace)"):
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        files[name] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[name])
    document = PlanDocument.load(files["Plan (JSON)"])
    assert (document.global_batch, len(document.parameters)) == (8, 3 * 12 + 4)
    assert files["Report (HTML)"].read_text().startswith("<!doctype html>")
    assert json.loads(files["Timeline (trace)"].read_text())["traceEvents"]

    page.get_by_role("button", name="Copy link").click()
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.url
    assert set(parse_qs(urlsplit(link).query)) == {"plan", "share"}
    other = open_page(link[link.index("/?") :])
    expect(other.get_by_role("heading", level=1)).to_have_text(f"gpt2 on 8 {TIMES} H100-SXM-80GB")
    expect(other.locator(".tile .value").first).to_have_text(
        page.locator(".tile .value").first.inner_text()
    )


def test_the_command_lines_say_the_same_request(open_page: Open, server: Server) -> None:
    page = open_page()
    page.get_by_role("combobox", name="Preset").select_option("gpt2")
    page.get_by_label("Devices", exact=True).fill("4")
    page.get_by_label("Data type").select_option("bf16")
    page.get_by_text("More: strategy").click()
    page.get_by_label("Memory limit").fill("72GiB")
    page.get_by_label("Mesh", exact=True).fill("dp=2, model=2")
    page.get_by_role("button", name="Find the plan").click()
    page.get_by_text("The same from a terminal").click()
    lines = page.locator(".command pre")
    expect(lines.nth(0)).to_have_text(
        "autoshard plan gpt2 --cluster h100 --devices 4 --dtype bf16"
        " --mesh data=2,model=2 --memory-limit 77309411328"
    )
    sent = re.search(r"-d '(.*)'", lines.nth(1).inner_text())
    assert sent is not None
    answer = server.http.post("/v1/plans", json=json.loads(sent[1]))
    assert answer.status_code == 200, "the same request has its plan already"
    fetched = httpx2.get(lines.nth(2).inner_text().removeprefix("curl ").strip("'"))
    assert fetched.json()["id"] == answer.json()["id"]


# ---- jobs ---------------------------------------------------------------------------------------


def test_a_job_is_cancelled_and_opened_again_from_the_history(
    open_page: Open, server: Server
) -> None:
    page = open_page()
    page.get_by_role("combobox", name="Preset").select_option("llama-3-405b")
    page.get_by_label("Devices", exact=True).fill("512")
    page.get_by_role("button", name="Find the plan").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("heading", name="Cancelled")).to_be_visible()
    page.get_by_role("link", name="History").click()
    row = page.locator("#jobs tbody tr").first
    expect(row).to_contain_text(f"llama-3-405b on 512 {TIMES} h100")
    expect(row).to_contain_text("cancelled")
    plan_of(server, SMALL)
    page.reload()
    # Other tests of this server may have asked for the same in vain.
    done = page.locator("#jobs tbody tr").filter(has_text="succeeded")
    done.get_by_role("link", name=f"gpt2 on 2 {TIMES} h100").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"gpt2 on 2 {TIMES} H100-SXM-80GB")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("History")


def test_a_stream_that_breaks_is_taken_up_after_its_last_event(open_page: Open) -> None:
    page = open_page()
    asked: list[str | None] = []

    def cut(route: Route) -> None:
        asked.append(route.request.headers.get("last-event-id"))
        if len(asked) > 1:
            route.continue_()
            return
        data = {"message": "priced data, data=4", "done": 1, "total": 7, "best_step_time_s": 0.5}
        body = f"id: 1\nevent: progress\ndata: {json.dumps(data)}\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/events", cut)
    paste(page, {**CONFIG, "n_embd": 48})
    page.get_by_role("button", name="Find the plan").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("gpt2 on")
    assert asked[:2] in ([None], [None, "1"])


def test_what_does_not_fit_says_what_binds_and_what_would_fit(open_page: Open) -> None:
    page = open_page()
    paste(page, {**CONFIG, "n_layer": 1})
    page.get_by_text("More: strategy").click()
    page.get_by_label("Strategy").select_option("data")
    page.get_by_label("Memory limit").fill("4.02 GB")
    page.get_by_label("Global batch").fill("256")
    page.get_by_role("button", name="Find the plan").click()
    expect(page.get_by_role("heading", name="Nothing fits")).to_be_focused()
    expect(page.get_by_role("heading", name="What binds")).to_be_visible()
    page.get_by_role("button", name=re.compile("Try")).first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("gpt2 on")


# ---- errors -------------------------------------------------------------------------------------


def test_an_error_is_shown_at_the_field_that_it_points_to(open_page: Open) -> None:
    page = open_page()
    devices = page.get_by_label("Devices", exact=True)
    devices.fill("1000000")
    page.get_by_role("button", name="Find the plan").click()
    expect(devices).to_be_focused()
    expect(devices).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#devices-error")).to_contain_text("65536")
    devices.fill("8")
    expect(devices).not_to_have_attribute("aria-invalid", "true")

    paste(page, '{"model_type": "gpt2",\n "n_layer": }')
    expect(page.locator("#config-state")).to_contain_text("Line 2, column 13")
    page.get_by_role("button", name="Find the plan").click()
    expect(page.locator("#config-error")).to_contain_text("Line 2, column 13")
    paste(page, {**CONFIG, "n_layer": 10**6})
    page.get_by_role("button", name="Find the plan").click()
    expect(page.locator("#config-error")).to_contain_text("n_layer: ")
    assert page.evaluate("getSelection().toString()") == '"n_layer"'


def test_names_that_hold_markup_are_text(open_page: Open, small_plan: dict[str, Any]) -> None:
    page = open_page("/?view=history")
    evil = "<img src=x onerror=alert(1)>"
    plan = small_plan["plan"]
    plan["label"] = plan["model"]["name"] = evil
    plan["parameters"] = {evil: next(iter(plan["parameters"].values()))}
    plan["warnings"] = [evil]
    plan["alternatives"][0]["why"] = evil
    page.route("**/v1/plans/*", lambda route: route.fulfill(json=small_plan))
    page.goto(page.url.replace("view=history", f"plan={small_plan['id']}"))
    expect(page.get_by_role("heading", level=1)).to_contain_text(evil)
    assert page.locator("main img").count() == 0


FAULTS = [
    ("{}", None),
    ('{"a": [1, -2.5e3, true, null, "\\u00e9"]}', None),
    ("", "Line 1, column 1: found the end where a value is expected"),
    ('{"a": 1,\n}', 'Line 2, column 1: there is a comma before "}"'),
    ("[1 2]", 'Line 1, column 4: found "2" where "," or "]" is expected'),
    ("{'a': 1}", 'Line 1, column 2: found "\'" where a name in quotes is expected'),
    ('{"a" 1}', 'Line 1, column 6: found "1" where ":" is expected'),
    ('{"a": 01}', 'Line 1, column 8: found "1" where "," or "}" is expected'),
    ('{"a": NaN}', 'Line 1, column 7: found "N" where a value is expected'),
    ('{"a": "b\n"}', "Line 1, column 7: this text has no end"),
    ("{} x", "Line 1, column 4: there is more after the end of the value"),
]


def test_faults_of_json_are_named_by_line_and_column(open_page: Open) -> None:
    page = open_page()
    script = """async (texts) => {
      const { jsonFault } = await import("/static/json.js");
      return texts.map((text) => jsonFault(text)?.message ?? null);
    }"""
    found = page.evaluate(script, [text for text, _ in FAULTS])
    for (text, expected), message in zip(FAULTS, found, strict=True):
        assert (message is None) == (expected is None), text
        assert expected is None or message.startswith(expected), text


def test_folded_names_stand_for_each_tensor_once(open_page: Open) -> None:
    page = open_page()
    tensor = {"shape": [8], "dtype": "float32", "partition_spec": [None], "local_bytes": 32}
    other = {**tensor, "partition_spec": ["data"]}
    names = [f"layers.{i}.experts.{j}.w" for i in range(3) for j in range(4)]
    parameters = {name: tensor for name in names if name != "layers.1.experts.2.w"}
    parameters |= {"layers.1.experts.2.w": other, "head.w": tensor, "x.2.y": tensor}
    script = """async (parameters) => {
      const { fold } = await import("/static/parameters.js");
      return fold(parameters).map((f) => [f.name, f.names]);
    }"""
    found = page.evaluate(script, parameters)
    assert sorted(name for _, group in found for name in group) == sorted(parameters)
    assert [name for name, _ in found] == [
        "layers.0.experts.{0..3}.w",
        "layers.1.experts.{0,1,3}.w",
        "layers.2.experts.{0..3}.w",
        "layers.1.experts.2.w",
        "head.w",
        "x.2.y",
    ]


def test_a_mesh_of_16384_devices_is_drawn_by_its_nodes(
    open_page: Open, small_plan: dict[str, Any]
) -> None:
    page = open_page("/?view=history", viewport=PHONE)
    plan = small_plan["plan"]
    plan["mesh"] = {"axis_names": ["data", "model"], "sizes": [64, 256]}
    page.route("**/v1/plans/*?*", lambda route: route.fulfill(json=small_plan))
    page.goto(page.url.replace("/?view=history", small_plan["links"]["page"]))
    expect(page.get_by_text("All 2,048 nodes, one to a square")).to_be_visible()
    expect(page.get_by_text("one device on each of 64 nodes, over InfiniBand")).to_be_visible()
    links = "by NVLink 4 and InfiniBand NDR, 400 Gb/s"
    expect(page.get_by_text(f"over 32 nodes, {links}")).to_be_visible()
    assert page.locator(".device").count() == 3 * 8, "the first nodes and the last one"
    page.get_by_role("radio", name="model").check()
    expect(page.get_by_text("the colour changes with the index on model")).to_be_hidden()
    assert not scrolls_sideways(page)


# ---- people -------------------------------------------------------------------------------------


def test_everything_is_done_by_keyboard_alone(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#preset option")).not_to_have_count(0)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the answer")).to_be_focused()
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if seen[-1] == "preset":
            page.keyboard.type("gpt2")
        if seen[-1] == "devices":
            page.keyboard.type("2")
        if seen[-1] == "submit":
            break
    assert seen[-1] == "submit", seen
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(f"gpt2 on 2 {TIMES} H100-SXM-80GB")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    expect(page.locator("#announce")).to_contain_text("The plan is there")
    for _ in range(40):
        page.keyboard.press("Tab")
        focus = page.evaluate("document.activeElement.getAttribute('class') || ''")
        if "device" in focus.split():
            page.keyboard.press("ArrowRight")
            expect(page.locator(".device.current")).to_have_attribute(
                "aria-label", re.compile("device 1:")
            )
        if "point" in focus.split():
            page.keyboard.press("End")
            expect(page.locator(".point:focus")).to_have_class(re.compile("current"))
        if "zoomable" in focus.split():
            page.keyboard.press("+")
            expect(page.get_by_text(re.compile(r"^\S+ \S+ to .* of "))).to_be_visible()
            break
    else:
        pytest.fail("the timeline was not reached by Tab")
    page.keyboard.press("Tab")
    expect(page.locator(".zoomable")).not_to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_down_only_and_follows_the_colours_of_the_system(
    open_page: Open, small_plan: dict[str, Any], scheme: str
) -> None:
    page = open_page(small_plan["links"]["page"], viewport=PHONE, color_scheme=scheme)
    expect(page.locator(".timeline")).to_be_visible()
    assert not scrolls_sideways(page)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = {"light": "rgb(245, 246, 248)", "dark": "rgb(17, 22, 29)"}
    assert page.evaluate(ground) == light[scheme]
    button = page.locator("#theme")
    button.click()
    assert page.evaluate(ground) == light["light"]
    button.click()
    assert page.evaluate(ground) == light["dark"]
    page.reload()
    assert page.evaluate(ground) == light["dark"], "the choice is kept"
    page.get_by_role("link", name="History").click()
    expect(page.locator("#jobs")).to_be_visible()
    assert not scrolls_sideways(page)
    page.get_by_role("link", name="Plan", exact=True).click()
    assert not scrolls_sideways(page)


CONTRAST = """() => {
  const value = (c) => c.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const found = value(getComputedStyle(e).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!text || !e.checkVisibility() || e.closest("svg, .off-screen, .skip")) continue;
    if (e.closest(":disabled")) continue;
    const [a, b] = [light(value(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${e.tagName}.${e.className}: ${e.textContent}: ${ratio}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_a_contrast_of_4_5_and_each_control_a_name(
    open_page: Open, small_plan: dict[str, Any], scheme: str
) -> None:
    page = open_page(small_plan["links"]["page"], color_scheme=scheme)
    expect(page.locator(".timeline")).to_be_visible()
    assert page.evaluate(CONTRAST) == []
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button")]
          .filter((e) => e.checkVisibility() && !e.labels?.length
            && !e.getAttribute("aria-label") && !e.textContent.trim())
          .map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    doubled = page.evaluate(
        """() => [...document.querySelectorAll("[id]")].map((e) => e.id)
          .filter((id, i, all) => id && all.indexOf(id) !== i)"""
    )
    assert doubled == []


def test_paper_shows_the_plan_without_the_form(open_page: Open, small_plan: dict[str, Any]) -> None:
    page = open_page(small_plan["links"]["page"])
    expect(page.locator(".timeline")).to_be_visible()
    page.emulate_media(media="print")
    expect(page.locator("#form")).to_be_hidden()
    expect(page.locator("#alternatives")).to_be_visible()
    assert page.pdf().startswith(b"%PDF")


def test_a_key_is_asked_for_and_kept_in_the_tab_only(
    open_page: Open, server_with_keys: Keyed, small_plan: dict[str, Any]
) -> None:
    page = open_page(url=server_with_keys.url)
    key = page.get_by_role("textbox", name="API key")
    key.fill("ask_wrong_wrong")
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_text("does not know this key")).to_be_visible()
    key.fill(server_with_keys.ada)
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#preset option")).not_to_have_count(0)
    assert page.evaluate("sessionStorage.length + localStorage.length") == 1
    page.reload()
    expect(page.locator("#preset option")).not_to_have_count(0)
    page.get_by_role("button", name="Forget API key").click()
    assert page.evaluate("sessionStorage.length") == 0

    sent = open_page(small_plan["links"]["page"], url=server_with_keys.url)
    expect(sent.get_by_role("heading", level=1)).to_contain_text("gpt2 on 2")
    expect(sent.locator(".timeline")).to_be_visible()
    expect(sent.get_by_role("dialog")).to_be_hidden()
