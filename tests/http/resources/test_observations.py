"""Observations between servers, over HTTP."""

import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from darts_server.http import errors
from darts_server.http.body import fail_fast
from darts_server.http.resources import observations
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.exchange.exchange import Exchange
from darts_server.rollout.learned.statistics import Statistics
from tests.http.serving import client
from tests.rollout.helpers import Documents

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")
URL = "/darts/v1/observations"
ORIGIN = {"life": "other", "number": 1}
GROUP: dict[str, Any] = {
    **ORIGIN,
    "kind": "group",
    "prompt_key": "q",
    "policy": "uniform",
    "size": 1,
    "candidates": [{"tokens": 7, "finish_reason": "stop", "selected": True}, {"tokens": 9, "finish_reason": "stop"}],
}
MOMENTS = [1, 7.0, 0.0, 1.0, 1.0]
REWARDS: dict[str, Any] = {
    **ORIGIN,
    "number": 2,
    "kind": "rewards",
    "prompts": [{"prompt_key": "q", "right": MOMENTS, "wrong": [0] * 5, "groups": [1, 1]}],
}
EXPLORATION: dict[str, Any] = {**ORIGIN, "number": 3, "kind": "exploration", "policy": "cap", "groups": 8}


@pytest.fixture
def opened() -> Iterator[TestClient]:
    with client() as opened:
        yield opened


def post(opened: TestClient, *sent: Any) -> dict[str, int]:
    answer = opened.post(URL, json={"observations": sent})
    assert answer.status_code == 200, answer.text
    found: dict[str, int] = answer.json()
    return found


def test_what_others_observed_is_in_the_statistics_of_a_prompt_once(opened: TestClient) -> None:
    assert opened.get("/darts/v1/prompts/q").status_code == 404
    for expected in ((3, 0), (0, 3)):
        counts = post(opened, GROUP, REWARDS, EXPLORATION)
        assert (counts["learned"], counts["repeated"], counts["missed"]) == (*expected, 0)
    stats = opened.get("/darts/v1/prompts/q").json()
    assert (stats["groups"], stats["mean_ema"]) == (1, 8)
    assert (stats["rewards"]["rewarded"], stats["rewards"]["zero_variance_groups"]) == (1, 1)
    status = opened.get(URL).json()
    assert (status["learned"], status["observations"], status["is_new"]) == ({"other": 3}, [], False)


def test_a_server_tells_where_it_is(opened: TestClient) -> None:
    first = opened.get(URL).json()
    assert first == {"life": first["life"], "last": 0, "observations": [], "learned": {}, "is_new": True}
    assert opened.get(URL, params={"after": f"{first['life']}:0"}).json() == first
    for wrong in ("x", ":3", "a:", "a:b", "a:-1", "a" * 101):
        answer = opened.get(URL, params={"after": wrong})
        assert answer.status_code in (400, 422), wrong


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"number": 1, "kind": "group"}, ".group.life"),
        (GROUP | {"number": 0}, ".group.number"),
        (GROUP | {"kind": "other"}, ""),
        (GROUP | {"candidates": [{"tokens": -1}]}, ".group.candidates[0].tokens"),
        (GROUP | {"candidates": [{"tokens": 1, "finish_reason": "abort"}]}, ".group.candidates[0].finish_reason"),
        (GROUP | {"prompt_key": "x" * 70_000}, ".group.prompt_key"),
        (REWARDS | {"prompts": [{"right": MOMENTS, "wrong": [0] * 4, "groups": [1, 1]}]}, ".rewards.prompts[0].wrong"),
        (REWARDS | {"prompts": [{"right": [0.5, 1, 0, 1, 1], "wrong": [0] * 5, "groups": [1, 1]}]}, ".prompts"),
        (REWARDS | {"prompts": [{"right": MOMENTS, "wrong": [0] * 5, "groups": [1, 2]}]}, ".prompts"),
        (EXPLORATION | {"groups": 0}, ".exploration.groups"),
    ],
    ids=repr,
)
def test_what_is_wrong_is_named_with_its_place_and_changes_nothing(opened: TestClient, wrong: Any, field: str) -> None:
    answer = opened.post(URL, json={"observations": [GROUP, wrong]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"observations[1]{field}"
    assert opened.get("/darts/v1/prompts/q").status_code == 404
    assert opened.get(URL).json()["learned"] == {}


def test_there_are_at_most_so_many_at_once(opened: TestClient) -> None:
    answer = opened.post(URL, json={"observations": [EXPLORATION] * 4097})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "observations")


def test_they_come_in_pages() -> None:
    statistics = Statistics(Documents())
    exchange = Exchange(statistics, Allocator(statistics, 0.0, Mock(), time.monotonic))
    for _ in range(300):
        exchange.exploring_first("cap", 1)
    app = FastAPI()
    errors.install(app)
    app.include_router(observations.routes(exchange))
    fail_fast(app)
    opened = TestClient(app)
    first = opened.get("/observations").json()
    assert [each["number"] for each in first["observations"]] == list(range(1, 257))
    rest = opened.get("/observations", params={"after": f"{first['life']}:256"}).json()
    assert [each["number"] for each in rest["observations"]] == list(range(257, 301))
