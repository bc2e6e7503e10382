"""Ids that callers choose, from header and body to answer, log, monitor and lookup."""

import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from darts_server.offline.demo.server import Server

pytestmark = pytest.mark.engine
BODY: dict[str, Any] = {"model": "tiny", "prompt": "7a-5b*4>", "n": 2, "max_tokens": 8}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "7a>"}], "n": 2, "max_tokens": 8}
CHAT_PATH = "/v1/chat/completions"
ROUTES = {"/v1/completions": ("cmpl", BODY), CHAT_PATH: ("chatcmpl", CHAT)}
KEPT = ["../../x?y#z", "a%2Fb", "<script>alert(1)</script>", "a b", "é" * 256]
FORGED = "X-Evil"
"""Begins no line of the log otherwise, whatever other tests do with the server."""
REFUSED = [f"a\r\n{FORGED}: 1", "\ud800", "\u202e", "x" * 4_000_000]
"""Others are in tests/test_identifiers.py."""


def send(server: Server, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    headers["Content-Type"] = "application/json"
    content = json.dumps(body)  # surrogates as \\uXXXX
    return httpx.post(server.url + path, content=content, headers=headers, timeout=240)


def live(server: Server) -> list[dict[str, Any]]:
    answer = httpx.get(f"{server.url}/darts/v1/live")
    assert answer.status_code == 200
    groups: list[dict[str, Any]] = answer.json()["groups"]
    return groups


@pytest.mark.parametrize(("path", "chosen"), [("/v1/completions", each) for each in KEPT] + [(CHAT_PATH, KEPT[0])])
def test_a_request_keeps_its_id_and_its_groups_are_found_by_it(server: Server, path: str, chosen: str) -> None:
    prefix, body = ROUTES[path]
    answer = send(server, path, body | {"request_id": chosen})
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    assert (whole["id"], len(whole["choices"])) == (f"{prefix}-{chosen}", 2)
    header = answer.headers["X-Darts-Group-Id"]
    assert header.isascii()
    for part in (header, quote(header, safe=""), quote(whole["id"], safe="")):
        found = httpx.get(f"{server.url}/darts/v1/groups/{part}")
        assert found.status_code == 200, part
        [group] = found.json()["groups"]
        assert group["group_id"] in (whole["id"], f"{whole['id']}-0")
    named = group["candidates"][0]["trajectory_id"].replace(whole["id"], header)
    rewards = {"rewards": [{"trajectory_id": named, "reward": 1.0}]}
    returned = group["candidates"][0]["selected_as"] is not None
    counts = send(server, "/darts/v1/rewards", rewards).json()
    assert (counts["matched"], counts["unknown"]) == ((1, 0) if returned else (0, 1))
    assert group["group_id"] in {each["group_id"] for each in live(server)}


@pytest.mark.parametrize("chosen", REFUSED, ids=lambda text: ascii(text)[:12])
def test_an_id_that_cannot_be_shown_is_refused_before_anything_starts(server: Server, chosen: str) -> None:
    ended = server.metric("vllm:request_success_total")
    unshaped = {"vllm_xargs": {"darts_policy": "off"}}
    for path, more in (("/v1/completions", {}), ("/v1/completions", unshaped), (CHAT_PATH, {"stream": True})):
        answer = send(server, path, ROUTES[path][1] | {"request_id": chosen} | more)
        assert answer.status_code == 400, answer.text[:300]
        error = answer.json()["error"]
        assert (error["param"], len(error["message"]) < 300) == ("request_id", True)
    live(server)
    assert server.metric("vllm:request_success_total") == ended
    assert send(server, "/v1/completions", BODY).status_code == 200


def test_ids_in_headers_are_limited_too(server: Server) -> None:
    assert send(server, "/v1/completions", BODY, **{"X-Request-Id": "mine-1"}).json()["id"] == "cmpl-mine-1"
    answer = send(server, "/v1/completions", BODY, **{"X-Request-Id": "x" * 257})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Id")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_no_id_begins_a_line_of_the_log(server: Server, path: str) -> None:
    """Also if a route of vLLM's takes it."""
    body = {"model": "tiny", "max_tokens": 8, "max_output_tokens": 20, "input": "7a>", "messages": CHAT["messages"]}
    for name in ("request_id", "session_id"):
        answer = send(server, path, body | {name: f"a\n{FORGED}"})
        assert answer.status_code in (200, 400), answer.text
    live(server)
    assert not [line for line in server.log.read_text().splitlines() if line.startswith(FORGED)]
