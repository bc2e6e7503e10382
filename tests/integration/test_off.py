"""With shaping off the server answers as vLLM does."""

import re
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import Server

pytestmark = pytest.mark.engine
PROMPTS = ["3a*7b+2c-5d*9>", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("7a-5b*4>", "1a+5b*4c-3>"))]


def choices(server: Server, model: str, **body: Any) -> list[dict[str, Any]]:
    body = {"model": model, "max_tokens": 256, "logprobs": 2, "return_token_ids": True} | body
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3, 4))])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_and_log_probs_equal_plain_vllm_request_by_request(
    server: Server, plain: Server, prompt: str, seed: int
) -> None:
    ours = choices(server, "tiny:raw", prompt=prompt, n=8, seed=seed)
    theirs = choices(plain, "tiny", prompt=prompt, n=8, seed=seed)
    for mine, other in zip(ours, theirs, strict=True):
        assert all(mine[name] == other[name] for name in ("token_ids", "text", "finish_reason"))
        assert mine["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-5)


CHAT = {"messages": [{"role": "user", "content": "7a-5b*4>"}], "max_tokens": 60, "logprobs": True}
SAMPLED = {"max_tokens": 60, "n": 2, "seed": 5, "temperature": 1.0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", SAMPLED | {"prompt": "7a-5b*4>", "logprobs": 0}),
        ("/v1/completions", SAMPLED | {"prompt": ["7a-5b*4>", "1a+5b*4c-3>"], "logprobs": 3, "stop": ["a="]}),
        ("/v1/completions", {"prompt": "7a-5b*4>", "max_tokens": 60, "logprobs": 1, "echo": True}),
        ("/v1/completions", {"prompt": "7a-5b*4>", "logprobs": 1, "return_tokens_as_token_ids": True}),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 0}),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 3, "return_tokens_as_token_ids": True, "temperature": 0.0}),
    ],
)
def test_an_answer_with_log_probs_has_the_bytes_of_plain_vllm_but_for_its_numbers(
    server: Server, plain: Server, path: str, body: dict[str, Any]
) -> None:
    """Numbers differ from run to run in their last places."""
    body = {"model": "tiny", "seed": 3} | body
    ours = httpx.post(f"{server.url}{path}", json=body, headers={"X-Darts-Policy": "off"}, timeout=240)
    theirs = httpx.post(f"{plain.url}{path}", json=body, timeout=240)
    assert (ours.status_code, theirs.status_code) == (200, 200), (ours.text, theirs.text)
    assert "logprob" in theirs.text
    assert masked(ours.text) == masked(theirs.text)


def masked(answer: str) -> str:
    """Return an answer without its id, its time, the name of its model, and the digits of its log-probs."""
    answer = re.sub(r'"(id|request_id|model)":"[^"]*"|"created":\d+|"system_fingerprint":"[^"]*"', "", answer)
    return re.sub(r"-?\d+\.\d+(e-\d+)?", "NUMBER", answer)


def test_the_server_has_all_routes_of_vllm(server: Server, plain: Server) -> None:
    ours, theirs = (set(httpx.get(f"{s.url}/openapi.json", timeout=240).json()["paths"]) for s in (server, plain))
    assert theirs <= ours
