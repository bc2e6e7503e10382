"""Invalid requests get a 400 in OpenAI's error format that names the field, and start no candidate."""

from typing import Any

import httpx
import pytest

from darts_server.demo.server import Server
from tests.integration.waiting import wait_idle

pytestmark = pytest.mark.engine
GOOD: dict[str, Any] = {"model": "tiny", "prompt": "7a-5b*4>", "n": 8, "max_tokens": 50}


@pytest.fixture(scope="module", autouse=True)
def idle(server: Server) -> None:
    """Wait for what the tests before these have left on the engine."""
    wait_idle(server)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        ({"n": 0}, {}, "n must be at least 1"),
        ({"n": -3}, {}, "n must be at least 1"),
        ({"n": "many"}, {}, "body.n"),
        ({"n": 5000}, {}, "at most 1024, got 5000"),
        ({}, {"X-Darts-Policy": "sideways"}, "'sideways' is unknown; choose one of off, uniform"),
        ({}, {"X-Darts-Policy": ""}, "x-darts-policy: must be the name of a policy"),
        ({}, {"X-Darts-Polcy": "off"}, "x-darts-polcy: unknown header"),
        ({"vllm_xargs": {"darts_polcy": "off"}}, {}, "vllm_xargs.darts_polcy"),
        ({"vllm_xargs": {"darts_policy": 3}}, {}, "must be the name of a policy"),
        ({"vllm_xargs": {"darts_policy": "off"}}, {"X-Darts-Policy": "uniform"}, "contradicts"),
        ({"prompt": ""}, {}, "prompt"),
        ({"prompt": []}, {}, "prompt"),
        ({"prompt": [[]]}, {}, "prompt"),
        ({"prompt": ["7a-5b*4>", ""]}, {}, "prompt"),
        ({"prompt": "7" * 400}, {}, "maximum context length is 320"),
        ({"prompt": ["7a-5b*4>", "7" * 400]}, {}, "maximum context length is 320"),
        ({"prompt": [[1, 2, 99999]]}, {}, "99999"),
        ({"temperature": -1}, {}, "temperature"),
        ({"top_p": 7}, {}, "top_p"),
        ({"max_tokens": 0, "n": 8}, {}, "max_tokens"),
    ],
)
def test_invalid_input_gets_an_error_with_field_and_remedy_and_starts_nothing(
    server: Server, body: dict[str, Any], headers: dict[str, str], words: str, stream: bool
) -> None:
    before = server.metric("darts_candidates_started_total")
    answer = httpx.post(f"{server.url}/v1/completions", json=GOOD | body | {"stream": stream}, headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == 400
    assert words in error["message"] or words in str(error["param"]), error
    assert server.metric("darts_candidates_started_total") == before
    assert server.busy() == 0


def test_our_own_errors_name_the_field_in_param(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=GOOD | {"n": 5000})
    assert answer.json()["error"]["param"] == "n"


def test_the_chat_route_rejects_the_same(server: Server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "7a>"}], "n": 5000}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert server.busy() == 0


def test_an_unknown_model_is_not_found(server: Server) -> None:
    assert httpx.post(f"{server.url}/v1/completions", json=GOOD | {"model": "tiny:rw"}).status_code == 404
