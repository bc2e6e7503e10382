"""Batches streamed token by token, resumed and cancelled, on real vLLM."""

from typing import Any
from uuid import uuid4

import httpx
import pytest

from darts_server.offline.demo.server import Server
from tests.integration.events import Events, assemble_groups, read_events
from tests.integration.test_rollouts import SIZE, prompts
from tests.integration.waiting import wait_idle

pytestmark = pytest.mark.engine
TEXTS: list[dict[str, Any]] = [{"text": text, "metadata": {"place": i}} for i, text in enumerate(prompts(8, seed=11))]
BATCH: dict[str, Any] = {"prompts": TEXTS, "group_size": SIZE}
BODY = BATCH | {"stream": "tokens", "chunk_tokens": 8}
LONG: dict[str, Any] = {
    "prompts": [{"text": text} for text in prompts(16)],
    "group_size": SIZE,
    "sampling": {"max_tokens": 250, "ignore_eos": True},
}


def url(server: Server, batch: str = "") -> str:
    return f"{server.url}/darts/v1/rollouts{batch and '/'}{batch}"


def key() -> dict[str, str]:
    return {"Idempotency-Key": str(uuid4())}


def stream(server: Server, body: dict[str, Any], headers: dict[str, str] | None = None) -> Events:
    with httpx.stream("POST", url(server), json=body, headers=headers, timeout=240) as answer:
        assert answer.status_code == 200, answer.read()
        return list(read_events(answer))


def attach(server: Server, batch: str, after: int) -> Events:
    headers = {"Last-Event-ID": str(after)}
    with httpx.stream("GET", url(server, batch), headers=headers, timeout=240) as answer:
        assert answer.status_code == 200, answer.read()
        return list(read_events(answer))


def check(events: Events) -> list[dict[str, Any]]:
    assert [number for number, _, _ in events] == list(range(1, len(events) + 1))
    assert (events[0][1], events[-1][1]) == ("batch", "done")
    return assemble_groups(events)


@pytest.mark.parametrize(
    ("policy", "logprobs"),
    [
        ("darts_cut", True),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("uniform", True), ("darts", False))),
    ],
)
def test_events_add_up_to_whole_groups(server: Server, policy: str, logprobs: bool) -> None:
    sampling = {"max_tokens": 200, "logprobs": logprobs}
    groups = check(stream(server, BODY | {"sampling": sampling, "policy": {"name": policy}}, key()))
    assert [group["metadata"]["place"] for group in groups] == list(range(8))
    for group in groups:
        assert len(group["trajectories"]) == SIZE
        for trajectory in group["trajectories"]:
            assert trajectory["length"] == len(trajectory["token_ids"])
            assert (trajectory["logprobs"] is not None) == logprobs
            assert not logprobs or trajectory["length"] == len(trajectory["logprobs"])


@pytest.mark.parametrize("included", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_stop_string_retracts_no_streamed_token(server: Server, included: bool) -> None:
    sampling = {"max_tokens": 200, "stop": ["#", "=0c"], "include_stop_str_in_output": included, "logprobs": True}
    groups = check(stream(server, BODY | {"sampling": sampling, "chunk_tokens": 1}))
    stopped = [t for group in groups for t in group["trajectories"] if t["finish_reason"] == "stop"]
    assert stopped
    assert any(t["text"].endswith(("#", "=0c")) for t in stopped) == included
    for trajectory in stopped:
        assert trajectory["length"] == len(trajectory["token_ids"]) == len(trajectory["logprobs"])


def test_an_idempotency_key_returns_the_same_answer_and_rejects_another_body(server: Server) -> None:
    headers, body = key(), BATCH | {"sampling": {"max_tokens": 100}}
    first = httpx.post(url(server), json=body, headers=headers, timeout=240)
    started = server.metric("darts_candidates_started_total")
    assert httpx.post(url(server), json=body, headers=headers, timeout=240).json() == first.json()
    assert httpx.get(url(server, first.json()["id"]), timeout=240).json() == first.json()
    assert server.metric("darts_candidates_started_total") == started
    for changed, sent, status in (({"group_size": 4}, headers, 409), ({}, {"Idempotency-Key": "k" * 257}, 400)):
        other = httpx.post(url(server), json=body | changed, headers=sent, timeout=240)
        assert (other.status_code, other.json()["error"]["param"]) == (status, "Idempotency-Key")
    assert httpx.delete(url(server, first.json()["id"])).json() == {"id": first.json()["id"], "cancelled": False}


def test_a_broken_stream_is_resumed_where_it_broke(server: Server) -> None:
    headers, body = key(), BODY | {"sampling": {"max_tokens": 200, "logprobs": True}, "chunk_tokens": 2}
    events: Events = []
    with httpx.stream("POST", url(server), json=body, headers=headers, timeout=240) as answer:
        for one in read_events(answer):
            events.append(one)
            if len(events) == 100:
                break
    batch = events[0][2]["id"]
    rest = attach(server, batch, 100)
    assert len(assemble_groups(events + rest)) == 8
    gone = {data["trajectory_id"] for _, name, data in events + rest if name == "discard"}
    lasting = [one for one in events + rest if one[1] != "delta" or one[2]["trajectory_id"] not in gone]
    assert attach(server, batch, 0) == lasting
    assert stream(server, body, headers) == lasting
    assert attach(server, batch, rest[-1][0]) == []
    late = httpx.get(url(server, batch), headers={"Last-Event-ID": str(rest[-1][0] + 1)})
    assert (late.status_code, late.json()["error"]["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize("headers", [{}, key()])
def test_a_reader_of_a_cancelled_batch_gets_an_error_event(server: Server, headers: dict[str, str]) -> None:
    body = LONG | {"stream": "tokens", "chunk_tokens": 8}
    with httpx.stream("POST", url(server), json=body, headers=headers, timeout=240) as answer:
        events = read_events(answer)
        batch = next(events)[2]["id"]
        assert httpx.delete(url(server, batch)).json() == {"id": batch, "cancelled": True}
        rest = list(events)
    assert rest[-1][1] == "error"
    assert rest[-1][2]["error"]["code"] == 503
    wait_idle(server)
    again = httpx.delete(url(server, batch))
    assert again.status_code == (200 if headers else 404)
    if headers:
        assert again.json()["cancelled"] is False
