"""Which replica requests go to."""

import asyncio
import re
from collections import Counter
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.ingress.servers import RunningIngress, ingress_over, until

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


def one(prompt: object, **fields: object) -> dict[str, object]:
    return {"model": "m", "prompt": prompt, **fields}


async def servers_of(running: RunningIngress, *bodies: dict[str, object], **headers: str) -> list[str]:
    """Send requests one after the other; return the servers that answered."""
    return [(await running.post(PATH, body, **headers)).json()["server"] for body in bodies]


async def test_single_requests_with_one_prompt_meet_and_others_are_spread() -> None:
    async with ingress_over(3) as (running, _):
        prompts = [f"What is {number}?" for number in range(9)]
        found = await servers_of(running, *(one(prompt, seed=turn) for turn in range(4) for prompt in prompts))
        assert [found[at : at + 9] for at in range(0, 36, 9)] == [found[:9]] * 4
        assert Counter(found[:9]) == {"a": 3, "b": 3, "c": 3}


async def test_named_groups_meet_whatever_their_prompts() -> None:
    async with ingress_over(3) as (running, _):
        for headers, xargs in (({"X_Darts_Group": "id=g;size=4"}, {}), ({}, {"darts_group_id": "h"})):
            bodies = [one(f"{headers}{number}", vllm_xargs=xargs) for number in range(6)]
            assert len(set(await servers_of(running, *bodies, **headers))) == 1


async def test_sessions_that_match_the_pattern_name_their_group() -> None:
    async with ingress_over(3, group_pattern=re.compile("(.+)_[0-9]+")) as (running, _):
        found = [(await servers_of(running, one(f"p{i}"), X_Session_ID=f"task_{i}"))[0] for i in range(6)]
        assert len(set(found)) == 1


async def test_requests_that_a_server_puts_into_no_group_are_spread() -> None:
    async with ingress_over(3) as (running, _):
        for extra in (
            {"temperature": 0},
            {"model": "m:raw"},
            {"max_tokens": 1},
            {"vllm_xargs": {"darts_policy": "off"}},
        ):
            found = await servers_of(running, *({**one("the same prompt"), **extra} for _ in range(6)))
            assert len(set(found)) == 3, extra


async def test_a_later_turn_goes_to_the_replica_with_its_session() -> None:
    async with ingress_over(3) as (running, _):
        [first] = await servers_of(running, one("opening"), X_Darts_Session="s")
        await servers_of(running, *(one(f"other {i}", n=2) for i in range(4)))
        assert await servers_of(running, one("something else"), X_Darts_Session="s") == [first]


@pytest.mark.parametrize(
    ("opening", "later"),
    [
        (one("a prompt of more than sixteen bytes"), one("a prompt of more than sixteen bytes and its answer")),
        (one(list(range(40))), one(list(range(60)))),
        (
            {"messages": [{"role": "user", "content": "hi"}]},
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "yes"},
                    {"role": "user"},
                ]
            },
        ),
        ({"token_ids": list(range(40)), "sampling_params": {}}, {"token_ids": list(range(99)), "sampling_params": {}}),
    ],
)
async def test_a_later_turn_goes_to_the_replica_with_its_prefix(opening: Any, later: Any) -> None:
    async with ingress_over(3) as (running, _):
        [first] = await servers_of(running, {**opening, "temperature": 0})
        await servers_of(running, *(one(f"other {i}", n=2) for i in range(4)))
        assert await servers_of(running, later) == [first]


async def test_a_prompt_with_a_key_stays_where_its_statistics_are() -> None:
    async with ingress_over(3) as (running, _):
        found = await servers_of(running, *(one("p", n=8) for _ in range(5)), X_Darts_Prompt_Key="gsm8k/7")
        assert len(set(found)) == 1


async def test_work_goes_where_the_fewest_tokens_are_expected() -> None:
    async with ingress_over(2) as (running, servers):
        go_on = asyncio.Event()

        async def wait(_: Request) -> Response:
            await go_on.wait()
            return JSONResponse({})

        for server in servers:
            server.on("POST", PATH, wait)
        large = asyncio.create_task(running.post(PATH, one("large", n=16, max_tokens=100)))
        await until(lambda: servers[0].running + servers[1].running == 1)
        busy, idle = sorted(servers, key=lambda server: -server.running)
        small = [asyncio.create_task(running.post(PATH, one(f"p{i}", n=4, max_tokens=100))) for i in range(3)]
        await until(lambda: servers[0].running + servers[1].running == 4)
        assert (busy.running, idle.running) == (1, 3)
        assert sorted(member.load for member in running.fleet.members) == [1200, 1600]
        go_on.set()
        await asyncio.gather(large, *small)
        assert [member.load for member in running.fleet.members] == [0, 0]


async def test_lengths_are_learned_from_answers() -> None:
    async with ingress_over(1) as (running, [server]):
        server.answer("POST", PATH, {"choices": [], "usage": {"completion_tokens": 80}})
        await running.post(PATH, one("p", n=8))
        go_on = asyncio.Event()

        async def wait(_: Request) -> Response:
            await go_on.wait()
            return JSONResponse({})

        server.on("POST", PATH, wait)
        call = asyncio.create_task(running.post(PATH, one("p", n=4)))
        await until(lambda: server.running == 1)
        assert running.fleet.members[0].load == 40
        go_on.set()
        await call
