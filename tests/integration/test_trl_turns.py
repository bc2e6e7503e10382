"""The loop of TRL's asynchronous trainer, unmodified: it renders and tokenizes the whole chat again for each turn."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest

from darts_server.offline.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.filterwarnings("default")]
SIZE, TOOL_CALLS = 8, 2
TEXTS = ["7a-5b*4>", "1a+5b*4c-3>", "3a*7b+2c-5d*9>"]
JOIN = "{% for m in messages %}{{ m['content'] if m['role'] != 'assistant' else ANSWER }}{% endfor %}"
ANSWERS = {
    "keeps the answer": "m['content'] ~ '<eos>'",
    "drops the end of turn": "m['content']",
    "drops the reasoning": "m['content'].split('</think>')[-1]",
    "changes white space": "' ' ~ m['content'].strip() ~ ' <eos>'",
}


@pytest.fixture(scope="module")
def grouping(server: Server) -> Iterator[Server]:
    """The server as with ``--group-size 8``: TRL's requests name no group."""
    for size in (SIZE, None):
        httpx.patch(f"{server.url}/darts/v1/policy", json={"group_size": size}).raise_for_status()
        if size is not None:
            yield server


@pytest.fixture(scope="module")
def program() -> Any:
    """The program of TRL; importing it warns that it is experimental."""
    from accelerate import PartialState

    from tests.trainers.programs import trl

    PartialState()
    return trl


def count(server: Server) -> dict[str, float]:
    """Count the groups, and the requests by what they were taken for. Only opening ones wait for others."""
    kinds = {kind: server.metric("darts_single_requests_total", turn=kind) for kind in ("opening", "tokens", "prompt")}
    later = kinds["tokens"] + kinds["prompt"]
    return {"groups": server.metric("darts_groups_total"), "opening": kinds["opening"], "later": later}


def parse_answer(tokenizer: Any, call: Any, token_ids: list[int]) -> dict[str, Any]:
    """Read a call of the tool in every answer, after some reasoning: the tiny policy makes neither."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return {"role": "assistant", "content": f"<think>{text}</think>{text[-3:]}", "tool_calls": [call]}


NIGHTLY = ("changes white space", "drops the end of turn")


@pytest.mark.parametrize(
    "change", [pytest.param(each, marks=pytest.mark.nightly) if each in NIGHTLY else each for each in ANSWERS]
)
async def test_turns_that_trl_renders_again_run_alone_and_at_once(grouping: Server, program: Any, change: str) -> None:
    texts = [f"@{list(ANSWERS).index(change)}{text}" for text in TEXTS]
    loop = program.make_loop(grouping.url, texts, SIZE, TOOL_CALLS)
    loop.chat_template = JOIN.replace("ANSWER", ANSWERS[change])
    if "reasoning" in change:
        loop.tokenizer.parse_response = lambda ids, **_: parse_answer(loop.tokenizer, program.CALL, ids)
    before = count(grouping)
    stop = asyncio.Event()
    async with aiohttp.ClientSession() as loop.session:
        generating = asyncio.create_task(loop._generate_loop(stop))
        while not loop._inflight:
            await asyncio.sleep(0)
        stop.set()  # after one group of each prompt
        await generating
    loop._tool_pool.shutdown()
    loop._loop.close()
    done = [loop._groups_to_score.get_nowait() for _ in texts]
    assert all(group.tool_call_counts == [TOOL_CALLS] * SIZE for group in done)
    after = {name: value - before[name] for name, value in count(grouping).items()}
    trajectories = SIZE * len(texts)
    assert (after["groups"], after["opening"], after["later"]) == (len(texts), trajectories, TOOL_CALLS * trajectories)
