import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from darts_client import Client, PromptSpec, ProtocolError, Vote
from darts_server.engine.scripted import Script

from .servers import RunningServer, serving
from .transcripts import FakeServer, trajectory
from .vllm_answers import URL

LENGTHS = (7, 4, 7, 7, 900)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server whose trajectories contain their number of tokens as text."""
    with serving(lambda _, index: Script(LENGTHS[index % len(LENGTHS)])) as served:
        yield served


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def test_a_decided_vote_stops_the_remaining_candidates(client: Client, server: RunningServer) -> None:
    vote = client.vote("p", n=5, max_tokens=1000, pattern="^([0-9]+) tokens")
    assert (vote.answer, vote.weights, vote.votes) == ("7", {"7": 3.0, "4": 1.0}, {"7": 3, "4": 1})
    assert (vote.decided_early, vote.calibration) == (True, None)
    assert [(v.answer, v.length, v.weight) for v in vote.trajectories] == [(str(k), k, 1.0) for k in LENGTHS[:4]]
    assert [d.reason for d in vote.discarded] == ["decided"]
    assert all(v.logprobs is None for v in vote.trajectories)
    assert vote.usage.generated == vote.usage.returned + vote.usage.wasted
    server.wait_idle()
    [group] = client.groups.get(vote.id)
    assert (group.outcome, group.policy, group.group_size) == ("decided", "vote", 5)


def test_a_vote_may_have_no_answer_and_has_logprobs_on_request(client: Client) -> None:
    vote = client.vote("p", n=2, max_tokens=9, pattern="boxed", logprobs=True)
    assert (vote.answer, vote.weights, vote.votes) == (None, {}, {})
    assert vote.trajectories[0].logprobs == tuple(-k / 8 for k in range(7))


def test_a_chat_is_sent_as_messages() -> None:
    server = FakeServer(ANSWER)
    with Client(URL, transport=server.transport) as client:
        chat = [{"role": "user", "content": "p"}]
        client.vote(chat, n=2, max_tokens=9, pattern=["4"], seed=3, min_p=0.1, chat_template_kwargs={"a": False})
    assert server.routes == [("POST", "/darts/v1/vote")]
    assert json.loads(server.requests[0].content) == {
        "messages": [{"role": "user", "content": "p"}],
        "n": 2,
        "pattern": {"choices": ["4"]},
        "sampling": {"max_tokens": 9, "temperature": 1.0, "seed": 3, "min_p": 0.1},
        "weights": "majority",
        "chat_template_kwargs": {"a": False},
    }


def test_a_prompt_spec_brings_its_key_and_options_which_override_the_votes() -> None:
    server = FakeServer(ANSWER)
    with Client(URL, transport=server.transport) as client:
        spec = PromptSpec("p", key="sums/3", chat_template_kwargs={"a": True}, tools=[{"b": 1}])
        client.vote(spec, n=1, max_tokens=9, pattern="(4)", key="other", chat_template_kwargs={"a": False, "c": 2})
        with pytest.raises(ValueError, match="has no metadata"):
            client.vote(PromptSpec("p", metadata={"answer": 4}), n=1, max_tokens=9, pattern="(4)")
    [request] = server.requests
    body = json.loads(request.content)
    assert (body["prompt"], body["key"], body["tools"]) == ("p", "sums/3", [{"b": 1}])
    assert body["chat_template_kwargs"] == {"a": True, "c": 2}


VOTER = trajectory(0, 0, 2, logprobs=None) | {"answer": "4", "score": None, "weight": 1.0}
ANSWER: dict[str, Any] = {
    "id": "v",
    "answer": "4",
    "weights": {"4": 1.0},
    "votes": {"4": 1},
    "decided_early": False,
    "calibration": None,
    "trajectories": [VOTER],
    "discarded": [],
    "usage": {"generated": 2, "returned": 2, "wasted": 0, "seconds": 0.1},
}
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"votes": {"4": 2}}, "but its trajectories"),
    ({"weights": {"5": 1.0}}, "but its trajectories"),
    ({"answer": None}, "has not the largest"),
    ({"answer": "5"}, "has not the largest"),
    ({"trajectories": [VOTER | {"length": 3}]}, "its length is 3"),
    ({"weights": {"4": "1"}}, "weights.4"),
    ({}, "does not have one logprob"),
]


@pytest.mark.parametrize(("change", "match"), MALFORMED)
def test_an_inconsistent_vote_is_rejected(change: dict[str, Any], match: str) -> None:
    vote: Callable[..., Vote] = Client(URL, transport=FakeServer(ANSWER | change).transport).vote
    with pytest.raises(ProtocolError, match=match):
        vote("p", n=1, max_tokens=9, pattern="(4)", logprobs=match.endswith("logprob"))
