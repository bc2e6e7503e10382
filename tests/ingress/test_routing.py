"""Which replica requests go to."""

import asyncio
import json
import re
from collections import Counter
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from darts_server.ingress.routing.affinity import Affinity, PromptAffinity
from darts_server.ingress.routing.lengths import FIRST_EXPECTED, ExpectedLengths, generated_tokens
from darts_server.ingress.routing.terms import read_terms
from darts_server.rollout.turns.token_index import TokenIndex
from tests.ingress.servers import RunningIngress, ingress_over, until

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
CHAT = "/v1/chat/completions"


def one(prompt: object, **fields: object) -> dict[str, object]:
    return {"model": "m", "prompt": prompt, **fields}


async def servers_of(running: RunningIngress, *bodies: dict[str, object], **headers: str) -> list[str]:
    """Send requests one after the other; return the servers that answered."""
    return [(await running.post(PATH, body, **headers)).json()["server"] for body in bodies]


async def test_requests_in_no_group_take_turns_while_nothing_runs() -> None:
    async with ingress_over(3) as (running, _):
        found = await servers_of(running, *(one(f"prompt {number}", n=8) for number in range(6)))
        assert Counter(found) == {"a": 2, "b": 2, "c": 2}


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


async def test_callers_with_different_keys_do_not_have_to_meet() -> None:
    async with ingress_over(3) as (running, _):
        found = [(await servers_of(running, one("p"), Authorization=f"Bearer {key}"))[0] for key in range(3)]
        assert len(set(found)) == 3


async def test_a_later_turn_goes_to_the_replica_with_its_session() -> None:
    async with ingress_over(3) as (running, _):
        [first] = await servers_of(running, one("opening"), X_Darts_Session="s")
        await servers_of(running, *(one(f"other {i}", n=2) for i in range(4)))
        assert await servers_of(running, one("something else"), X_Darts_Session="s") == [first]


async def test_the_opening_prompt_of_a_session_meets_the_others_of_its_group() -> None:
    async with ingress_over(3) as (running, _):
        found = [(await servers_of(running, one("opening"), X_Darts_Session=f"s{i}"))[0] for i in range(6)]
        again = [(await servers_of(running, one("opening"), X_Darts_Session=f"s{i}"))[0] for i in range(6)]
        assert len({*found, *again}) == 1


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


def test_expected_lengths_are_bounded_and_follow_the_latest_answers() -> None:
    lengths = ExpectedLengths(kept=2)
    assert lengths.of("p") == FIRST_EXPECTED
    assert lengths.of("p", 7) == 7
    lengths.learn("p", 100)
    lengths.learn("p", 200)
    assert lengths.of("p") == pytest.approx(130)
    lengths.learn("q", 10)
    lengths.learn("r", 10)
    assert lengths.of("p") == lengths.of("new"), "only the latest are kept"


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"usage": {"completion_tokens": 12}}', 12),
        (b'{"usage":{"output_tokens":3}}', 3),
        (json.dumps({"text": '"completion_tokens": 9', "usage": {"completion_tokens": 1}}).encode(), 1),
        (json.dumps({"text": '"completion_tokens": 9'}).encode(), None),
        (b'{"choices":[{"token_ids":[1,2,3]},{"token_ids":[]},{"token_ids":[4]}]}', 4),
        (b"", None),
    ],
)
def test_generated_tokens_are_read_from_the_end_of_an_answer(body: bytes, tokens: int | None) -> None:
    assert generated_tokens(body) == tokens


def test_an_affinity_is_bounded_and_expires() -> None:
    now = 0.0
    table = Affinity(kept=2, idle=10, clock=lambda: now)
    table.put("a", "x")
    table.put("b", "y")
    table.put("c", "z")
    assert (table.find("a"), table.find("c"), len(table)) == (None, "z", 2)
    now = 5.0
    table.put("c", "z")
    now = 11.0
    assert (table.find("b"), table.find("c")) == (None, "z")


def test_the_longest_known_prefix_counts_and_short_ones_do_not() -> None:
    table, index = PromptAffinity(kept=2), TokenIndex(0)

    def prefixes(count: int) -> Any:
        return index.prefix_hashes(range(count))

    table.put_prompt("", prefixes(20), "x")
    table.put_prompt("", prefixes(30), "y")
    assert table.find_prefix("", prefixes(40)) == "y"
    assert table.find_prefix("", prefixes(25)) == "x"
    assert table.find_prefix("", prefixes(20)) is None, "the prompt itself is no prefix"
    assert table.find_prefix("other caller", prefixes(40)) is None
    table.put_prompt("", prefixes(5), "z")
    assert table.find_prefix("", prefixes(25)) is None, "the first was dropped, and the last is too short"


async def test_terms_of_a_request() -> None:
    body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 9, "vllm_xargs": {"darts_session": "s"}}
    terms = await read_terms({"authorization": "k"}, json.dumps(body).encode(), None)
    assert (terms.scope, terms.candidates, terms.max_tokens, terms.session) == ("k", 6, 9, "s")
    assert not terms.may_join
    large = await read_terms({}, b"x" * (9 << 20), None)
    assert (len(large.units), large.may_join) == (1, True)
