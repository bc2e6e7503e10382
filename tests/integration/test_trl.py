"""TRL's own client, unmodified."""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from darts_server.offline.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
PROMPTS = ["7a-5b*4>", "1a+5b*4c-3>", "3a*7b+2c-5d*9>"]
# TRL looks for a distribution named "vllm"; the CPU build has another name. The shim has nothing but metadata.
SHIM = Path(__file__).parent / "shim"


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    try:
        version("vllm")
    except PackageNotFoundError:
        sys.path.insert(0, str(SHIM))
    from darts_client.integrations._trl_names import VLLMClient

    yield VLLMClient(base_url=server.url)
    if str(SHIM) in sys.path:
        sys.path.remove(str(SHIM))


def test_each_prompt_and_each_conversation_gets_exactly_n_in_order(client: Any, server: Server) -> None:
    before = server.metric("darts_groups_total", outcome="completed")
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for answer in (client.generate(PROMPTS, n=8, max_tokens=200), client.chat(chats, n=8, max_tokens=200)):
        assert [len(ids) for ids in answer["prompt_ids"]] == [len(p) for p in PROMPTS]
        assert len(answer["completion_ids"]) == 24
        assert [len(each) for each in answer["logprobs"]] == [len(ids) for ids in answer["completion_ids"]]
    assert server.metric("darts_groups_total", outcome="completed") == before + 6
