"""No request of an ordinary caller takes the server from the others: its cost is bounded before it is paid."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from darts_server.demo.server import Server
from faults.stopwatch import Stopwatch
from tests.integration.waiting import wait_idle

pytestmark = pytest.mark.engine
EASY = "7a-5b*4>"
JSON = {"Content-Type": "application/json"}
MAX_STALL_SECONDS = 2.0
MAX_GROWTH_MIB = 600
WRONG_IDS = b"[" + b",".join([b"1.5"] * 1_000_000) + b"]"
UNKNOWN_FIELDS = b",".join(b'"k%d":1' % i for i in range(700_000))
EXPLODING = "(.)(?:(?:.?){999}(?:.?){999}(?:.?){999}(?:.?){999}~)?"
"""RE2 takes two seconds to find all matches in 250 characters."""


@contextmanager
def served_meanwhile(server: Server) -> Iterator[None]:
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
    assert max(delays) < MAX_STALL_SECONDS


def peak_memory(server: Server) -> float:
    """The most memory that the API process has had, in MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def post(server: Server, route: str, body: bytes) -> httpx.Response:
    return httpx.post(f"{server.url}/darts/v1/{route}", content=body, timeout=240)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("rollouts", b'{"prompts": [{"token_ids": %b}], "group_size": 1}' % WRONG_IDS, "prompts[0].token_ids[0]"),
        (
            "rewards",
            b'{"rewards": [{"prompt_token_ids": [], "completion_token_ids": %b, "reward": 1}]}' % WRONG_IDS,
            "rewards[0].completion_token_ids[0]",
        ),
        ("vote", b'{"prompt": %b, "n": 1, "pattern": "boxed"}' % WRONG_IDS, "prompt[0]"),
    ],
)
def test_wrong_token_ids_are_refused_at_the_first(server: Server, route: str, body: bytes, param: str) -> None:
    before = peak_memory(server)
    with served_meanwhile(server):
        answer = post(server, route, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert peak_memory(server) - before < MAX_GROWTH_MIB


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", b'{"model": "tiny", "prompt": [1, %b}' % WRONG_IDS[1:]),
        ("completions", b'{"model": "tiny", "prompt": "7a>", "stop_token_ids": %b}' % WRONG_IDS),
        ("chat/completions", b'{"model": "tiny", "messages": [%b1]}' % (b"1," * 200_000)),
    ],
)
def test_vllms_routes_refuse_wrong_items_at_the_first(server: Server, route: str, body: bytes) -> None:
    before = peak_memory(server)
    with served_meanwhile(server):
        answer = httpx.post(f"{server.url}/v1/{route}", content=body, headers=JSON, timeout=240)
    assert answer.status_code == 400, answer.text
    assert peak_memory(server) - before < MAX_GROWTH_MIB


def test_a_body_of_many_small_parts_is_too_large(server: Server) -> None:
    with served_meanwhile(server):
        answer = post(server, "rollouts", b'{"prompts": [{"text": "a", %b}], "group_size": 1}' % UNKNOWN_FIELDS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "body")


def test_integers_of_thousands_of_digits_are_refused_before_they_are_converted(server: Server) -> None:
    numbers = b",".join([b"7" * 4300] * 10_000)
    body = b'{"prompts": [{"text": "a", "metadata": {"a": [%b]}}], "group_size": 1}' % numbers
    with served_meanwhile(server):
        answer = post(server, "rollouts", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")
    assert "more than 500 digits; send it as a string" in answer.json()["error"]["message"]


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
