"""The built-in page in its served form."""

import re
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from darts_server.http import page
from darts_server.types import DiscardReason, SelectedAs

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")


@pytest.fixture(scope="module")
def served() -> Any:
    app = FastAPI()
    page.add_routes(app.router)
    return TestClient(app).get("/darts/")


def test_the_page_is_one_document_with_all_its_parts(served: Any) -> None:
    assert served.headers["content-type"].startswith("text/html")
    for part in page.PARTS.glob("*.*"):
        if part.suffix in (".js", ".css"):
            assert part.read_text("utf-8") in served.text, part.name
    assert len(re.findall(r"<script|<style", served.text)) == 2


def test_the_page_loads_nothing_else(served: Any) -> None:
    assert not re.search(r"\b(src|srcset|action|poster)=|@import|url\(|<iframe|<object", served.text)
    assert re.findall(r'href="([^"]{5})', served.text) == ["data:"]


def test_the_security_policy_allows_only_the_pages_own_parts(served: Any) -> None:
    policy = dict(part.split(" ", 1) for part in served.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/=]{44}'", policy[kind])
    # The security policy refuses these.
    assert not re.search(r"\sstyle=|\son\w+=", served.text)


@pytest.mark.parametrize("kind", [*SelectedAs, *DiscardReason])
def test_the_page_names_every_end_of_a_candidate(kind: str) -> None:
    assert f"\n  {kind}: " in (page.PARTS / "kinds.js").read_text("utf-8")
    assert (page.PARTS / "style.css").read_text("utf-8").count(f"--{kind}: #") == 2, "in light and in dark"


@pytest.mark.parametrize("mark", ["cut", "resumed", "tool"])
def test_the_page_names_every_mark_on_a_bar(mark: str) -> None:
    kinds = (page.PARTS / "kinds.js").read_text("utf-8")
    assert f' {mark}: "' in kinds.split("const MARKS = ")[1].split("\n")[0]
    assert (page.PARTS / "style.css").read_text("utf-8").count(f"--{mark}: #") == 2, "in light and in dark"


def test_the_page_shows_ids_as_text() -> None:
    """The page puts all text of the server into text nodes and into attributes that run nothing."""
    scripts = {part.name: part.read_text("utf-8") for part in page.PARTS.glob("*.js")}
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|eval\(|Function\("
    for name, script in scripts.items():
        assert not re.search(forbidden, script), name
    # Strings become text nodes.
    assert "made.append(...children" in scripts["kinds.js"]
    tags = {tag for script in scripts.values() for tag in re.findall(r'\belement\("(\w+)"', script)}
    assert tags
    loading = "a|base|embed|form|frame|iframe|img|link|meta|object|script|style"
    assert not [tag for tag in tags if re.fullmatch(loading, tag)]


def test_the_root_redirects_to_the_page_and_lists_the_pages() -> None:
    app = FastAPI()
    page.add_routes(app.router)
    client = TestClient(app)
    answer = client.get("/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "darts/")
    assert answer.json() == {"page": "darts/", "openapi": "openapi.json", "health": "health"}
    assert client.get("/").headers["content-type"].startswith("text/html")
