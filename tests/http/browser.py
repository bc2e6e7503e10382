"""A real browser, where there is one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
VARIABLE = "DARTS_CHROMIUM"
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage")
"""Root may not use the sandbox, and containers have little shared memory."""
WAIT_MS = 120_000
"""Before something that does not come is a failure; busy machines are slow."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where no Chromium is found: by `VARIABLE`, by its usual names, or as playwright installed it."""
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


class Visit:
    """A page that is open, and what it complained of and requested."""

    def __init__(self, browser: Browser, url: str, dark: bool = False) -> None:
        context = browser.new_context(
            viewport={"width": 1280, "height": 720}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        context.set_default_timeout(WAIT_MS)
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._requested)
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
        """How many pixels of each colour a canvas has, as ``#rrggbb``."""
        counted: dict[str, int] = self.page.evaluate(COUNT_COLOURS, canvas)
        return counted

    def colour(self, name: str) -> str:
        """A colour of the style sheet."""
        read = "name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()"
        return str(self.page.evaluate(read, name))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _requested(self, request: Request) -> None:
        self.requested.append(request.url)


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
