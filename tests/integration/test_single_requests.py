"""Groups joined from single requests, one per trajectory, on real vLLM."""

import asyncio
import base64
import io
import json
from collections import Counter
from pathlib import Path
from random import Random

import httpx
import pytest
import torch

from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.server import DARTS, MODEL, Server
from tests.integration.fork_server import Serve
from tests.integration.waiting import wait_idle

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
SIZE = 8
PROMPTS = 12
GROUP = {"X-Darts-Group": f"size={SIZE}"}
HIDDEN: int = json.loads((MODEL / "config.json").read_text())["hidden_size"]
NO_LIMIT = httpx.Limits(max_connections=None)


def body(prompt: str) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 256, "temperature": 1.0, "return_token_ids": True}


@pytest.mark.nightly
async def test_groups_of_8_single_requests_of_which_a_tenth_disconnect(server: Server) -> None:
    rng = Random(11)
    prompts = list({sample_problem(rng).prompt: None for _ in range(3 * PROMPTS)})[:PROMPTS]
    callers = [prompt for prompt in prompts for _ in range(SIZE)]
    rng.shuffle(callers)
    impatient = set(rng.sample(range(len(callers)), len(callers) // 10))

    async def call(number: int, client: httpx.AsyncClient) -> httpx.Response | None:
        await asyncio.sleep(rng.random() * 0.5)
        post = asyncio.create_task(
            client.post(f"{server.url}/v1/completions", json=body(callers[number]), headers=GROUP)
        )
        if number in impatient:
            await asyncio.sleep(rng.random())
            post.cancel()
        answered, _ = await asyncio.wait([post])
        return None if post.cancelled() else answered.pop().result()

    async with httpx.AsyncClient(timeout=240, limits=NO_LIMIT) as client:
        answers = await asyncio.gather(*(call(number, client) for number in range(len(callers))))
        await asyncio.to_thread(wait_idle, server)
        groups = {}
        taken: Counter[tuple[str, int]] = Counter()
        for number, answer in enumerate(answers):
            if answer is None:
                assert number in impatient
                continue
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            name = answer.headers["X-Darts-Group-Id"]
            record = await client.get(f"{server.url}/darts/v1/groups/{name}")
            [groups[name]] = record.json()["groups"]
            assert answer.json()["id"] in {member.rpartition("-")[0] for member in groups[name]["members"]}
            taken[name, len(choice["token_ids"])] += 1

    whole = [g for g in groups.values() if g["outcome"] == "completed" and g["group_size"] == SIZE]
    # Of the others a caller disconnected before it had joined, or came late, as a busy machine reads requests slowly.
    patient = PROMPTS - len({callers[number] for number in impatient})
    assert len(whole) > patient / 3, Counter((g["outcome"], g["group_size"]) for g in groups.values())
    assert {sum(bool(c["selected_as"]) for c in group["candidates"]) for group in whole} == {SIZE}
    for (name, length), count in taken.items():
        held = [c["length"] for c in groups[name]["candidates"] if c["selected_as"]]
        assert count <= held.count(length), "a candidate was given twice"


async def test_a_lone_request_is_answered_like_an_unshaped_one(server: Server) -> None:
    async with httpx.AsyncClient(timeout=240) as client:
        seeded = body("9a-1b*3c+8d-5e*2f+7g-1>") | {"seed": 5}
        answer = await client.post(f"{server.url}/v1/completions", json=seeded, headers=GROUP)
        raw = await client.post(f"{server.url}/v1/completions", json=seeded | {"model": "tiny:raw"})
        assert answer.json()["choices"][0]["token_ids"] == raw.json()["choices"][0]["token_ids"]
        name = answer.headers["X-Darts-Group-Id"]
        [group] = (await client.get(f"{server.url}/darts/v1/groups/{name}")).json()["groups"]
        assert len(group["candidates"]) == 1


def embedded(value: float) -> dict[str, object]:
    """A prompt of embeddings, as vLLM's clients send them."""
    buffer = io.BytesIO()
    torch.save(torch.full((6, HIDDEN), value), buffer)
    return {"model": "tiny", "prompt_embeds": base64.b64encode(buffer.getvalue()).decode(), "max_tokens": 8}


async def test_requests_with_other_embeddings_are_other_prompts(serve: Serve, tmp_path: Path) -> None:
    pair = {"X-Darts-Group": "size=2"}
    with serve(DARTS, tmp_path / "log", "--enable-prompt-embeds", "--group-wait", "60") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
            posts = [
                client.post("/v1/completions", json=embedded(value), headers=pair) for value in (0.25, 0.5, 0.25, 0.5)
            ]
            answers = await asyncio.gather(*posts)
            assert {answer.status_code for answer in answers} == {200}, answers[0].text
            groups = [answer.headers["X-Darts-Group-Id"] for answer in answers]
            assert groups[:2] == groups[2:], "the same embeddings are the same prompt"
            assert groups[0] != groups[1]
