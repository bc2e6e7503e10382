"""The built-in page in a real Chromium, over groups on the scripted engine."""

import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser

from tests.http.at_work import at_work
from tests.http.browser import Visit, chromium

pytestmark = pytest.mark.nightly
# Chromium's own word for an answer of 4xx; the page says in its own what was wrong.
REFUSED = "Failed to load resource"
MOST_ELEMENTS = 700


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def prompts(count: int) -> list[str]:
    return [f"math/{number:03}" for number in range(count)]


SIDEWAYS = """[...document.querySelectorAll('*')]
  .filter(each => each.clientWidth && each.scrollWidth > each.clientWidth + 1)
  .filter(each => ['auto', 'scroll'].includes(getComputedStyle(each).overflowX))
  .map(each => each.id || each.tagName)"""


def test_the_legend_names_what_there_is_and_nothing_scrolls_sideways(browser: Browser) -> None:
    with at_work() as (url, ask):
        visit = Visit(browser, url)
        page = visit.page
        assert page.evaluate("innerWidth") == 1280
        visit.says("empty-title", "No groups yet")
        assert page.evaluate(SIDEWAYS) == []
        assert page.inner_text("#legend") == ""
        ask(*prompts(8))
        visit.reads("running", "8 groups")
        visit.reads("running", "0 groups")
        named = page.inner_text("#legend").split("\n")
        assert {"selected, short", "selected, tail"} <= set(named)
        assert not {"pruned", "failed", "running", "went on from an earlier batch"} & set(named)
        page.focus("#bars")
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        page.wait_for_selector("#found table")
        assert page.evaluate(SIDEWAYS) == []


def test_a_thousand_candidates_are_drawn_and_followed_to_their_end(browser: Browser) -> None:
    with at_work() as (url, ask):
        visit = Visit(browser, url)
        page = visit.page
        page.evaluate(WATCH_SHIFTS)
        visit.says("empty-title", "No groups yet")
        visit.says("command", f"curl {url}v1/rollouts")
        ask(*prompts(84))
        visit.reads("shown", "1,008 candidates in 84 groups")
        visit.reads("running", "84 groups")
        assert not page.is_visible("#empty")
        assert visit.colours("bars")[visit.colour("running")] > 1000
        page.evaluate("document.getElementById('scroll').scrollTop = 1e6")
        visit.reads("running", "0 groups")
        visit.reads("engine", "alive")
        visit.says("end-short", str(7 * 84))
        visit.says("end-long", "84")
        ends = page.evaluate("[...document.querySelectorAll('#ends b')].map(each => Number(each.textContent))")
        assert sum(ends) == 1008
        live = httpx.get(f"{url}v1/live").json()
        tokens = sum(c["tokens"] for group in live["groups"] for c in group["candidates"])
        visit.says("tokens-said", f"{tokens:,} generated")
        colours = visit.colours("bars")
        assert colours[visit.colour("short")] > 1000
        assert visit.colour("running") not in colours
        assert page.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS
        assert page.evaluate("document.documentElement.scrollHeight") <= 720
        assert page.evaluate("shifts") == []
        assert visit.complaints == []
        assert {urlsplit(url).netloc for url in visit.requested if not url.startswith("data:")} == {
            urlsplit(url).netloc
        }


def test_all_can_be_reached_and_heard_by_keyboard(browser: Browser) -> None:
    with at_work() as (url, ask):
        ask(*prompts(6))
        visit = Visit(browser, url)
        press, page = visit.page.keyboard.press, visit.page
        visit.reads("running", "0 groups")
        for _ in range(20):
            press("Tab")
            if page.evaluate("document.activeElement.id") == "bars":
                break
        assert page.evaluate("document.activeElement.id") == "bars"
        press("ArrowDown")
        visit.says("said", "candidate 0 of 12")
        press("ArrowDown")
        visit.says("said", "candidate 1 of 12")
        visit.says("said", "prompt math/005")
        press("PageDown")
        visit.says("said", "prompt math/004")
        press("ArrowUp")
        visit.says("said", "candidate 11 of 12")
        press("End")
        visit.says("said", "prompt math/000")
        press("Enter")
        visit.says("found", "Selected of started8 of 12")
        page.click("#found .link")
        visit.says("found", "Prompt math/000")
        page.focus("#tab-look")
        press("ArrowLeft")
        assert page.evaluate("document.activeElement.id") == "tab-overview"
        assert page.is_visible("#overview")
        assert visit.complaints == []


