import json
from typing import Any

import pytest

from darts_client import PromptSpec

from .transcripts import build_request


def body(prompts: Any = "a", **changes: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(build_request(prompts, **changes).content)
    return decoded


def test_the_token_ids_of_prompts_are_kept_if_given() -> None:
    assert build_request(["a", [1, 2], PromptSpec((3,))]).token_ids == (None, (1, 2), (3,))


def test_the_body_has_only_the_given_options() -> None:
    assert body() == {
        "prompts": [{"text": "a"}],
        "group_size": 2,
        "sampling": {"max_tokens": 16, "temperature": 1.0, "logprobs": True},
        "stream": "groups",
    }


def test_options_are_where_the_server_expects_them() -> None:
    options = {"policy": "darts", "budget": 12, "num_groups": 1, "chunk_tokens": 10}
    made = body(stream="tokens", seed=0, logprobs=False, top_p=0.9, **options)
    assert made["sampling"] == {"max_tokens": 16, "temperature": 1.0, "seed": 0, "top_p": 0.9}
    assert (made["policy"], made["budget"], made["num_groups"]) == ({"name": "darts"}, 12, 1)
    assert (made["stream"], made["chunk_tokens"]) == ("tokens", 10)
    policy = {"name": "darts", "redundancy": 2.0}
    made = body(policy=policy, carry="restart")
    assert (made["policy"], made["carry"]) == (policy, "restart")
    assert "num_groups" not in made
    options = {"chat_template_kwargs": {"a": False}, "tools": [{}], "continue_final_message": True}
    made = body(add_generation_prompt=False, **options)
    assert {name: made[name] for name in options} == options
    assert made["add_generation_prompt"] is False
    assert body(max_tokens=None)["sampling"]["max_tokens"] is None, "left out it would be 16"


def test_each_durable_batch_has_its_own_key_or_the_callers() -> None:
    assert build_request().idempotency_key != build_request().idempotency_key
    assert build_request(idempotency_key="step 7").idempotency_key == "step 7"
    assert build_request(durable=False).idempotency_key is None


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "prompts is empty"),
        ("a", {"group_size": 0}, "group_size"),
        ("a", {"durable": False, "idempotency_key": "k"}, "idempotency_key"),
        (PromptSpec("a", metadata={"x": float("nan")}), {}, "JSON"),
    ],
)
def test_invalid_arguments_are_rejected_before_a_request(prompts: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_request(prompts, **changes)
