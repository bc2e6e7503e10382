"""The unmodified ``openai`` client gets shaped groups."""

from collections import Counter

import httpx
import openai
import pytest

from darts_server.demo.server import Server
from tests.integration.waiting import wait_idle

pytestmark = pytest.mark.engine
PROMPTS = ["7a-5b*4>", "1a+5b*4c-3>", "3a*7b+2c-5d*9>"]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_each_prompt_gets_exactly_n_choices_in_prompt_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS, n=8, max_tokens=200, logprobs=0, extra_body={"return_token_ids": True}
    )
    assert [c.index for c in answer.choices] == list(range(24))
    assert {c.finish_reason for c in answer.choices} <= {"stop", "length"}
    for number, choice in enumerate(answer.choices):
        extra = choice.model_extra or {}
        assert len(extra["prompt_token_ids"]) == len(PROMPTS[number // 8])
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or []) == len(extra["token_ids"])


def test_a_stream_gives_each_choice_whole_and_once(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt=PROMPTS, n=8, max_tokens=200, stream=True, extra_body={"return_token_ids": True}
    )
    finished: Counter[int] = Counter()
    prompts: dict[int, int] = {}
    for chunk in stream:
        for choice in chunk.choices:
            assert choice.finish_reason in ("stop", "length")
            finished[choice.index] += 1
            prompts[choice.index] = len((choice.model_extra or {})["prompt_token_ids"])
    assert finished == Counter(range(24))
    assert prompts == {index: len(PROMPTS[index // 8]) for index in range(24)}


def test_chat_gives_exactly_n_messages_with_log_probs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": PROMPTS[0]}], n=8, max_tokens=200, logprobs=True
    )
    assert [c.index for c in answer.choices] == list(range(8))
    assert all(c.logprobs is not None and c.logprobs.content for c in answer.choices)


def test_prompt_log_probs_come_with_a_shaped_group(server: Server) -> None:
    body = {"model": "tiny", "prompt": PROMPTS[0], "n": 4, "max_tokens": 50, "prompt_logprobs": 0}
    shaped, raw = (
        httpx.post(f"{server.url}/v1/completions", json=body | {"model": name}, timeout=240).json()["choices"]
        for name in ("tiny", "tiny:raw")
    )
    assert len(shaped[0]["prompt_logprobs"]) == len(PROMPTS[0])
    assert [set(p or {}) for p in shaped[0]["prompt_logprobs"]] == [set(p or {}) for p in raw[0]["prompt_logprobs"]]


def test_we_count_as_many_generated_tokens_as_vllm(server: Server, client: openai.OpenAI) -> None:
    def counts() -> tuple[float, float]:
        wait_idle(server)
        return server.metric("darts_tokens_total", kind="generated"), server.metric("vllm:generation_tokens_total")

    ours, theirs = counts()
    client.completions.create(model="tiny", prompt=PROMPTS * 8, n=8, max_tokens=200)
    ours, theirs = (after - before for after, before in zip(counts(), (ours, theirs), strict=True))
    # vLLM counts the steps that are in flight when a candidate is stopped, on a busy machine several; we do not. A
    # third of the candidates is stopped.
    assert 0.8 * theirs <= ours <= theirs
