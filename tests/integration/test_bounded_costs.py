"""No request of an ordinary caller takes the server from the others: its cost is bounded before it is paid."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from darts_server.http.resources.monitor import MAX_VIEWERS
from darts_server.offline.demo.server import Server
from faults.stopwatch import Stopwatch
from tests.integration.waiting import wait_idle, wait_started

pytestmark = pytest.mark.engine
EASY = "7a-5b*4>"
JSON = {"Content-Type": "application/json"}
MAX_STALL_SECONDS, LARGEST_STALL_SECONDS = 4.0, 8.0
"""The second while the largest requests start that are allowed: they used to stop the event loop for twenty seconds.
With sixteen busy processes on two cores, requests of a second took three."""
MAX_GROWTH_MIB = 600
WRONG_IDS = b"[" + b",".join([b"1.5"] * 1_000_000) + b"]"
EXPLODING = "(.)(?:" + "(?:[!-z]?){999}" * 4 + "~)?"
"""RE2 takes two seconds to find all matches in 250 characters."""
PARENTHESES: Any = {"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}
"""xgrammar ends the process by a stack overflow."""
ARRAYS: Any = {"type": "string"}
"""xgrammar takes six seconds."""
for _ in range(450):
    ARRAYS = {"type": "array", "items": ARRAYS}
LONG: Any = {"type": "object", "properties": {f"a{i}": {"type": "string", "pattern": "^.{1,3000}$"} for i in range(2)}}
"""xgrammar takes ten seconds."""
MESSAGES = [{"role": "user", "content": EASY}]


@contextmanager
def served_meanwhile(server: Server, most: float = MAX_STALL_SECONDS) -> Iterator[None]:
    """Check that ``/health`` is answered fast while the block runs, but for what the machine is busy with otherwise."""
    delays: list[float] = []
    is_over = threading.Event()

    def poll() -> None:
        threads = {server.process.pid, threading.get_native_id()}
        with httpx.Client() as client:
            while not delays or not is_over.is_set():
                took = Stopwatch(threads)
                client.get(f"{server.url}/health", timeout=240).raise_for_status()
                delays.append(took.seconds())
                is_over.wait(0.02)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert max(delays) < most


def peak_memory(server: Server) -> float:
    """The most memory that the API process has had, in MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def post(server: Server, route: str, body: bytes) -> httpx.Response:
    return httpx.post(f"{server.url}/darts/v1/{route}", content=body, timeout=240)


def test_wrong_token_ids_are_refused_at_the_first(server: Server) -> None:
    before = peak_memory(server)
    with served_meanwhile(server):
        for route, body, param in (
            ("rollouts", b'{"prompts": [{"token_ids": %b}], "group_size": 1}', "prompts[0].token_ids[0]"),
            (
                "rewards",
                b'{"rewards": [{"prompt_token_ids": [], "completion_token_ids": %b, "reward": 1}]}',
                "rewards[0].completion_token_ids[0]",
            ),
            ("vote", b'{"prompt": %b, "n": 1, "pattern": "boxed"}', "prompt[0]"),
        ):
            answer = post(server, route, body % WRONG_IDS)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert peak_memory(server) - before < MAX_GROWTH_MIB


@pytest.mark.nightly
def test_kept_metadata_takes_little_more_than_its_json(server: Server) -> None:
    numbers = b",".join([b"1.5"] * 500_000)
    body = b'{"prompts": [{"text": "7a>", "metadata": {"a": [%b]}}], "group_size": 1, "sampling": {"max_tokens": 1}}'
    process = psutil.Process(server.process.pid)

    def send(key: str) -> None:
        headers = {"Idempotency-Key": f"large {key}"}
        answer = httpx.post(f"{server.url}/darts/v1/rollouts", content=body % numbers, headers=headers, timeout=240)
        assert len(answer.json()["groups"][0]["metadata"]["a"]) == 500_000

    send("first")  # of what it takes to parse and answer one, some stays with the process
    before = process.memory_info().rss
    for number in range(8):
        send(str(number))
    assert process.memory_info().rss - before < 3 * 8 * len(numbers)


