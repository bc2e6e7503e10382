from typing import Any

import numpy as np
import pytest

from darts_client import PromptSpec
from darts_client._prompts import Prompt, RolloutPrompts, list_prompts, list_rollout_prompts

CHAT = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", [{"text": "a"}]),
        (["a", "b"], [{"text": "a"}, {"text": "b"}]),
        ([1, 2], [{"token_ids": [1, 2]}]),
        (np.array([1, 2]), [{"token_ids": [1, 2]}]),
        ([[1], (2, 3)], [{"token_ids": [1]}, {"token_ids": [2, 3]}]),
        (CHAT, [{"messages": CHAT}]),
        ([CHAT, "a"], [{"messages": CHAT}, {"text": "a"}]),
        (PromptSpec("a", key="k"), [{"text": "a", "key": "k"}]),
        (
            PromptSpec(CHAT, tools=[{"a": 1}], chat_template_kwargs={"b": None}, add_generation_prompt=False),
            [
                {
                    "messages": CHAT,
                    "tools": [{"a": 1}],
                    "chat_template_kwargs": {"b": None},
                    "add_generation_prompt": False,
                }
            ],
        ),
        ([PromptSpec([1], metadata={}), PromptSpec(CHAT)], [{"token_ids": [1], "metadata": {}}, {"messages": CHAT}]),
    ],
)
def test_prompts_of_rollouts_may_be_chats_and_have_keys(
    prompts: RolloutPrompts, expected: list[dict[str, Any]]
) -> None:
    assert list_rollout_prompts(prompts) == expected


def test_prompts_of_completions_are_texts_or_token_ids() -> None:
    assert list_prompts("a") == list_prompts(["a"]) == ["a"]
    assert list_prompts((1, 2)) == list_prompts([[1, 2]]) == [[1, 2]]
    mixed: list[Prompt] = [[1], "a"]
    assert list_prompts(mixed) == mixed


def test_no_prompts_and_invalid_token_ids_are_rejected() -> None:
    for take in (list_prompts, list_rollout_prompts):
        with pytest.raises(ValueError, match="prompts is empty"):
            take([])
    with pytest.raises(TypeError):
        list_prompts([[1, 2.5]])  # type: ignore[arg-type]  # what must not work
    with pytest.raises(TypeError):
        list_prompts([1, [2]])  # type: ignore[arg-type]  # what must not work
