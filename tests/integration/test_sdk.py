"""The Python client against the running server."""

from typing import Any

import pytest

from darts_client import (
    Client,
    Delta,
    Discard,
    GroupEvent,
    PromptSpec,
    TrajectoryEvent,
)
from darts_client.tensors import to_tensors
from darts_server.demo.server import Server

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
