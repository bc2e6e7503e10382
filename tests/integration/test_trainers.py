"""Trainers' requests over several turns, on real vLLM: the first turns make a group, the others run at once.

In forms that `tests/trainers/requests.json` has not.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
SIZE = 4
GROUP = {"X-Darts-Group": f"size={SIZE}"}
GROUP_ID = "X-Darts-Group-Id"
PROMPT = "7a-5b*4>"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "max_tokens": 24, "return_token_ids": True}


def groups(server: Server) -> float:
    return server.metric("darts_groups_total")


def generated(answer: httpx.Response) -> list[int]:
    """Return the token ids of an answer's only choice."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        [choice] = answer.json()["choices"]
        return list(choice["token_ids"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [token for line in lines for choice in json.loads(line)["choices"] for token in choice["token_ids"] or ()]


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "own sessions"])
async def test_the_first_turns_of_a_trajectory_make_a_group_and_the_others_run_alone(
    server: Server, streams: bool
) -> None:
    """With our own option for sessions the prompt may be rewritten each turn."""
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        tokenized = (await client.post("/tokenize", json={"model": "tiny", "prompt": PROMPT})).json()["tokens"]
        opening = [*[6 + streams] * 20, *tokenized]  # neither begins the other
        trajectories = [list(opening) for _ in range(SIZE)]

        async def take_turn(number: int, rep: int) -> str | None:
            tokens = trajectories[rep]
            rewritten = {"prompt": tokens[-12:], "vllm_xargs": {"darts_session": f"trajectory-{rep}"}}
            more = {"prompt": tokens, "stream": True} if streams else rewritten
            answer = await client.post(COMPLETIONS, json=BODY | more, headers=GROUP)
            assert answer.status_code == 200, answer.text
            tokens += [*generated(answer), 5 + number, 6 + rep]
            group_id: str | None = answer.headers.get(GROUP_ID)
            return group_id

        before = groups(server)
        for number in range(3):
            [group_id] = {*await asyncio.gather(*(take_turn(number, rep) for rep in range(SIZE)))}
            assert number == 0 or group_id is None, f"turn {number + 1}"
            assert groups(server) == before + 1, f"turn {number + 1}"


async def test_trajectories_that_said_the_same_are_not_shaped_as_a_fragment(server: Server) -> None:
    opening = [7, 8, 9, 10, 11]
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        first = await client.post(COMPLETIONS, json=BODY | {"prompt": opening, "n": SIZE})
        assert first.headers[GROUP_ID]
        before = groups(server)
        later = BODY | {"prompt": [*opening, *first.json()["choices"][0]["token_ids"], 5]}
        posts = (client.post(COMPLETIONS, json=later, headers=GROUP) for _ in range(SIZE))
        answers = await asyncio.gather(*posts)
        assert {answer.status_code for answer in answers} == {200}
        assert not any(GROUP_ID in answer.headers for answer in answers)
        assert groups(server) == before


@pytest.mark.parametrize(
    "change", [{"temperature": 0}, {"max_tokens": 1}, {"prompt_logprobs": 0}, {"use_beam_search": True}]
)
async def test_scoring_and_greedy_requests_never_wait_for_others(server: Server, change: dict[str, object]) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        before = groups(server)
        body = BODY | {"prompt": [7, 8, 9, 10, 12]} | change
        answer = await client.post(COMPLETIONS, json=body, headers=GROUP)
        assert answer.status_code == 200, answer.text
        assert GROUP_ID not in answer.headers
        assert groups(server) == before


def says(role: str, text: str) -> dict[str, Any]:
    """A message whose content is a list, as clients send that also send images."""
    return {"role": role, "content": [{"type": "text", "text": text}]}


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_chat_that_goes_on_from_an_answered_one_runs_alone_and_one_with_examples_is_grouped(
    server: Server, is_answered: bool
) -> None:
    messages = [says("user", f"{9 - is_answered}a-5b*4>")]
    later = BODY | {"messages": [*messages, says("assistant", " said otherwise\n"), says("user", PROMPT)]}
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        if is_answered:
            (await client.post(CHAT, json=BODY | {"messages": messages})).raise_for_status()
        for names, alone in (({}, is_answered), ({"X-Darts-Group": f"id=named-{is_answered};size={SIZE}"}, False)):
            before = groups(server)
            posts = (client.post(CHAT, json=later, headers=GROUP | names) for _ in range(SIZE))
            assert {a.status_code for a in await asyncio.gather(*posts)} == {200}
            assert groups(server) == before + (not alone)


async def test_sessions_of_skyrl_name_their_groups_also_if_two_have_the_same_prompt(server: Server) -> None:
    sampling = {"max_tokens": 24, "temperature": 1.0, "logprobs": 0}
    body = {"token_ids": [7, 8, 9, 10, 13], "sampling_params": sampling}
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        sessions = [f"{uid}_{rep}" for rep in range(SIZE) for uid in ("scarlet", "navy")]
        posts = (
            client.post("/inference/v1/generate", json=body, headers=GROUP | {"X-Session-ID": name})
            for name in sessions
        )
        answers = await asyncio.gather(*posts)
        for uid in ("scarlet", "navy"):
            ids = {a.headers[GROUP_ID] for a, name in zip(answers, sessions, strict=True) if uid in name}
            assert len(ids) == 1
            [group] = (await client.get(f"/darts/v1/groups/{uid}")).json()["groups"]
            assert (group["group_id"], group["group_size"]) == (ids.pop(), SIZE)
