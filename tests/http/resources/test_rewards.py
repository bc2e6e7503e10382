"""Requests to ``POST /darts/v1/rewards``, and their answers."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.http.serving import client

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")
URL = "/darts/v1/rewards"


@pytest.fixture
def opened() -> Iterator[TestClient]:
    with client() as opened:
        yield opened


@pytest.fixture(scope="module")
def unchanged() -> Iterator[TestClient]:
    """A client for tests that change nothing."""
    with client() as opened:
        yield opened


def report(opened: TestClient, *rewards: dict[str, Any]) -> dict[str, Any]:
    answer = opened.post(URL, json={"rewards": list(rewards)})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def group(opened: TestClient, name: str) -> dict[str, Any]:
    [record] = opened.get(f"/darts/v1/groups/{name}").json()["groups"]
    assert isinstance(record, dict)
    return record


def test_a_group_has_its_rewards_and_when_all_are_reported_whether_they_differ(opened: TestClient) -> None:
    before = group(opened, "cmpl-a-0")
    assert [c["trajectory_id"] for c in before["candidates"]] == ["cmpl-a-0:0", "cmpl-a-0:1", "cmpl-a-0:2"]
    assert {(c["reward"], c["correct"]) for c in before["candidates"]} == {(None, None)}
    report(opened, {"trajectory_id": "cmpl-a-0:0", "reward": 0.25})
    assert group(opened, "cmpl-a-0")["zero_variance"] is None
    report(opened, {"trajectory_id": "cmpl-a-0:1", "reward": 0.75, "correct": False})
    report(opened, *({"trajectory_id": f"cmpl-a-1:{i}", "reward": 0} for i in (0, 1)))
    after = group(opened, "cmpl-a-0")
    assert [(c["reward"], c["correct"]) for c in after["candidates"]] == [(0.25, True), (0.75, False), (None, None)]
    assert after["zero_variance"] is False
    assert group(opened, "cmpl-a-1")["zero_variance"] is True


def test_a_prompt_has_statistics_of_its_rewards(opened: TestClient) -> None:
    assert opened.get("/darts/v1/prompts/p").json()["rewards"] is None
    report(opened, *({"trajectory_id": f"cmpl-a-{n}:0", "reward": 1.0} for n in (0, 1)))
    report(opened, {"trajectory_id": "cmpl-a-1:1", "reward": 0})
    assert opened.get("/darts/v1/prompts/p").json()["rewards"] == {
        "rewarded": 3,
        "right": 2,
        "pass_rate": pytest.approx(2 / 3),
        "zero_variance_groups": 0,
        "rewarded_groups": 1,
        "difference": None,
    }
    assert opened.get("/darts/v1/prompts/gsm8k/7").json()["rewards"] is None


GOOD: dict[str, Any] = {"trajectory_id": "cmpl-a-0:0", "reward": 1.0}
TOKENS: dict[str, Any] = {"prompt_token_ids": [0], "completion_token_ids": [1], "reward": 1.0}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"trajectory_id": "x"}, ".reward"),
        (GOOD | {"correct": 1}, ".correct"),
        (GOOD | {"trajectory_id": ""}, ".trajectory_id"),
        (GOOD | {"rewrad": 1}, ".rewrad"),
        (GOOD | TOKENS, ""),
        ({"prompt_token_ids": [1], "reward": 1}, ""),
        (TOKENS | {"completion_token_ids": [1, -1]}, ".completion_token_ids[1]"),
        (TOKENS | {"completion_token_ids": [2**31]}, ".completion_token_ids[0]"),
    ],
    ids=repr,
)
def test_a_wrong_field_is_named_with_its_place_and_nothing_changes(
    unchanged: TestClient, wrong: object, field: str
) -> None:
    answer = unchanged.post(URL, json={"rewards": [GOOD, TOKENS, GOOD, wrong]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"rewards[3]{field}"
    assert group(unchanged, "cmpl-a-0")["candidates"][0]["reward"] is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        *(
            (b'{"rewards": [{"trajectory_id": "cmpl-a-0:0", "reward": %s}]}' % number, "rewards[0].reward")
            for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" + b"0" * 400)
        ),
        (b"{", "body"),
        (b'{"rewards": {}}', "rewards"),
        (b'{"rewards": [], "more": 1}', "more"),
        (b'{"rewards": [{"trajectory_id": "\\ud800", "reward": 1}]}', "body"),
    ],
    ids=lambda part: repr(part)[:30],
)
def test_a_body_that_is_no_list_of_finite_rewards_is_refused(unchanged: TestClient, body: bytes, field: str) -> None:
    answer = unchanged.post(URL, content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
