import json
from typing import Any

import numpy as np
import pytest

from darts_client import PromptSpec
from darts_client._rollouts_request import RolloutPrompts

from .transcripts import asked

CHAT = [{"role": "user", "content": "hello"}]


def body(prompts: Any = "a", **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asked(prompts, **changes).content)
    return found


@pytest.mark.parametrize(
    ("prompts", "listed"),
    [
        ("a", [{"text": "a"}]),
        (["a", "b"], [{"text": "a"}, {"text": "b"}]),
        ([1, 2], [{"token_ids": [1, 2]}]),
        (np.array([1, 2]), [{"token_ids": [1, 2]}]),
        ([[1], (2, 3)], [{"token_ids": [1]}, {"token_ids": [2, 3]}]),
        (CHAT, [{"messages": CHAT}]),
        ([CHAT, "a"], [{"messages": CHAT}, {"text": "a"}]),
        (PromptSpec("a", key="k"), [{"text": "a", "key": "k"}]),
        ([PromptSpec([1], metadata={}), PromptSpec(CHAT)], [{"token_ids": [1], "metadata": {}}, {"messages": CHAT}]),
    ],
)
def test_prompts_come_in_every_form(prompts: RolloutPrompts, listed: list[dict[str, Any]]) -> None:
    assert body(prompts)["prompts"] == listed


def test_the_tokens_that_were_given_are_known_with_their_groups() -> None:
    assert asked(["a", [1, 2], PromptSpec((3,))]).token_ids == (None, (1, 2), (3,))


def test_the_body_has_what_was_asked_for_and_nothing_else() -> None:
    assert body() == {
        "prompts": [{"text": "a"}],
        "group_size": 2,
        "sampling": {"max_tokens": 16, "temperature": 1.0, "logprobs": True},
        "stream": "groups",
    }


def test_options_are_where_the_server_looks_for_them() -> None:
    made = body(
        seed=0, logprobs=False, sampling={"top_p": 0.9}, policy="darts", budget=12, num_groups=1, chunk_tokens=10
    )
    assert made["sampling"] == {"max_tokens": 16, "temperature": 1.0, "seed": 0, "top_p": 0.9}
    assert (made["policy"], made["budget"], made["num_groups"]) == ({"name": "darts"}, 12, 1)
    assert (made["stream"], made["chunk_tokens"]) == ("tokens", 10)


def test_a_policy_may_be_changed_for_the_batch() -> None:
    policy = {"name": "darts", "redundancy": 2.0}
    assert body(policy=policy)["policy"] == policy


def test_durable_batches_have_a_key_each_or_the_callers() -> None:
    assert asked().key != asked().key
    assert asked(idempotency_key="step 7").key == "step 7"
    assert asked(durable=False).key is None


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "prompts is empty"),
        ("a", {"group_size": 0}, "group_size"),
        ("a", {"durable": False, "idempotency_key": "k"}, "idempotency_key"),
        (PromptSpec("a", metadata={"x": float("nan")}), {}, "JSON"),
    ],
)
def test_mistakes_are_seen_before_anything_is_sent(prompts: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked(prompts, **changes)