def test_in_the_dark_it_is_dark_and_legible(browser: Browser) -> None:
    with at_work() as (url, ask):
        visit = Visit(browser, url, dark=True)
        ask(*prompts(3))
        visit.says("end-long", "3")
        assert visit.page.evaluate(LUMINANCE, ["body", "backgroundColor"]) < 0.02
        for selector in ("body", ".note", "dt", "#detail", '[role="tab"]', "#engine"):
            assert visit.page.evaluate(CONTRAST, selector) >= 4.5, selector
        assert visit.colours("bars")[visit.colour("short")] > 500
        visit.page.emulate_media(color_scheme="light")
        visit.page.wait_for_function(DRAWN)
        assert visit.colours("bars")[visit.colour("short")] > 500
        for selector in ("body", ".note", "dt", "#detail", '[role="tab"]', "#engine"):
            assert visit.page.evaluate(CONTRAST, selector) >= 4.5, selector


def test_a_key_is_asked_for_and_kept_in_the_page_alone(browser: Browser) -> None:
    with at_work("user") as (url, _):
        visit = Visit(browser, url)
        page = visit.page
        page.fill("#api-key", "wrong")
        page.keyboard.press("Enter")
        visit.says("key-why", "This key was refused.")
        page.fill("#api-key", "user")
        page.keyboard.press("Enter")
        visit.reads("connection", "live")
        page.click("#tab-policy")
        visit.says("settings", "num_longest1")
        visit.says("settings", "group_sizenot set")
        assert json.loads(page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")) == [{}, {}]
        assert page.context.cookies() == []
        assert all(complaint.startswith(REFUSED) for complaint in visit.complaints)


def test_a_lost_connection_is_said_and_what_was_seen_stays(browser: Browser) -> None:
    with at_work() as (url, ask):
        visit = Visit(browser, url)
        ask(*prompts(2))
        visit.reads("shown", "24 candidates in 2 groups")
    visit.reads("connection", "no connection")
    assert visit.page.text_content("#shown") == "24 candidates in 2 groups"
    assert not visit.page.is_visible("#empty")


def test_what_others_send_is_shown_as_text_and_never_run(browser: Browser) -> None:
    nasty = "<img src=x onerror=alert(1)>"
    with at_work() as (url, ask):
        visit = Visit(browser, url)
        ask(nasty)
        visit.says("end-long", "1")
        visit.page.focus("#bars")
        visit.page.keyboard.press("Home")
        visit.page.keyboard.press("Enter")
        visit.says("found", "Group batch-")
        visit.page.click("#found .link")
        visit.says("found", nasty)
        assert visit.page.query_selector("#side img") is None
        assert visit.complaints == []


WATCH_SHIFTS = """() => {
  window.shifts = [];
  new PerformanceObserver((list) => {
    for (const shift of list.getEntries()) shifts.push(shift.sources.map(({ node }) => node?.id || node?.nodeName));
  }).observe({ type: "layout-shift", buffered: true });
}"""
PARTS = """const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => parts(colour).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);"""
LUMINANCE = f"""([selector, property]) => {{ {PARTS}
  return luminance(getComputedStyle(document.querySelector(selector))[property]); }}"""
CONTRAST = f"""(selector) => {{ {PARTS}
  const element = document.querySelector(selector);
  let behind = element;
  while (parts(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const both = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(luminance);
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05); }}"""
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => true)"