@pytest.mark.nightly
def test_carried_messages_take_little_more_than_their_json(server: Server) -> None:
    numbers = b",".join([b"1.5"] * 500_000)
    large = b'{"messages": [{"role": "user", "content": "%d>", "x": [%b]}], "metadata": {"large": 1}}'
    body = b'{"prompts": [%b], "group_size": 2, "num_groups": 1, "carry": "restart", "sampling": {"max_tokens": 40}}'
    process = psutil.Process(server.process.pid)

    def send(number: int) -> int:
        prompts = [b'{"text": "7a>"}'] * 9 + [large % (number, numbers)]
        answer = post(server, "rollouts", body % b",".join(prompts))
        return sum(each["metadata"] is not None for each in answer.json()["unfinished"])

    send(0)  # of what it takes to parse one, some stays with the process
    before = process.memory_info().rss
    assert sum(send(number) for number in range(1, 13)) >= 6
    assert process.memory_info().rss - before < 4 * 12 * len(numbers)


@pytest.mark.nightly
def test_streams_of_the_monitor_that_nobody_reads_are_few_and_cost_little(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    stream = b"GET /darts/v1/live HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
    batch = {"prompts": [{"text": EASY}] * 100, "group_size": 4, "sampling": {"max_tokens": 60, "ignore_eos": True}}

    def statuses(streams: int) -> list[bytes]:
        opened = [sockets.enter_context(socket.create_connection((host, int(port)))) for _ in range(streams)]
        for each in opened:
            each.sendall(stream)
        return [each.recv(12)[-3:] for each in opened]

    with ExitStack() as sockets, served_meanwhile(server):
        assert sorted(statuses(200)) == [b"200"] * MAX_VIEWERS + [b"429"] * (200 - MAX_VIEWERS)
        assert post(server, "rollouts", json.dumps(batch).encode()).status_code == 200
    deadline = time.monotonic() + 60
    with ExitStack() as sockets:
        while statuses(1) != [b"200"]:  # when the server has seen that the others are closed
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.nightly
def test_a_pattern_that_takes_too_long_ends_its_vote_alone(server: Server) -> None:
    vote: dict[str, Any] = {"prompt": EASY, "n": 2, "sampling": {"max_tokens": 250, "ignore_eos": True}}
    with served_meanwhile(server):
        slow = post(server, "vote", json.dumps(vote | {"pattern": EXPLODING}).encode())
        error = slow.json()["error"]
        assert (slow.status_code, error["param"]) == (400, "pattern"), error
        assert "seconds of processor time" in error["message"]
        fast = post(server, "vote", json.dumps(vote | {"pattern": "(.)"}).encode())
        assert (fast.status_code, fast.json()["answer"] is not None) == (200, True), fast.text
    wait_idle(server)


def constrained(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    """Requests on all routes that take a schema."""
    sampling = {"structured_outputs": {"json": json.dumps(schema)}}
    named: Any = {"type": "json_schema", "name": "any", "schema": schema}
    chat = {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": named}}
    return [
        ("/v1/completions", {"prompt": EASY, "structured_outputs": {"json": schema}}),
        ("/v1/completions", {"prompt": EASY, "n": 4} | sampling),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"n": 4}),
        ("/v1/chat/completions/batch", chat | {"messages": [MESSAGES]}),
        ("/v1/responses", {"input": EASY, "text": {"format": named}}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": sampling}),
        ("/darts/v1/rollouts", {"prompts": [{"text": EASY}], "group_size": 4, "sampling": sampling}),
        ("/darts/v1/vote", {"prompt": EASY, "n": 4, "pattern": "(.)", "sampling": sampling}),
    ]


def send(server: Server, route: str, body: dict[str, Any]) -> httpx.Response:
    ours = route.startswith("/darts/")
    content = json.dumps(body if ours else body | {"model": "tiny"})
    return httpx.post(f"{server.url}{route}", content=content, headers=JSON, timeout=240)


@pytest.mark.parametrize("schema", [PARENTHESES, ARRAYS], ids=["parentheses", "arrays"])
def test_a_schema_that_is_too_deep_is_refused_before_vllm_checks_it(server: Server, schema: Any) -> None:
    with served_meanwhile(server):
        for route, body in constrained(schema):
            answer = send(server, route, body)
            assert answer.status_code == 400, (route, answer.text)
            assert "structured_outputs" in answer.json()["error"]["message"], (route, answer.text)
            assert "in each other; flatten it" in answer.json()["error"]["message"], (route, answer.text)


def test_others_are_served_while_a_schema_is_checked_for_long(server: Server) -> None:
    with served_meanwhile(server):
        for route, body in constrained(LONG):
            answer = send(server, route, body)
            assert answer.status_code == 429, (route, answer.text)
            assert "to check; simplify it" in answer.text or "still being checked" in answer.text, (route, answer.text)
            assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["a" * 1_000_000]),
        ("stop_token_ids", list(range(30_000))),
        ("bad_words", [f"b{i}" for i in range(15_000)]),
    ],
)
def test_what_the_engine_keeps_for_each_candidate_is_limited(server: Server, name: str, value: Any) -> None:
    before = server.metric("darts_candidates_started_total")
    sampling = {name: value}
    for route, body in (
        ("/v1/completions", {"prompt": EASY, "n": 4} | sampling),
        ("/v1/completions", {"prompt": EASY} | sampling),
        ("/v1/chat/completions", {"messages": MESSAGES} | sampling),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": sampling}),
        ("/darts/v1/rollouts", {"prompts": [{"text": EASY}], "group_size": 1000, "sampling": sampling}),
        ("/darts/v1/vote", {"prompt": EASY, "n": 4, "pattern": "(.)", "sampling": sampling}),
    ):
        answer = send(server, route, body)
        assert answer.status_code == 400, (route, answer.text)
        error = answer.json()["error"]
        assert error["param"].removeprefix("sampling.") == name
        assert "at most 65536 bytes together with all other sampling parameters" in error["message"]
    assert server.metric("darts_candidates_started_total") == before


