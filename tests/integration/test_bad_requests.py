"""Invalid requests get a 400 in OpenAI's error format that names the field, and start no candidate."""

from typing import Any

import httpx
import pytest

from darts_server.demo.server import Server
from tests.integration.waiting import wait_idle

pytestmark = pytest.mark.engine
GOOD: dict[str, Any] = {"model": "tiny", "prompt": "7a-5b*4>", "n": 8, "max_tokens": 50}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "7a>"}]}


@pytest.fixture(scope="module", autouse=True)
def idle(server: Server) -> None:
    """Wait for what the tests before these have left on the engine."""
    wait_idle(server)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("completions", GOOD | {"n": 0}, "n must be at least 1"),
        ("completions", GOOD | {"n": 5000}, "at most 1024, got 5000"),
        ("chat/completions", CHAT | {"n": 5000}, "at most 1024, got 5000"),
        ("completions", GOOD | {"prompt": ["7a-5b*4>", ""]}, "prompt"),
        ("completions", GOOD | {"prompt": ["7a-5b*4>", "7" * 400]}, "maximum context length is 320"),
        ("completions", GOOD | {"temperature": -1}, "temperature"),
    ],
)
def test_invalid_input_gets_an_error_with_field_and_remedy_and_starts_nothing(
    server: Server, route: str, body: dict[str, Any], words: str, stream: bool
) -> None:
    before = server.metric("darts_candidates_started_total")
    answer = httpx.post(f"{server.url}/v1/{route}", json=body | {"stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == 400
    assert words in f"{error['param']}: {error['message']}"
    assert server.metric("darts_candidates_started_total") == before
    assert server.busy() == 0
