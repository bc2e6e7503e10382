"""Batches and votes render chats as vLLM's own chat route does, with the same fields, on real vLLM."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine
TEMPLATE = """\
{%- if level == 'bad' %}{{ raise_exception('level must be a number') }}{% endif -%}
{%- if tools %}@{% for tool in tools %}{{ tool | tojson }}{% endfor %}@{% endif -%}
{%- for message in messages -%}
#{{ message.role[:2] }}>{{ message.reasoning or '' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}#a>{% if enable_thinking is defined and not enable_thinking %}00{% endif %}{% endif -%}
{{ level or '' }}{{ extra or '' }}
"""
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
BIG: dict[str, Any] = {
    "type": "function",
    "function": {"name": "b", "description": "be", "parameters": {"type": "object", "properties": {"a": {}}}},
}
KWARGS = "chat_template_kwargs"
SHARED: list[dict[str, Any]] = [
    {},
    {"tools": [ADD]},
    {KWARGS: {"enable_thinking": False, "extra": 12345678901234567890123}},
    {"tools": [ADD], KWARGS: {"enable_thinking": False}, "add_generation_prompt": False},
]
OWN: list[dict[str, Any]] = [
    {},
    {"tools": [BIG]},
    {KWARGS: {"enable_thinking": True, "level": "3"}},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"tools": [BIG], KWARGS: {"extra": None, "level": "5", "unused": {"a": [1]}}, "add_generation_prompt": True},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "7a-5b"}],
    [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "7a"}, {"type": "text", "text": "-5b"}]},
        {"role": "assistant", "reasoning_content": "ag", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
]


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("chats")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template", str(template), "--default-chat-template-kwargs", '{"level": "9"}')
    with serve(DARTS, folder / "log", *flags) as running:
        yield running


def post(server: Server, path: str, body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=240)


def batch(server: Server, prompts: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    body = {"prompts": prompts, "group_size": 1, "sampling": {"max_tokens": 1}, "policy": {"name": "off"}} | more
    answer = post(server, "/darts/v1/rollouts", body)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


def vllms_tokens(server: Server, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
    """Return the tokens that vLLM's chat route makes of the same fields."""
    body = {"model": "tiny:raw", "messages": messages, "max_tokens": 1, "return_token_ids": True} | options
    if "tools" in options:
        body["tool_choice"] = "none"  # they are in the prompt all the same
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["prompt_token_ids"]
    return tokens


@pytest.mark.parametrize("shared", SHARED)
def test_a_chat_has_the_tokens_that_vllms_route_gives_it(server: Server, shared: dict[str, Any]) -> None:
    """By their key, which is the same for the same tokens. A prompt's options come before those of its batch."""
    cases = list(product(CHATS, OWN))
    chats = [{"messages": messages, **own} for messages, own in cases]
    expected = []
    for messages, own in cases:
        merged = shared | own
        if KWARGS in shared and KWARGS in own:
            merged[KWARGS] = shared[KWARGS] | own[KWARGS]
        expected.append({"token_ids": vllms_tokens(server, messages, merged)})
    assert len({str(prompt) for prompt in expected}) > len(expected) / 2, "the options change the tokens"
    keys = [group["prompt_key"] for group in batch(server, chats, **shared)["groups"]]
    assert keys == [group["prompt_key"] for group in batch(server, expected)["groups"]]
    vote = {"messages": CHATS[1], "n": 1, "pattern": "(7)", "sampling": {"max_tokens": 1}} | shared
    answer = post(server, "/darts/v1/vote", vote)
    assert answer.status_code == 200, answer.text
    [record] = httpx.get(f"{server.url}/darts/v1/groups/{answer.json()['id']}").json()["groups"]
    assert record["prompt_key"] == keys[len(OWN)]


def test_a_prompt_that_is_carried_over_keeps_its_options(server: Server) -> None:
    chats = [{"messages": CHATS[0], KWARGS: {"level": level}} for level in "45"]
    known = [group["prompt_key"] for group in batch(server, chats, tools=[ADD])["groups"]]
    first = batch(server, chats, tools=[ADD], num_groups=1, carry="restart")
    [left] = first["unfinished"]
    assert left["prompt_key"] == known[left["number"]]
    [later] = batch(server, [], carried=True)["groups"]
    assert later["prompt_key"] == left["prompt_key"]


CHAT: dict[str, Any] = {"messages": CHATS[0]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompts": [CHAT | {KWARGS: {"level": "bad"}}]}, f"prompts[0].{KWARGS}"),
        ({"prompts": [CHAT], KWARGS: {"level": "bad"}}, f"prompts[0].{KWARGS}"),
        ({"prompts": [CHAT | {KWARGS: {"chat_template": "7"}}]}, f"prompts[0].{KWARGS}"),
        ({"prompts": [CHAT | {KWARGS: 3}]}, f"prompts[0].{KWARGS}"),
        ({"prompts": [CHAT | {"tools": [ADD, {"type": "function"}]}]}, "prompts[0].tools[1].function"),
        ({"prompts": [CHAT | {"tools": []}]}, "prompts[0].tools"),
        ({"prompts": [CHAT | {"tools": [ADD | {"more": "a" * 2**18}]}]}, "prompts[0].tools"),
        ({"prompts": [CHAT], "tools": [ADD | {"more": "a" * 2**18}]}, "tools"),
        ({"prompts": [CHAT, CHAT | {"continue_final_message": True}]}, "prompts[1].continue_final_message"),
        ({"prompts": [CHAT], "continue_final_message": "yes"}, "continue_final_message"),
        ({"prompts": [CHAT | {"chat_template": "7"}]}, "prompts[0].chat_template"),
        ({"prompts": [{"text": "7", "tools": [ADD]}]}, "prompts[0]"),
        ({"prompts": [{"text": "7"}], "tools": [ADD]}, "tools"),
        ({"prompts": [{"messages": [{"role": "user", "content": "7" * 400}], "tools": [ADD]}]}, "prompts[0].messages"),
    ],
)
def test_an_option_that_cannot_be_used_is_named_and_starts_nothing(
    server: Server, change: dict[str, Any], param: str
) -> None:
    started = server.metric("darts_candidates_started_total")
    answer = post(server, "/darts/v1/rollouts", {"group_size": 2} | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert server.metric("darts_candidates_started_total") == started


def test_what_all_chats_of_a_batch_are_rendered_with_is_limited(server: Server) -> None:
    tool = ADD | {"more": "a" * 200_000}
    answer = post(server, "/darts/v1/rollouts", {"prompts": [CHAT] * 400, "group_size": 2, "tools": [tool]})
    assert answer.status_code == 413, answer.text
    assert answer.json()["error"]["param"] == "tools"
