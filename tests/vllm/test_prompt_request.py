"""What is known of a prompt before it runs."""

from typing import Any

import pytest
from vllm import SamplingParams

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
