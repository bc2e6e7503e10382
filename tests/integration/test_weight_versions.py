"""The weight versions of tokens that vLLM returns by itself, since 0.32, on its token route."""

import asyncio
from collections.abc import Iterator
from dataclasses import fields

import httpx
import pytest
from vllm.outputs import CompletionOutput

from darts_server.demo.server import DARTS, Server
from tests.integration import waiting
from tests.integration.fork_server import Serve
from tests.integration.weights import ORIGINAL, perturbed, put

IS_THERE = "weight_versions" in {field.name for field in fields(CompletionOutput)}
pytestmark = [
    pytest.mark.engine,
    pytest.mark.anyio,
    pytest.mark.skipif(not IS_THERE, reason="this version of vLLM returns none"),
]
GENERATED = "vllm:generation_tokens_total"
GROUPS = 4


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(DARTS, tmp_path_factory.mktemp("versions") / "log", "--enable-scale-out") as running:
        yield running


async def test_every_choice_of_a_group_has_the_versions_of_its_own_tokens(server: Server) -> None:
    assert put(server, ORIGINAL, version=7).status_code == 200
    sampling = {"n": 4, "max_tokens": 250, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
    generated = server.metric(GENERATED)
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        groups = [asyncio.create_task(client.post("/inference/v1/generate", json=body)) for _ in range(GROUPS)]
        await asyncio.to_thread(waiting.wait_counted, server, GENERATED, generated + 10)
        updated = await asyncio.to_thread(put, server, perturbed(1), rule="keep")
        assert updated.json()["version"] == 8
        answers = [(await group).json() for group in groups]
    for choice in (choice for answer in answers for choice in answer["choices"]):
        first, second = choice["weight_versions"]
        assert (first["version"], first["start"]) == ("7", 0)
        assert (second["version"], second["start"], second["end"]) == ("8", first["end"], 250)
