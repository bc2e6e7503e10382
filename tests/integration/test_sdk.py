"""Our own client against the running server."""

import pytest

from darts_client import AsyncClient, BadRequest, Client
from examples.tiny_rl.server import Server

pytestmark = pytest.mark.engine
PROMPTS = ["7a-5b*4>", "1a+5b*4c-3>", "3a*7b+2c-5d*9>"]


def test_groups_come_in_prompt_order_with_ids_and_log_probs(server: Server) -> None:
    with Client(server.url) as client:
        client.health()
        assert client.models() == ["tiny", "tiny:raw"]
        groups = client.completions(PROMPTS, group_size=8, max_tokens=200)
    assert [len(g.prompt_token_ids or ()) for g in groups] == [len(p) for p in PROMPTS]
    for group in groups:
        assert len(group.trajectories) == 8
        assert all(t.logprobs is not None and len(t.logprobs) == len(t.token_ids) for t in group.trajectories)


@pytest.mark.anyio
async def test_groups_arrive_as_they_complete(server: Server) -> None:
    async with AsyncClient(server.url) as client:
        found = {i: g async for i, g in client.stream_groups(PROMPTS * 4, group_size=4, max_tokens=100)}
    assert sorted(found) == list(range(12))


def test_a_refused_request_is_a_typed_error_with_its_field(server: Server) -> None:
    with Client(server.url) as client, pytest.raises(BadRequest, match="sideways"):
        client.completions(PROMPTS, group_size=8, max_tokens=50, policy="sideways")
