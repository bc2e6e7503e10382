import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from darts_client import AsyncClient, BadRequest, Client, ProtocolError, Vote
from darts_server.engine.scripted import Script

from .answers import URL
from .serving import Served, serving
from .test_resources import Known

LENGTHS = (7, 4, 7, 7, 900)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Whose trajectories say how many tokens they have."""
    with serving(lambda _, index: Script(LENGTHS[index % len(LENGTHS)])) as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def test_a_vote_is_counted_and_the_rest_stopped(client: Client, server: Served) -> None:
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


def test_log_probs_weigh_and_come_only_if_asked_for(client: Client) -> None:
    vote = client.vote([5, 6], n=4, max_tokens=9, pattern=["4", "7"], weights="rank", score="logprob", seed=1)
    assert (vote.answer, vote.votes, vote.weights) == ("7", {"7": 3, "4": 1}, {"7": 1.0, "4": 1.0})
    assert [v.score is not None for v in vote.trajectories] == [True] * 4
    assert vote.trajectories[1].weight == 1.0, "the likeliest"
    assert vote.trajectories[0].logprobs is None
    vote = client.vote("p", n=2, max_tokens=9, pattern="([0-9])", weights="log_odds", score="logprob", logprobs=True)
    assert vote.trajectories[0].logprobs == tuple(-k / 8 for k in range(7))
    assert vote.calibration == "no_labels"
    rewards = {v.trajectory_id: 1.0 for v in vote.trajectories}
    assert client.rewards(rewards).matched == 2
    vote = client.vote("p", n=2, max_tokens=9, pattern="([0-9])", weights="log_odds", score="logprob")
    assert vote.calibration == "few_labels", "rewards of votes are what scores are worth"


def test_a_vote_without_answers_has_none(client: Client) -> None:
    vote = client.vote("p", n=2, max_tokens=9, pattern="boxed")
    assert (vote.answer, vote.weights, vote.votes) == (None, {}, {})
    assert [(v.answer, v.weight) for v in vote.trajectories] == [(None, None)] * 2


@pytest.mark.anyio
async def test_the_async_client_does_the_same(server: Served) -> None:
    async with AsyncClient(server.url) as client:
        assert (await client.vote("p", n=1, max_tokens=9, pattern="([0-9])", key="k", top_p=0.5)).answer == "7"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "x"}, "prompt"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"pattern": "none"}, "pattern"),
    ({"pattern": [""]}, "pattern.choices"),
    ({"pattern": []}, "pattern.choices"),
    ({"pattern": [3]}, "pattern.choices[0]"),
    ({"weights": "rank"}, "score"),
    ({"weights": "heavy"}, "weights"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": ""}, "prompt"),
]


@pytest.mark.parametrize(("change", "param"), WRONG)
def test_what_cannot_be_is_refused_by_its_field(client: Client, change: dict[str, Any], param: str) -> None:
    asked: dict[str, Any] = {"prompt": "p", "n": 2, "max_tokens": 9, "pattern": "([0-9])"} | change
    with pytest.raises(BadRequest) as refused:
        client.vote(**asked)
    assert refused.value.param == param


def test_a_chat_goes_as_messages() -> None:
    server = Known(POST=ANSWER)
    with Client(URL, transport=server.transport) as client:
        client.vote([{"role": "user", "content": "p"}], n=2, max_tokens=9, pattern=["4"], seed=3, min_p=0.1)
    assert server.last == ("POST", "/darts/v1/vote")
    assert json.loads(server.requests[0].content) == {
        "messages": [{"role": "user", "content": "p"}],
        "n": 2,
        "pattern": {"choices": ["4"]},
        "sampling": {"max_tokens": 9, "temperature": 1.0, "seed": 3, "min_p": 0.1},
        "weights": "majority",
    }


VOTER = {
    "trajectory_id": "v:0",
    "answer": "4",
    "score": None,
    "weight": 1.0,
    "token_ids": [1, 2],
    "logprobs": None,
    "text": "4",
    "finish_reason": "stop",
    "length": 2,
    "weight_version_start": 0,
    "weight_version_end": 0,
}
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
SPOILT: list[tuple[dict[str, Any], str]] = [
    ({"votes": {"4": 2}}, "but its trajectories"),
    ({"weights": {"5": 1.0}}, "but its trajectories"),
    ({"answer": None}, "not the heaviest"),
    ({"answer": "5"}, "not the heaviest"),
    ({"trajectories": [VOTER | {"length": 3}]}, "says 3"),
    ({"weights": {"4": "1"}}, "weights.4"),
]


@pytest.mark.parametrize(("change", "match"), SPOILT)
def test_a_vote_that_does_not_add_up_is_refused(change: dict[str, Any], match: str) -> None:
    ask: Callable[..., Vote] = Client(URL, transport=Known(POST=ANSWER | change).transport).vote
    with pytest.raises(ProtocolError, match=match):
        ask("p", n=1, max_tokens=9, pattern="(4)")


def test_missing_log_probs_are_refused() -> None:
    answer = httpx.Response(200, json=ANSWER)
    with (
        Client(URL, transport=httpx.MockTransport(lambda _: answer)) as client,
        pytest.raises(ProtocolError, match="not one logprob"),
    ):
        client.vote("p", n=1, max_tokens=9, pattern="(4)", logprobs=True)
