"""What a request costs before it is checked is limited on every route, whoever sends it."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from darts_server.http.body import MAX_PARTS_AT_ONCE
from darts_server.offline.demo.server import Server
from darts_server.vllm.requests.text_limits import MAX_TOKENIZED
from tests.integration.test_bounded_costs import EASY, peak_memory, send, served_meanwhile

pytestmark = pytest.mark.engine
MOST_GROWTH_MIB = 100
"""Of a process that has served requests before. Each request below has 3 MB or more, which used to take 600 MiB."""
TEXT = EASY * 375_000
CHAT = [{"role": "user", "content": TEXT}]
SHORT = [{"role": "user", "content": EASY}]
TRUNCATED = {"truncate_prompt_tokens": 8, "max_tokens": 1}


def connect(server: Server) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 60_000_000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\na: " + b"x" * 60_000_000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 1_000_000,
    ],
    ids=["url", "header", "headers"],
)
def test_a_large_head_costs_next_to_nothing(server: Server, head: bytes) -> None:
    before = peak_memory(server)
    with served_meanwhile(server, 2.0), closing(connect(server)) as caller:
        with suppress(ConnectionError):  # the server closes the connection
            caller.sendall(head)
        with suppress(ConnectionResetError):
            assert caller.recv(12) == b"HTTP/1.1 431"
    assert peak_memory(server) - before < MOST_GROWTH_MIB


@pytest.mark.parametrize("path", [b"/metrics", b"/metrics/", b"/openapi.json"])
def test_many_requests_for_public_pages_leave_time_for_others(server: Server, path: bytes) -> None:
    count = 20

    def flood(_: int) -> int:
        with closing(connect(server)) as caller:
            caller.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path * count)
            answers = 0
            while answers < count and (part := caller.recv(1 << 20)):
                answers += part.count(b"HTTP/1.1 200 OK")
            return answers

    with served_meanwhile(server), ThreadPoolExecutor(30) as callers:
        assert sum(callers.map(flood, range(30))) == 30 * count


def test_a_counter_is_exact_right_after_a_request(server: Server) -> None:
    for _ in range(5):
        before = server.metric("darts_candidates_started_total")
        assert send(server, "/v1/completions", {"prompt": EASY, "n": 2, "max_tokens": 1}).status_code == 200
        assert server.metric("darts_candidates_started_total") > before


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/darts/v1/rollouts", {"prompts": [{"text": TEXT}], "group_size": 1}),
        ("/darts/v1/rollouts", {"prompts": [{"messages": CHAT}], "group_size": 1}),
        ("/darts/v1/vote", {"messages": CHAT, "n": 2, "pattern": "boxed"}),
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": [EASY, TEXT]}),
        ("/v1/completions", {"prompt": TEXT} | TRUNCATED),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT} | TRUNCATED),
        ("/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}),
        ("/v1/chat/completions/batch", {"messages": [SHORT, CHAT]}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/responses", {"input": TEXT, "truncation": "auto"}),
        ("/v1/responses", {"input": EASY, "instructions": TEXT}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 1}),
        ("/v1/messages", {"messages": SHORT, "system": TEXT, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": CHAT}),
        ("/v1/completions/render", {"prompt": TEXT}),
        ("/v1/chat/completions/render", {"messages": CHAT}),
        ("/generative_scoring", {"query": TEXT, "items": ["1"], "label_token_ids": [1, 2]}),
        ("/tokenize", {"prompt": TEXT}),
        ("/tokenize", {"messages": CHAT}),
        ("/detokenize", {"tokens": [5] * (MAX_TOKENIZED + 1)}),
    ],
)
def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized(
    server: Server, route: str, body: dict[str, Any]
) -> None:
    before = peak_memory(server)
    with served_meanwhile(server):
        answer = send(server, route, body)
    assert answer.status_code == 400, answer.text
    named = "characters"
    if route == "/detokenize":
        named = "token ids"
    elif route.startswith("/darts/"):
        named = "the model's length is 320"
    assert named in answer.text
    assert peak_memory(server) - before < MOST_GROWTH_MIB


def test_a_prompt_of_any_length_is_truncated_on_a_named_side(server: Server) -> None:
    for side, text in (("left", "5" * 3_000_000 + EASY), ("right", EASY + "5" * 3_000_000)):
        named = {"truncate_prompt_tokens": len(EASY), "truncation_side": side, "max_tokens": 1}
        answer = send(server, "/v1/completions", {"prompt": text, "return_token_ids": True} | named)
        expected = send(server, "/tokenize", {"prompt": EASY}).json()["tokens"]
        assert answer.json()["choices"][0]["prompt_token_ids"] == expected


def test_a_chat_of_ours_has_the_tokens_of_vllms_route(server: Server) -> None:
    chat = send(server, "/v1/chat/completions", {"messages": SHORT, "n": 2, "max_tokens": 1})
    batch = {"prompts": [{"messages": SHORT}], "group_size": 2, "sampling": {"max_tokens": 1}}
    rollouts = send(server, "/darts/v1/rollouts", batch)
    keys = [
        httpx.get(f"{server.url}/darts/v1/groups/{answer.json()['id']}").json()["groups"][0]["prompt_key"]
        for answer in (chat, rollouts)
    ]
    assert keys[0] == keys[1]


def test_the_structure_of_a_body_is_limited_on_all_routes(server: Server) -> None:
    messages = [{"role": "user", "content": "a"}] * 100_000
    before = peak_memory(server)
    with served_meanwhile(server):
        for route, body in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 1}),
            ("/v1/messages/count_tokens", {"messages": messages}),
            ("/tokenize", {"messages": messages}),
            ("/v1/completions", {"prompt": ["a"] * (MAX_PARTS_AT_ONCE + 1)}),
            ("/v1/completions", {"prompt": [5] * 15_000_000}),
            ("/invocations", {"messages": messages}),
            ("/inference/v1/generate", {"token_ids": [5] * 15_000_000, "sampling_params": {}}),
        ):
            answer = send(server, route, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (413, "body"), route
    assert peak_memory(server) - before < 4 * MOST_GROWTH_MIB


def test_the_batch_of_a_trainer_is_served(server: Server) -> None:
    prompts = [[5 + number % 20] * 64 for number in range(512)]
    with served_meanwhile(server):
        answer = send(server, "/v1/completions", {"prompt": prompts, "max_tokens": 1})
        choices = answer.raise_for_status().json()["choices"]
        assert len(choices) == 512
        # 4 million ids: only the model of this test is too short for them.
        longest = json.dumps({"model": "tiny", "prompt": [[5] * 8_192] * 512}).encode()
        headers = {"Content-Type": "application/json"}
        refused = httpx.post(f"{server.url}/v1/completions", content=longest, headers=headers, timeout=240)
    assert refused.status_code == 400
    assert "contains 8192 input tokens" in refused.text
