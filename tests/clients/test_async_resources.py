import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from darts_client import AsyncClient, Client, NotFound, ProtocolError

from .vllm_answers import URL

CANDIDATE = {
    "index": 0,
    "length": 3,
    "finish_reason": "stop",
    "selected_as": "short",
    "reason": None,
    "rank": 0,
    "cut": False,
    "start": 0.0,
    "stop": 0.5,
    "weight_version_start": None,
    "weight_version_end": None,
}
GROUP = {
    "group_id": "g",
    "prompt_key": "key",
    "policy": "uniform",
    "group_size": 1,
    "outcome": "completed",
    "error": None,
    "duration": 0.5,
    "tail_wait": 0.1,
    "mixed_versions": False,
    "generated": 3,
    "returned": 3,
    "deadline": None,
    "explored": False,
    "members": [],
    "candidates": [
        CANDIDATE,
        CANDIDATE | {"trajectory_id": "g:1", "reward": 1, "correct": True, "quality": 0.5, "survival": 0.7},
    ],
}
PROMPT = {
    "prompt_key": "key",
    "mean_ema": 3.0,
    "std_ema": None,
    "groups": 1,
    "candidates": 2,
    "weight_version": None,
    "rewards": {
        "rewarded": 8,
        "right": 2,
        "pass_rate": 0.25,
        "zero_variance_groups": 0,
        "rewarded_groups": 1,
        "length_right": {"mean": 3.0, "se": 0.5, "count": 2},
        "length_wrong": None,
        "pattern": "II",
        "difference": None,
        "difference_se": None,
    },
}


class FakeServer:
    """Returns one answer for each method, and records the requests."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.requests: list[httpx.Request] = []
        self.transport = httpx.MockTransport(self)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers[request.method]
        return httpx.Response(200, **({"content": answer} if isinstance(answer, bytes) else {"json": answer}))

    @property
    def last_route(self) -> tuple[str, str]:
        return self.requests[-1].method, self.requests[-1].url.raw_path.decode()


def test_a_group_has_a_record_of_each_candidate() -> None:
    server = FakeServer(GET={"groups": [GROUP]})
    with Client(URL, transport=server.transport) as client:
        [group] = client.groups.get("cmpl-1")
    assert server.last_route == ("GET", "/darts/v1/groups/cmpl-1")
    assert (group.outcome, group.zero_variance) == ("completed", None)
    assert [(c.quality, c.survival) for c in group.candidates] == [(None, 1.0), (0.5, 0.7)]
    assert [(c.trajectory_id, c.reward, c.correct) for c in group.candidates] == [
        (None, None, None),
        ("g:1", 1.0, True),
    ]


@pytest.mark.parametrize("key", ["key", "gsm8k/7", "../state", "a b?c#d%", ".", "é"])
def test_a_prompt_key_is_escaped_in_the_path(key: str) -> None:
    server = FakeServer(GET=PROMPT)
    with Client(URL, transport=server.transport) as client:
        prompt = client.prompts.get(key)
    assert server.requests[0].url.path == f"/darts/v1/prompts/{key}"
    assert prompt.rewards is not None
    assert (prompt.rewards.pass_rate, prompt.rewards.pattern) == (0.25, "II")


def test_settings_are_read_and_changed() -> None:
    server = FakeServer(GET={"policy": "uniform"}, PATCH={"policy": "darts", "redundancy": None})
    with Client(URL, transport=server.transport) as client:
        assert client.policy.get() == {"policy": "uniform"}
        assert client.policy.change(policy="darts", redundancy=None)["policy"] == "darts"
    assert server.last_route == ("PATCH", "/darts/v1/policy")
    assert json.loads(server.requests[-1].content) == {"policy": "darts", "redundancy": None}


def test_the_state_is_saved_atomically_and_loaded(tmp_path: Path) -> None:
    server = FakeServer(GET=b"\x00learned", PUT={"prompts": 7})
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with Client(URL, transport=server.transport) as client:
        client.state.save(path)
        assert path.read_bytes() == b"\x00learned"
        assert client.state.load(str(path)) == 7
    assert server.requests[-1].content == b"\x00learned"
    assert list(tmp_path.iterdir()) == [path]


def test_a_batch_is_cancelled_by_its_id() -> None:
    server = FakeServer(DELETE={"id": "roll-1", "cancelled": False})
    with Client(URL, transport=server.transport) as client:
        assert client.cancel("roll-1") is False
    assert server.last_route == ("DELETE", "/darts/v1/rollouts/roll-1")


def test_many_rewards_are_split_into_requests_and_counted_together() -> None:
    sizes: list[int] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sizes.append(len(json.loads(request.content)["rewards"]))
        counts = {"matched": sizes[-1] - 1, "repeated": 0, "unknown": 1, "unknown_indices": [3]}
        return httpx.Response(200, json=counts)

    with Client(URL, transport=httpx.MockTransport(handle)) as client:
        counts = client.rewards({f"g:{i}": 1.0 for i in range(10_004)})
    assert sizes == [10_000, 4]
    assert (counts.matched, counts.unknown, counts.unknown_indices) == (10_002, 2, (3, 10_003))


def test_an_empty_list_of_rewards_sends_no_request() -> None:
    with Client(URL, transport=httpx.MockTransport(lambda request: httpx.Response(500))) as client:
        assert client.rewards([]).matched == 0


WRONG: list[tuple[Any, Callable[[Client], object], str]] = [
    ({"groups": [GROUP | {"duration": "long"}]}, lambda c: c.groups.get("g"), "groups.0.duration"),
    ({}, lambda c: c.prompts.get("g"), "prompt_key"),
    ([], lambda c: c.policy.get(), "body"),
]


@pytest.mark.parametrize(("answer", "call", "field"), WRONG)
def test_the_error_of_a_malformed_answer_names_the_field(
    answer: Any, call: Callable[[Client], object], field: str
) -> None:
    with Client(URL, transport=FakeServer(GET=answer).transport) as client, pytest.raises(ProtocolError, match=field):
        call(client)


@pytest.mark.anyio
async def test_the_async_client_does_the_same(tmp_path: Path) -> None:
    async with AsyncClient(
        URL, transport=FakeServer(GET={"groups": [GROUP]}, DELETE={"cancelled": True}).transport
    ) as client:
        assert (await client.groups.get("g"))[0].group_id == "g"
        assert await client.cancel("roll-1") is True
    async with AsyncClient(URL, transport=FakeServer(GET=PROMPT).transport) as client:
        assert (await client.prompts.get("key")).groups == 1
    async with AsyncClient(URL, transport=FakeServer(GET={"a": 1}, PATCH={"a": 2}).transport) as client:
        assert await client.policy.get() == {"a": 1}
        assert await client.policy.change(a=2) == {"a": 2}
    async with AsyncClient(URL, transport=FakeServer(GET=b"state", PUT={"prompts": 2}).transport) as client:
        await client.state.save(tmp_path / "state")
        assert await client.state.load(tmp_path / "state") == 2
    counts = {"matched": 1, "repeated": 0, "unknown": 0, "unknown_indices": []}
    async with AsyncClient(URL, transport=FakeServer(POST=counts).transport) as client:
        assert (await client.rewards({"g:0": 1.0})).matched == 1


def test_an_unknown_group_is_an_error() -> None:
    missing = httpx.Response(404, json={"error": {"message": "no group", "param": "group_id"}})
    with (
        Client(URL, transport=httpx.MockTransport(lambda request: missing)) as client,
        pytest.raises(NotFound, match="no group"),
    ):
        client.groups.get("g")
