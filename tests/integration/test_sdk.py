"""The Python client against the running server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from darts_client import (
    AsyncClient,
    BadRequest,
    Client,
    Delta,
    Discard,
    Event,
    GroupEvent,
    NotFound,
    PromptSpec,
    TrajectoryEvent,
    Unauthorized,
)
from darts_client.tensors import to_tensors
from darts_server.demo.server import MODEL, Server
from tests.integration.waiting import wait_idle

pytestmark = pytest.mark.engine
PROMPTS = ["7a-5b*4>", "1a+5b*4c-3>", "3a*7b+2c-5d*9>"]
SIZES: dict[str, Any] = {"group_size": 8, "max_tokens": 200}


def test_groups_come_in_prompt_order_with_ids_and_log_probs(server: Server) -> None:
    with Client(server.url) as client:
        client.health()
        assert client.models() == ["tiny", "tiny:raw"]
        groups = client.completions(PROMPTS, group_size=8, max_tokens=200)
    assert [len(g.prompt_token_ids or ()) for g in groups] == [len(p) for p in PROMPTS]
    for group in groups:
        assert len(group.trajectories) == 8
        assert all(t.logprobs is not None and len(t.logprobs) == len(t.token_ids) for t in group.trajectories)


def test_a_rejected_request_raises_a_typed_error_with_its_field(server: Server) -> None:
    with Client(server.url) as client, pytest.raises(BadRequest, match="sideways"):
        client.completions(PROMPTS, group_size=8, max_tokens=50, policy="sideways")


def test_rollouts_have_log_probs_and_become_tensors(server: Server) -> None:
    prompts = [PromptSpec(text, metadata={"place": place}) for place, text in enumerate(PROMPTS * 4)]
    with Client(server.url) as client, client.rollouts(prompts, policy="darts_cut", **SIZES) as rollouts:
        groups = list(rollouts)
        assert rollouts.policy == "darts_cut"
        assert rollouts.usage is not None
        assert rollouts.usage.returned == sum(sum(group.lengths) for group in groups)
    assert sorted((group.metadata or {})["place"] for group in groups) == list(range(12))
    assert all(t.logprobs is not None and max(t.logprobs) <= 0 for group in groups for t in group.trajectories)
    batch = to_tensors(groups, [[float(k % 2) for k in range(8)]] * 12)
    assert batch.completion_ids.shape[0] == 96
    assert batch.logprobs is not None
    assert batch.advantages is not None


def test_streamed_tokens_make_the_same_groups_as_one_answer(server: Server) -> None:
    with Client(server.url) as client:
        whole = {group.number: group for group in client.rollouts(PROMPTS, seed=3, **SIZES)}
        events = list(client.stream_tokens(PROMPTS, seed=3, chunk_tokens=10, **SIZES))
    streamed = {event.group.number: event.group for event in events if isinstance(event, GroupEvent)}
    for number, group in whole.items():
        for ours, theirs in zip(streamed[number].trajectories, group.trajectories, strict=True):
            assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    ended = [event.trajectory_id for event in events if isinstance(event, TrajectoryEvent | Discard)]
    assert len(ended) == len(set(ended)) == sum(group.candidates or 0 for group in streamed.values())
    assert sum(isinstance(event, Delta) for event in events) > len(PROMPTS) * 8


class Torn(httpx.BaseTransport):
    """Loses the connection after some pieces of each stream."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.lost = 0
        self._network = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._network.handle_request(request)
        if not answer.headers.get("Content-Type", "").startswith("text/event-stream"):
            return answer
        body = answer.stream
        assert isinstance(body, httpx.SyncByteStream)
        return httpx.Response(answer.status_code, headers=answer.headers, stream=TornBody(self, body))


class TornBody(httpx.SyncByteStream):
    def __init__(self, cut: Torn, body: httpx.SyncByteStream) -> None:
        self._cut = cut
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        for count, piece in enumerate(self._body):
            if count == self._cut.pieces:
                self._cut.lost += 1
                raise httpx.ReadError("torn")
            yield piece

    def close(self) -> None:
        self._body.close()


