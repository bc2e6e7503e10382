import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from darts_client import Client, ProtocolError
from darts_client._io import write_atomically

from .transcripts import FakeServer
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


def test_a_group_has_a_record_of_each_candidate() -> None:
    server = FakeServer({"groups": [GROUP]})
    with Client(URL, transport=server.transport) as client:
        [group] = client.groups.get("cmpl-1")
    assert server.routes == [("GET", "/darts/v1/groups/cmpl-1")]
    assert (group.outcome, group.zero_variance) == ("completed", None)
    assert [(c.quality, c.survival) for c in group.candidates] == [(None, 1.0), (0.5, 0.7)]
    assert [(c.trajectory_id, c.reward, c.correct) for c in group.candidates] == [
        (None, None, None),
        ("g:1", 1.0, True),
    ]


@pytest.mark.parametrize("key", ["key", "gsm8k/7", "../state", "a b?c#d%", ".", "é"])
def test_a_prompt_key_is_escaped_in_the_path(key: str) -> None:
    server = FakeServer(PROMPT)
    with Client(URL, transport=server.transport) as client:
        prompt = client.prompts.get(key)
    assert server.requests[0].url.path == f"/darts/v1/prompts/{key}"
    assert prompt.rewards is not None
    assert (prompt.rewards.pass_rate, prompt.rewards.pattern) == (0.25, "II")


def test_the_state_is_saved_atomically_and_loaded(tmp_path: Path) -> None:
    server = FakeServer(b"\x00learned", {"prompts": 7})
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with Client(URL, transport=server.transport) as client:
        client.state.save(path)
        assert path.read_bytes() == b"\x00learned"
        assert client.state.load(str(path)) == 7
    assert server.requests[-1].content == b"\x00learned"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=tmp_path.name):
        write_atomically(tmp_path, b"new")
    assert list(tmp_path.parent.glob(f"*{tmp_path.name}*")) == [tmp_path]
    assert list(tmp_path.iterdir()) == []


def test_many_rewards_are_split_into_requests_and_counted_together() -> None:
    sizes: list[int] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sizes.append(len(json.loads(request.content)["rewards"]))
        counts = {"matched": sizes[-1] - 1, "repeated": 0, "unknown": 1, "unknown_indices": [3]}
        return httpx.Response(200, json=counts)

    with Client(URL, transport=httpx.MockTransport(handle)) as client:
        counts = client.rewards({f"g:{i}": 1.0 for i in range(10_004)})
        assert client.rewards([]).matched == 0, "without a request"
    assert sizes == [10_000, 4]
    assert (counts.matched, counts.unknown, counts.unknown_indices) == (10_002, 2, (3, 10_003))


WRONG: list[tuple[Any, Callable[[Client], object], str]] = [
    ({"groups": [GROUP | {"duration": "long"}]}, lambda c: c.groups.get("g"), "groups.0.duration"),
    ({}, lambda c: c.prompts.get("g"), "prompt_key"),
    ([], lambda c: c.policy.get(), "body"),
]


@pytest.mark.parametrize(("answer", "call", "field"), WRONG)
def test_the_error_of_a_malformed_answer_names_the_field(
    answer: Any, call: Callable[[Client], object], field: str
) -> None:
    with Client(URL, transport=FakeServer(answer).transport) as client, pytest.raises(ProtocolError, match=field):
        call(client)
