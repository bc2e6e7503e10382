"""The built-in page in a real Chromium, over groups on the scripted engine, by real time."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from unittest.mock import Mock
from urllib.parse import urljoin, urlsplit
from uuid import uuid4

import httpx
import pytest
from fastapi import Request, Response
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from darts_server.engine.scripted import Script
from darts_server.http import page
from darts_server.http.body import BodyLimits
from darts_server.http.security.access import Access, Keys
from darts_server.http.security.middleware import SecurityMiddleware
from darts_server.rollout.sessions.registry import SessionGroupRequest, SessionRegistry
from darts_server.rollout.sessions.session_group import AgentSession
from tests.clients.servers import application, listening

pytestmark = pytest.mark.nightly
# Chromium's own word for an answer of 4xx; the page says in its own what was wrong.
REFUSED = "Failed to load resource"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
VARIABLE = "DARTS_CHROMIUM"
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage")
"""Root may not use the sandbox, and containers have little shared memory."""
WAIT_MS = 120_000
"""Timeout for a change of the page. Busy machines are slow."""


class Visit:
    """An open page, with its errors and requests."""

    def __init__(self, browser: Browser, url: str) -> None:
        context = browser.new_context(viewport={"width": 1280, "height": 720}, reduced_motion="reduce")
        context.set_default_timeout(WAIT_MS)
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(url)

    def says(self, element: str, text: str) -> None:
        """Wait until the element of that id holds this text."""
        found = "([id, text]) => document.getElementById(id).textContent.includes(text)"
        self.page.wait_for_function(found, arg=[element, text])

    def reads(self, element: str, text: str) -> None:
        """Wait until the element of that id holds this text and no other."""
        self.page.wait_for_function(
            "([id, text]) => document.getElementById(id).textContent === text", arg=[element, text]
        )

    def colours(self, canvas: str) -> dict[str, int]:
        """Return the number of pixels of each colour of a canvas, by ``#rrggbb``."""
        counted: dict[str, int] = self.page.evaluate(COUNT_COLOURS, canvas)
        return counted

    def colour(self, name: str) -> str:
        """Return a colour of the style sheet."""
        read = "name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()"
        return str(self.page.evaluate(read, name))

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


COUNT_COLOURS = """id => {
  const shown = document.getElementById(id);
  const copy = new OffscreenCanvas(shown.width, shown.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(shown, 0, 0);
  const { data } = copy.getImageData(0, 0, shown.width, shown.height);
  const counts = {};
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] !== 255) continue;
    const hex = [data[at], data[at + 1], data[at + 2]].map((part) => part.toString(16).padStart(2, "0"));
    const colour = `#${hex.join("")}`;
    counts[colour] = (counts[colour] ?? 0) + 1;
  }
  return counts;
}"""
STEP_SECONDS = 0.02


def heavy_tail(request: str, index: int) -> Script:
    """Return lengths of 3 seconds and more: most are short, some are much longer."""
    rng = Random(f"{request}/{index}")
    return Script(min(400, round(20 * rng.lognormvariate(0.4, 0.8)) + 150))


async def run_agents(sessions: SessionRegistry, request: Request) -> Response:
    """Create a group of 4 + 2 sessions for each prompt, and run each session's turns and tools for some seconds."""
    for number, name in enumerate(await request.json()):
        group = await sessions.create(SessionGroupRequest(4, 2, "uniform", name))
        for session in group.sessions:
            task = asyncio.create_task(run_agent(session, Random(f"{number}/{session.index}")))
            AGENTS.add(task)
            task.add_done_callback(AGENTS.discard)
    return Response()


async def run_agent(session: AgentSession, rng: Random) -> None:
    """Run up to 9 turns of about half a second, with tools of up to a second between them."""
    turns = rng.randrange(3, 10)
    for number in range(turns):
        tokens = 0
        turn = session.group.begin_turn(session, lambda: tokens, lambda: None)  # noqa: B023
        for _ in range(rng.randrange(5, 20)):
            await asyncio.sleep(0.05)
            tokens += 3
        turn.finish([1], [2] * tokens, [-1.0] * tokens)
        if number < turns - 1:
            await asyncio.sleep(rng.uniform(0.2, 1.0))
        if session.state.is_over:
            return
    session.group.end_session(session, reward=float(rng.random() < 0.5))


AGENTS: set[asyncio.Task[None]] = set()