def test_lost_connections_change_nothing(server: Server) -> None:
    with Client(server.url) as client:
        whole = {group.number: group for group in client.rollouts(PROMPTS, seed=5, **SIZES)}
    transport = Torn(2)
    with Client(server.url, transport=transport) as client:
        events: list[Event] = list(client.stream_tokens(PROMPTS, seed=5, chunk_tokens=8, **SIZES))
    assert transport.lost >= 1
    streamed = {event.group.number: event.group for event in events if isinstance(event, GroupEvent)}
    assert {n: [t.token_ids for t in g.trajectories] for n, g in streamed.items()} == {
        n: [t.token_ids for t in g.trajectories] for n, g in whole.items()
    }


@pytest.mark.anyio
@pytest.mark.parametrize("durable", [True, False])
async def test_the_engine_is_idle_after_a_stream_is_closed_early(server: Server, durable: bool) -> None:
    async with (
        AsyncClient(server.url) as client,
        client.stream_tokens(PROMPTS * 8, chunk_tokens=1, durable=durable, ignore_eos=True, **SIZES) as events,
    ):
        await anext(events)
    await asyncio.to_thread(wait_idle, server)


def test_rewards_appear_in_the_group_and_the_prompts_statistics(server: Server) -> None:
    with Client(server.url) as client:
        [group] = client.rollouts(PromptSpec(PROMPTS[0], key="sdk/rewarded"), **SIZES)
        values = [1.0] * 3 + [0.0] * 5
        assert client.rewards(group, values).matched == 8
        assert client.rewards(group, values).repeated == 8
        [record] = client.groups.get(group.group_id or "")
        rewards_of_selected = [c.reward for c in record.candidates if c.selected_as is not None]
        assert rewards_of_selected == values
        rewards = client.prompts.get("sdk/rewarded").rewards
    assert rewards is not None
    assert (rewards.rewarded, rewards.right) == (8, 3)


def test_rewards_of_openai_groups_are_named_by_their_tokens(server: Server) -> None:
    with Client(server.url) as client:
        [group] = client.completions("2a+7b*3c-1>", group_size=8, max_tokens=200)
        counts = client.rewards(group, [float(len(t.token_ids) % 2) for t in group.trajectories])
    assert (counts.matched + counts.repeated, counts.unknown) == (8, 0)


def test_state_and_policy(server: Server, tmp_path: Path) -> None:
    with Client(server.url) as client:
        before = client.policy.get()["redundancy"]
        client.state.save(tmp_path / "state")
        try:
            assert client.policy.change(redundancy=2.0)["redundancy"] == 2.0
            [group] = client.rollouts(PromptSpec(PROMPTS[0], key="sdk/after"), **SIZES)
            assert group.candidates == 16
        finally:
            client.policy.change(redundancy=before)
            client.state.load(tmp_path / "state")
        with pytest.raises(NotFound):
            client.prompts.get("sdk/after")


@pytest.mark.anyio
async def test_weights_are_pushed_and_later_groups_name_their_version(server: Server) -> None:
    """Pushes the original weights, because other tests need them."""
    weights = MODEL / "model.safetensors"
    with Client(server.url) as client:
        before = client.weights.get()
        pushed = client.weights.push(weights)
        assert (pushed.version, pushed.last and pushed.last.outcome) == (before.version + 1, "completed")
        with pytest.raises(Unauthorized, match="--weights-root"):
            client.weights.load(weights)
    async with AsyncClient(server.url) as asynchronous:
        assert (await asynchronous.weights.push(weights, rule="keep")).version == before.version + 2
        async with asynchronous.rollouts(PROMPTS, **SIZES) as groups:
            versions = {t.weight_version_start async for group in groups for t in group.trajectories}
    assert versions == {before.version + 2}