@pytest.mark.nightly
def test_batches_that_are_kept_keep_no_more_of_their_sampling_parameters(server: Server) -> None:
    process = psutil.Process(server.process.pid)

    def keep(key: str, size: int) -> int:
        sampling = {"stop": ["b" * size], "max_tokens": 1}
        body = {"prompts": [{"text": EASY}], "group_size": 1, "sampling": sampling}
        headers = {"Idempotency-Key": f"sampling {key}"}
        return httpx.post(f"{server.url}/darts/v1/rollouts", json=body, headers=headers, timeout=240).status_code

    assert keep("usual", 60_000) == 200
    # Each thread of a new process needs buffers for its first large body.
    assert [keep(f"refused {number}", 20_000_000) for number in range(6)] == [400] * 6
    before = process.memory_info().rss
    assert [keep(str(number), 20_000_000) for number in range(4)] == [400] * 4
    assert [keep(f"largest {number}", 60_000) for number in range(16)] == [200] * 16
    assert process.memory_info().rss - before < 100 << 20


def test_no_caller_can_take_log_probs_from_others(server: Server) -> None:
    token_ids = {"logprob_token_ids": [1]}
    for route, body in (
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True} | token_ids),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "stream": True} | token_ids),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": token_ids}),
        ("/generative_scoring", {"query": EASY, "items": ["1"], "label_token_ids": [1, 2]}),
        ("/darts/v1/rollouts", {"prompts": [{"text": EASY}], "group_size": 4, "sampling": token_ids}),
        ("/darts/v1/vote", {"prompt": EASY, "n": 4, "pattern": "(.)", "sampling": token_ids}),
    ):
        answer = send(server, route, body)
        assert answer.status_code == 400, (route, answer.text)
        assert "logprob_token_ids: vLLM applies it to all requests" in answer.json()["error"]["message"], route


@pytest.mark.nightly
def test_a_group_of_the_largest_size_does_not_hold_up_others(server: Server) -> None:
    body = {"prompt": "11+1=", "n": 1024, "max_tokens": 1}
    with served_meanwhile(server, LARGEST_STALL_SECONDS):
        answer = send(server, "/v1/completions", body)
    assert len(answer.raise_for_status().json()["choices"]) == 1024


def test_a_large_batch_starts_and_is_cancelled_without_holding_up_others(server: Server) -> None:
    body = {"prompts": [{"text": "11+1="}] * 600, "group_size": 64, "sampling": {"max_tokens": 300}}
    started = server.metric("darts_candidates_started_total")
    with served_meanwhile(server, LARGEST_STALL_SECONDS):
        with closing(HTTPConnection(server.url.removeprefix("http://"))) as caller:
            caller.request("POST", "/darts/v1/rollouts", json.dumps(body), JSON)
            wait_started(server, started + 1)
            time.sleep(2)  # many more start, and run
            assert server.count_requests()
        wait_idle(server)
