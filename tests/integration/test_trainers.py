"""Trainers' requests over several turns, on real vLLM: the first turns make a group, the others run at once."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from darts_server.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
SIZE = 4
GROUP = {"X-Darts-Group": f"size={SIZE}"}
PROMPT = "7a-5b*4>"


TOKENS = 24
"""Of an answer, at most."""


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAMPLING = {"temperature": 1.0, "return_token_ids": True}


@dataclass
class Trajectory:
    """A trajectory as its trainer keeps it. Each turn is a request of its own with n = 1."""

    name: str
    token_ids: list[int]
    messages: list[dict[str, Any]] = field(default_factory=list)


Request = tuple[str, dict[str, Any]]
"""Path and body."""


def text_chat(trajectory: Trajectory) -> Request:
    """Answers are kept as messages: verifiers without a session, ART 0.5.23, rLLM 0.3.0."""
    more = {"messages": trajectory.messages, "max_completion_tokens": TOKENS, "logprobs": True}
    return CHAT, {"model": "tiny"} | SAMPLING | more


def parts_chat(trajectory: Trajectory) -> Request:
    """The same with contents as lists of parts: clients that also send images."""
    path, body = text_chat(trajectory)
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in trajectory.messages]
    return path, body | {"messages": parts}


def completions(trajectory: Trajectory) -> Request:
    """AReaL 1.0.4, TRL 1.16's asynchronous trainer: token ids to completions."""
    more = {"prompt": trajectory.token_ids, "max_tokens": TOKENS, "logprobs": 0, "return_tokens_as_token_ids": True}
    return COMPLETIONS, {"model": "tiny"} | SAMPLING | more


def streamed_completions(trajectory: Trajectory) -> Request:
    path, body = completions(trajectory)
    return path, body | {"stream": True}


def own_session(trajectory: Trajectory) -> Request:
    """Our own option, for trainers whose sampling parameters pass through. The prompt is rewritten each turn."""
    path, body = completions(trajectory)
    return path, body | {"prompt": trajectory.token_ids[-12:], "vllm_xargs": {"darts_session": trajectory.name}}


FORMS: Mapping[str, Callable[[Trajectory], Request]] = {
    form.__name__: form for form in (parts_chat, streamed_completions, own_session)
}
"""Those that `tests/trainers/requests.json` has not."""


def read_answer(response: httpx.Response) -> tuple[list[int], str]:
    """Token ids and text of an answer's only choice; whichever the route returns."""
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return [token for c in choices for token in c["token_ids"] or ()], "".join(c["text"] for c in choices)
    [choice] = response.json()["choices"]
    text = choice["message"]["content"] if "message" in choice else choice.get("text", "")
    return choice.get("token_ids") or [], text or ""


def groups(server: Server) -> float:
    return server.metric("darts_groups_total")


async def take_turn(client: httpx.AsyncClient, form: str, trajectory: Trajectory, number: int) -> httpx.Response:
    path, body = FORMS[form](trajectory)
    response = await client.post(path, json=body, headers=GROUP)
    assert response.status_code == 200, response.text
    tokens, text = read_answer(response)
    trajectory.token_ids += [*tokens, 5 + number, 6 + int(trajectory.name[-1])]
    trajectory.messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"{number}a-5b*{trajectory.name[-1]}>"},
    ]
    return response


@pytest.mark.parametrize("form", FORMS)
async def test_the_first_turns_of_a_trajectory_make_a_group_and_the_others_run_alone(server: Server, form: str) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        tokenized = (await client.post("/tokenize", json={"model": "tiny", "prompt": PROMPT})).json()["tokens"]
        opening = [*[5 + list(FORMS).index(form)] * 20, *tokenized]  # none begins another
        before = groups(server)
        chat = [{"role": "user", "content": PROMPT}]
        trajectories = [Trajectory(f"{form}-{rep}", list(opening), list(chat)) for rep in range(SIZE)]
        for number in range(3):
            answers = await asyncio.gather(*(take_turn(client, form, t, number) for t in trajectories))
            ids = {answer.headers.get("X-Darts-Group-Id") for answer in answers}
            assert len(ids) == 1
            assert number == 0 or ids == {None}, f"turn {number + 1}: {ids}"
            assert groups(server) == before + 1, f"turn {number + 1}"


async def test_trajectories_that_said_the_same_are_not_shaped_as_a_fragment(server: Server) -> None:
    opening = [7, 8, 9, 10, 11]
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        path, body = completions(Trajectory("u", opening))
        first = await client.post(path, json=body | {"n": SIZE})
        assert first.headers["X-Darts-Group-Id"]
        before = groups(server)
        later = [*opening, *first.json()["choices"][0]["token_ids"], 5]
        posts = (client.post(path, json=body | {"prompt": later}, headers=GROUP) for _ in range(SIZE))
        answers = await asyncio.gather(*posts)
        assert {answer.status_code for answer in answers} == {200}
        assert not any("X-Darts-Group-Id" in answer.headers for answer in answers)
        assert groups(server) == before


@pytest.mark.parametrize(
    "change", [{"temperature": 0}, {"max_tokens": 1}, {"prompt_logprobs": 0}, {"use_beam_search": True}]
)
async def test_scoring_and_greedy_requests_never_wait_for_others(server: Server, change: dict[str, object]) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        before = groups(server)
        path, body = completions(Trajectory("u", [7, 8, 9, 10, 12]))
        answer = await client.post(path, json=body | change, headers=GROUP)
        assert answer.status_code == 200, answer.text
        assert "X-Darts-Group-Id" not in answer.headers
        assert groups(server) == before


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_chat_that_goes_on_from_an_answered_one_runs_alone_and_one_with_examples_is_grouped(
    server: Server, is_answered: bool
) -> None:
    messages = [{"role": "user", "content": f"{9 - is_answered}a-5b*4>"}]
    later = [*messages, {"role": "assistant", "content": " said otherwise\n"}, {"role": "user", "content": PROMPT}]
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        path, body = text_chat(Trajectory("u", [], messages))
        if is_answered:
            (await client.post(path, json=body)).raise_for_status()
        for names, alone in (({}, is_answered), ({"X-Darts-Group": f"id=named-{is_answered};size={SIZE}"}, False)):
            before = groups(server)
            posts = (client.post(path, json=body | {"messages": later}, headers=GROUP | names) for _ in range(SIZE))
            assert {a.status_code for a in await asyncio.gather(*posts)} == {200}
            assert groups(server) == before + (not alone)


async def test_sessions_of_skyrl_name_their_groups_also_if_two_have_the_same_prompt(server: Server) -> None:
    sampling = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0}
    body = {"token_ids": [7, 8, 9, 10, 13], "sampling_params": sampling}
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        sessions = [f"{uid}_{rep}" for rep in range(SIZE) for uid in ("scarlet", "navy")]
        posts = (
            client.post("/inference/v1/generate", json=body, headers=GROUP | {"X-Session-ID": name})
            for name in sessions
        )
        answers = await asyncio.gather(*posts)
        for uid in ("scarlet", "navy"):
            ids = {a.headers["X-Darts-Group-Id"] for a, name in zip(answers, sessions, strict=True) if uid in name}
            assert len(ids) == 1
            [group] = (await client.get(f"/darts/v1/groups/{uid}")).json()["groups"]
            assert (group["group_id"], group["group_size"]) == (ids.pop(), SIZE)
