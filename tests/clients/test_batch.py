"""A batch that is answered at once: the same groups from tensors and from JSON, and invalid answers."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from darts_client import Client, ConnectionFailed, Group, PromptSpec, ProtocolError, RolloutPrompt, ServerFault
from darts_client._batch import ACCEPT, TENSORS, read_batch
from darts_server.engine.scripted import Script
from darts_server.exceptions import CandidateFailed
from darts_server.http.token_tensors import TokenTensors

from .servers import RunningServer, serving
from .transcripts import BATCH, USAGE, FakeServer, build_request, failed_group, group

SIZES: dict[str, Any] = {"group_size": 2, "max_tokens": 100, "policy": "off"}
PROMPTS: list[RolloutPrompt] = [PromptSpec("60", key="long", metadata={"place": "ü"}), [5], "broken"]


def script(prompt: str, index: int) -> Script:
    if prompt == "broken":
        return Script(3, error=CandidateFailed("broken"))
    return Script(int(prompt) + 7 * index)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(script) as served:
        yield served


def without_seconds(groups: tuple[Group, ...] | list[Group]) -> list[Any]:
    """The values that two runs of a batch have in common."""
    return [
        (g.number, g.prompt_key, g.metadata, [(t.token_ids, t.logprobs, t.text) for t in g.trajectories])
        for g in groups
    ]


def test_a_batch_has_the_groups_of_the_stream(server: RunningServer) -> None:
    with Client(server.url) as client:
        batch = client.batch(PROMPTS, **SIZES)
        with client.rollouts(PROMPTS, **SIZES) as rollouts:
            groups = sorted(rollouts, key=lambda group: group.number)
            assert rollouts.usage is not None
            assert batch.usage.returned == rollouts.usage.returned
            assert (batch.policy, batch.sampling) == (rollouts.policy, rollouts.sampling)
    assert without_seconds(batch.groups) == without_seconds(groups)
    assert [trajectory.length for trajectory in batch.groups[0].trajectories] == [60, 67]
    assert [group.number for group in batch.failed] == [2]
    assert (batch.unfinished, batch.carried) == ((), 0)


def test_the_first_error_is_raised_if_all_groups_fail(server: RunningServer) -> None:
    with Client(server.url) as client, pytest.raises(ServerFault, match="broken"):
        client.batch("broken", **SIZES)


def test_only_a_durable_batch_is_sent_again_with_its_key() -> None:
    server = FakeServer(httpx.ReadError("lost"), document(group(0), group(1)), httpx.ReadError("lost"))
    with Client("http://test", transport=server.transport) as client:
        batch = client.batch(["a", "b"], idempotency_key="step 1", **SIZES)
        assert [one.number for one in batch.groups] == [0, 1]
        with pytest.raises(ConnectionFailed, match="lost"):
            client.batch(["a", "b"], durable=False, **SIZES)
    assert [request.headers.get("idempotency-key") for request in server.requests] == ["step 1", "step 1", None]
    assert {request.headers["accept"] for request in server.requests} == {ACCEPT}
    assert "stream" not in json.loads(server.requests[0].content)


def document(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"id": BATCH, "policy": "off", "groups": list(groups), "usage": USAGE, **changes}


def as_tensors(answer: dict[str, Any], **changes: Any) -> bytes:
    """The same answer with its tokens in tensors."""
    tensors = TokenTensors()
    answer = json.loads(json.dumps(answer))
    for one in answer["groups"]:
        for item in one["trajectories"]:
            row = tensors.add_row(item["token_ids"], item["logprobs"])
            item["token_ids"], item["logprobs"] = row, None if item["logprobs"] is None else row
            item.update(changes)
    tensors.answer = json.dumps(answer).encode()
    response = tensors.response(ExitStack())

    async def read() -> bytes:
        return b"".join([bytes(chunk) async for chunk in response.body_iterator])  # type: ignore[arg-type]

    return asyncio.run(read())


def respond(content: bytes, media_type: str) -> httpx.Response:
    request = httpx.Request("POST", "http://test/darts/v1/rollouts")
    return httpx.Response(200, content=content, headers={"Content-Type": media_type}, request=request)


def test_both_forms_are_the_same_batch() -> None:
    answer = document(group(0), failed_group(1))
    plain = read_batch(build_request(), respond(json.dumps(answer).encode(), "application/json"))
    tensors = read_batch(build_request(), respond(as_tensors(answer), TENSORS))
    assert [str(one.error) for one in tensors.failed] == [str(one.error) for one in plain.failed]
    assert replace(tensors, failed=()) == replace(plain, failed=())
    assert ([one.number for one in plain.groups], [one.number for one in plain.failed]) == ([0], [1])


@pytest.mark.parametrize(
    ("groups", "changes", "message"),
    [
        ([group(0)], {}, "2 prompt"),
        ([group(0), group(0)], {}, "2 prompt"),
        ([group(0), group(1)], {"token_ids": 4}, "there is no row 4"),
        ([group(0), group(1)], {"token_ids": -1}, "there is no row -1"),
        ([group(0), group(1)], {"token_ids": "0"}, "there is no row '0'"),
        ([group(0), group(1)], {"logprobs": True}, "there is no row True"),
        ([group(0), group(1)], {"token_ids": 0}, "tokens, but its length is"),
    ],
)
def test_answers_that_do_not_fit_the_request_are_refused(groups: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read_batch(build_request(), respond(as_tensors(document(*groups), **changes), TENSORS))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_log_probs_that_are_not_finite_are_refused(value: float) -> None:
    answer = document(group(0), group(1))
    answer["groups"][0]["trajectories"][0]["logprobs"][0] = value
    with pytest.raises(ProtocolError, match="not finite"):
        read_batch(build_request(), respond(as_tensors(answer), TENSORS))


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1],
        lambda whole: b"",
        lambda whole: b"\xff" * 16,
        lambda whole: whole.replace(b'"answer"', b'"answxr"'),
        lambda whole: whole.replace(b'"I32"', b'"F16"'),
    ],
)
def test_a_damaged_file_is_a_protocol_error(damage: Any) -> None:
    whole = as_tensors(document(group(0), group(1)))
    with pytest.raises(ProtocolError, match="not a file of the expected tensors"):
        read_batch(build_request(), respond(damage(whole), TENSORS))
