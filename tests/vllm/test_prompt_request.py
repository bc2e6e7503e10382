"""What is known of a prompt before it runs."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from darts_server.engine.port import RequestTokens
from darts_server.vllm.prompt_request import PromptRequest


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ({"prompt_token_ids": [5, 6, 7]}, 3),
        ({"prompt_token_ids": []}, 1),
        ({"prompt_embeds": "a tensor"}, 1),
        ("a text that is not rendered yet", 1),
    ],
)
def test_a_prompt_counts_by_its_tokens_as_far_as_these_are_known(prompt: Any, tokens: int) -> None:
    assert PromptRequest(prompt, SamplingParams(max_tokens=9), "r").tokens == RequestTokens(tokens, 9)


def key(prompt: Any, **options: Any) -> str:
    return PromptRequest(prompt, SamplingParams(), "r", options).prompt_key


def test_the_same_tokens_have_the_same_key_whether_they_came_as_text_or_not() -> None:
    rendered = {"type": "token", "prompt_token_ids": [5, 6, 7]}
    assert key(rendered | {"prompt": "a text"}) == key(rendered | {"cache_salt": "salt"}) == key(rendered)


def test_prompts_that_differ_in_what_the_model_sees_have_different_keys() -> None:
    tokens = {"prompt_token_ids": [5, 6, 7]}
    keys = [
        key(tokens),
        key({"prompt_token_ids": [5, 6]}),
        key(tokens | {"mm_hashes": {"image": ["a"]}}),
        key(tokens | {"mm_hashes": {"image": ["b"]}}),
        key(tokens, lora_request=LoRARequest("a", 1, "/a")),
        key(tokens, lora_request=LoRARequest("b", 2, "/b")),
        key("a text that is not rendered yet"),
        key("another"),
    ]
    assert len({*keys}) == len(keys)
