"""Groups of single requests under a policy that shapes nothing: they are recorded, and no answer is exchanged."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fork_server import Serve
from tests.integration.waiting import POLL_SECONDS

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
PROMPT = "3a*7b+2c-5d*9>"
SIZE = 4
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "logprobs": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(DARTS, tmp_path_factory.mktemp("counted") / "log", "--policy", "auto", "--enable-scale-out") as running:
        yield running


async def send(client: httpx.AsyncClient, headers: dict[str, str], **body: Any) -> tuple[httpx.Headers, list[Any]]:
    """Return the headers of an answer, and its chunks or the whole of it."""
    answer = await client.post("/v1/completions", json=BODY | body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.headers, [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return answer.headers, [json.loads(line) for line in lines]


def tokens_of(chunks: list[Any]) -> list[int]:
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


@pytest.mark.parametrize("policy", ["auto", "off"])
async def test_a_named_group_is_recorded_and_every_caller_gets_its_own_answer(server: Server, policy: str) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        assert (await client.patch("/darts/v1/policy", json={"policy": policy})).status_code == 200
        name = f"named under {policy}"
        group = {"X-Darts-Group": f"id={name};size={SIZE}"}
        whole, streamed = {"stream": False}, {"stream": True}
        sent = [{"seed": seed} | (whole if seed % 2 else streamed) for seed in range(SIZE)]
        answers = await asyncio.gather(*(send(client, group, **body) for body in sent))
        for body, (headers, chunks) in zip(sent, answers, strict=True):
            _, raw = await send(client, {}, **body, model="tiny:raw")
            assert tokens_of(chunks) == tokens_of(raw), "it is its own, as without a group"
            assert len(chunks) > 1 or not body["stream"], "and is streamed as it is generated"
            assert headers["X-Darts-Group-Id"].startswith("group-")
        assert len({headers["X-Darts-Group-Id"] for headers, _ in answers}) == 1

        [record] = (await client.get(f"/darts/v1/groups/{name}")).json()["groups"]
        assert (record["outcome"], record["group_size"], record["policy"]) == ("completed", SIZE, "off")
        lengths = sorted(len(tokens_of(chunks)) for _, chunks in answers)
        assert sorted(candidate["length"] for candidate in record["candidates"]) == lengths
        [first] = (await client.get(f"/darts/v1/groups/{answers[0][1][0]['id']}")).json()["groups"]
        assert first == record, "each request finds it"
        prompt_ids = answers[1][1][0]["choices"][0]["prompt_token_ids"]
        rewards = [
            {"prompt_token_ids": prompt_ids, "completion_token_ids": tokens_of(chunks), "reward": 1.0, "correct": True}
            for _, chunks in answers
        ]
        report = (await client.post("/darts/v1/rewards", json={"rewards": rewards})).json()
        assert (report["unknown"], report["matched"] + report["repeated"]) == (0, SIZE), "equal answers match together"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 20}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 20}),
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20}),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 20, "temperature": 1}}),
    ],
)
async def test_groups_are_recorded_on_every_route(server: Server, path: str, body: dict[str, Any]) -> None:
    name = path.replace("/", " ").strip()
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        sent = {"model": "tiny"} | body
        group = {"X-Darts-Group": f"id={name};size={SIZE}"}
        answers = await asyncio.gather(*(client.post(path, json=sent, headers=group) for _ in range(SIZE)))
        assert {answer.status_code for answer in answers} == {200}, answers[0].text
        assert len({answer.headers["X-Darts-Group-Id"] for answer in answers}) == 1
        [record] = (await client.get(f"/darts/v1/groups/{name}")).json()["groups"]
        assert (record["outcome"], len(record["candidates"])) == ("completed", SIZE)


async def test_a_size_of_the_server_makes_groups_of_opening_requests_alone(server: Server) -> None:
    prompt = [5, 9, 6, 10, 7]
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        assert (await client.patch("/darts/v1/policy", json={"policy": "auto", "group_size": 2})).status_code == 200
        answers = await asyncio.gather(*(send(client, {}, prompt=prompt) for _ in range(2)))
        [name] = {headers["X-Darts-Group-Id"] for headers, _ in answers}
        [record] = (await client.get(f"/darts/v1/groups/{name}")).json()["groups"]
        assert record["outcome"] == "completed"
        assert len(record["candidates"]) == 2
        later = [*prompt, *tokens_of(answers[0][1]), 6]
        for headers, body in (
            ({}, {"prompt": later}),
            ({}, {"prompt": prompt, "temperature": 0}),
            ({}, {"prompt": prompt, "model": "tiny:raw"}),
            ({"X-Darts-Policy": "off"}, {"prompt": prompt}),
            ({"X-Darts-Policy": "off", "X-Darts-Group": "id=evaluated;size=2"}, {"prompt": prompt}),
        ):
            answered, _ = await send(client, headers, **body)
            assert "X-Darts-Group-Id" not in answered, (headers, body)
        assert (await client.get("/darts/v1/groups/evaluated")).status_code == 404
        assert (await client.patch("/darts/v1/policy", json={"group_size": None})).status_code == 200
        answered, _ = await send(client, {}, prompt=prompt)
        assert "X-Darts-Group-Id" not in answered


async def test_a_caller_that_disconnects_leaves_its_place_to_the_one_that_comes_again(server: Server) -> None:
    group = {"X-Darts-Group": "id=left;size=2"}
    endless = {"max_tokens": 250, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        left = BODY | endless | {"stream": True}
        async with client.stream("POST", "/v1/completions", json=left, headers=group) as leaving:
            await anext(leaving.aiter_lines())
        await asyncio.to_thread(wait_until_free, server)
        first, second = await asyncio.gather(*(send(client, group, **endless) for _ in range(2)))
        assert first[0]["X-Darts-Group-Id"] == second[0]["X-Darts-Group-Id"] == leaving.headers["X-Darts-Group-Id"]
        [record] = (await client.get("/darts/v1/groups/left")).json()["groups"]
        assert record["outcome"] == "completed"
        gone, *returned = record["candidates"]
        assert gone["reason"] == "cancelled"
        assert 0 < gone["length"] < 250
        assert [candidate["length"] for candidate in returned] == [250, 250]


def wait_until_free(server: Server, seconds: float = 60.0) -> None:
    """Wait until the engine runs nothing."""
    began = time.monotonic()
    while server.count_requests():
        assert time.monotonic() - began < seconds
        time.sleep(POLL_SECONDS)