@contextmanager
def at_work(*keys: str) -> Iterator[tuple[str, Callable[..., None]]]:
    """The address of the page, and a function that begins a group of 8 for each of these prompts."""
    with application(heavy_tail, STEP_SECONDS, bool(keys)) as (app, _):
        access = Access(Keys(keys))
        app.add_middleware(SecurityMiddleware, access=access, limits=BodyLimits(2**20), on_refusal=Mock())
        page.add_routes(app.router)
        app.add_route("/health", lambda _: Response())
        app.add_route("/agents", partial(run_agents, app.state.sessions), methods=["POST"])
        with listening(app) as listener:

            def ask(*names: str) -> None:
                prompts = [{"text": str(number), "key": name} for number, name in enumerate(names)]
                body = {"prompts": prompts, "group_size": 8, "stream": "groups"}
                # A batch with a key continues without readers.
                headers = {"Idempotency-Key": uuid4().hex}
                with httpx.stream("POST", f"{listener.url}/darts/v1/rollouts", json=body, headers=headers) as answer:
                    next(answer.iter_lines())

            yield f"{listener.url}/darts/", ask


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Open Chromium, found by `VARIABLE`, by its usual names, or in the place of playwright. Else skip the test."""
    with sync_playwright() as playwright:
        given = [os.environ.get(VARIABLE), *map(shutil.which, NAMES), playwright.chromium.executable_path]
        found = next((path for path in given if path and Path(path).exists()), None)
        if found is None:
            pytest.skip(
                f"no Chromium: install one, e.g. with 'apt-get install chromium' or 'playwright install chromium', or "
                f"name it in {VARIABLE}"
            )
        browser = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS), timeout=WAIT_MS)
        yield browser
        browser.close()


def prompts(count: int) -> list[str]:
    return [f"math/{number:03}" for number in range(count)]


SIDEWAYS = """[...document.querySelectorAll('*')]
  .filter(each => each.clientWidth && each.scrollWidth > each.clientWidth + 1)
  .filter(each => ['auto', 'scroll'].includes(getComputedStyle(each).overflowX))
  .map(each => each.id || each.tagName)"""


def test_the_legend_is_complete_and_nothing_scrolls_sideways(browser: Browser) -> None:
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
        assert page.evaluate("document.documentElement.scrollHeight") <= 720
        assert visit.complaints == []
        assert {urlsplit(url).netloc for url in visit.requested if not url.startswith("data:")} == {
            urlsplit(url).netloc
        }


def test_sessions_are_lanes_with_hatched_tool_time_while_they_run_and_afterwards(browser: Browser) -> None:
    with at_work() as (url, ask):
        visit = Visit(browser, url)
        page = visit.page
        page.select_option("#pitch", "13")
        httpx.post(urljoin(url, "/agents"), json=["task/0", "task/1"])
        visit.reads("running", "2 groups")
        visit.reads("running-more", "12 candidates")
        visit.says("legend", "no request, in a tool")
        visit.says("legend", "running")
        ask("math/0")
        visit.reads("running", "0 groups")
        visit.reads("shown", "24 candidates in 3 groups")
        assert visit.colours("bars")[visit.colour("tool")] > 1000
        named = page.inner_text("#legend").split("\n")
        assert {"selected, short", "no request, in a tool"} <= set(named)
        page.focus("#bars")
        page.keyboard.press("Home")
        visit.says("said", "candidate 0 of 12")
        assert "turn" not in page.inner_text("#detail")
        page.keyboard.press("PageDown")
        visit.says("said", "session 0 of 6")
        assert re.search(r"· \d+ turns? · \d+\.\d+ s in tools ·", page.inner_text("#detail"))
        assert page.evaluate(SIDEWAYS) == []
        page.keyboard.press("Enter")
        visit.says("found", "Selected of started4 of 6")
        visit.says("found", "TokensTurnsRank")
        assert page.evaluate(SIDEWAYS) == []
        assert visit.complaints == []


def test_everything_is_reachable_by_keyboard_and_named_for_screen_readers(browser: Browser) -> None:
    with at_work() as (url, ask):
        ask(*prompts(6))
        visit = Visit(browser, url)
        press = visit.page.keyboard.press
        page = visit.page
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


def test_the_page_asks_for_a_key_and_stores_it_nowhere_else(browser: Browser) -> None:
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


def test_a_lost_connection_is_shown_and_the_groups_stay(browser: Browser) -> None:
    with at_work() as (url, ask):
        visit = Visit(browser, url)
        ask(*prompts(2))
        visit.reads("shown", "24 candidates in 2 groups")
    visit.reads("connection", "no connection")
    assert visit.page.text_content("#shown") == "24 candidates in 2 groups"
    assert not visit.page.is_visible("#empty")


def test_text_of_other_callers_is_shown_as_text_and_never_run(browser: Browser) -> None:
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
