"""The running server reports the groups and candidates behind a response."""

import httpx
import pytest

from darts_server.demo.server import Server

pytestmark = pytest.mark.engine
PROMPTS = ["7a-5b*4>", "1a+5b*4c-3>"]
BODY = {"model": "tiny", "prompt": PROMPTS, "n": 8, "max_tokens": 200, "return_token_ids": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_names_its_groups_and_their_candidates_match_its_choices(server: Server, stream: bool) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"stream": stream}, timeout=240)
    name = answer.headers["X-Darts-Group-Id"]
    groups = httpx.get(f"{server.url}/darts/v1/groups/{name}").json()["groups"]
    assert [group["group_id"] for group in groups] == [f"{name}-0", f"{name}-1"]
    assert all(len(group["candidates"]) == 12 for group in groups)
    if not stream:
        assert answer.json()["id"] == name
        lengths = [len(choice["token_ids"]) for choice in answer.json()["choices"]]
        selected = [c["length"] for group in groups for c in group["candidates"] if c["selected_as"]]
        assert selected == lengths
    stats = httpx.get(f"{server.url}/darts/v1/prompts/{groups[0]['prompt_key']}").json()
    assert stats["candidates"] >= 12


def test_chat_and_token_routes_name_their_group_too(server: Server) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPTS[0]}], "n": 4, "max_tokens": 50}
    tokens = {"token_ids": [5, 6, 7], "sampling_params": {"n": 4, "max_tokens": 50}}
    for path, body in (("v1/chat/completions", chat), ("inference/v1/generate", tokens)):
        name = httpx.post(f"{server.url}/{path}", json=body, timeout=240).headers["X-Darts-Group-Id"]
        [group] = httpx.get(f"{server.url}/darts/v1/groups/{name}").json()["groups"]
        assert len(group["candidates"]) == 6


def test_unshaped_responses_name_no_group(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"model": "tiny:raw"}, timeout=240)
    assert "X-Darts-Group-Id" not in answer.headers
    assert httpx.get(f"{server.url}/darts/v1/groups/{answer.json()['id']}").status_code == 404
